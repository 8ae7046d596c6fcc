"""The port that is chosen for a job is free, and stays so until the job listens there."""

import socket
from pathlib import Path

from launch.ports import free_port, needs_port


def test_a_port_is_chosen_on_one_node_unless_the_user_chose() -> None:
    assert needs_port(["--num_gpus", "2"], hostfile_exists=False)
    assert not needs_port(["--master_port", "29500"], hostfile_exists=False)
    assert not needs_port(["--master_port=1"], hostfile_exists=False)
    assert not needs_port(["--num_gpus", "2"], hostfile_exists=True)


def test_the_port_can_be_bound_and_is_none_that_the_kernel_gives_to_connections() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [free_port() for _ in range(50)]
    assert first <= 10_000 or not any(first <= port <= last for port in ports)
    assert len(set(ports)) > 1, "jobs that start at the same time have others"
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports[0]))
