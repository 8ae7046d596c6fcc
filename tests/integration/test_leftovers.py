"""What a killed launcher leaves in shared memory goes with the last of its run, and nothing else goes."""

import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.leftovers import close_directory, fresh_directory
from squeezer.daemon.deepspeed_buffers import SHARED_MEMORY, remove_buffers
from squeezer.daemon.run_directory import claim_directory, remove_dead_directory
from tests.support.jobs import STARTING_S, ds_squeeze, environment, free_port, pretrain
from tests.support.paths import ROOT
from tests.support.sandbox import wait_for

pytestmark = pytest.mark.integration

HOLD = """
import mmap, os, sys
buffer = os.open(sys.argv[1], os.O_RDWR)
mapped = mmap.mmap(buffer, mmap.PAGESIZE)
os.close(buffer)
print("mapped", flush=True)
sys.stdin.read()
"""


class Buffers:
    """Files as DeepSpeed makes them for two ranks, in shared memory."""

    def __init__(self, port: int, user: int | None = None, host: str = "127.0.0.1") -> None:
        user = os.getuid() if user is None else user
        names = [f"deepspeed_allreduce_buffer_{user}_{host}_{port}_{rank}" for rank in range(2)]
        self.paths = [SHARED_MEMORY / name for name in names]
        for path in self.paths:
            path.write_bytes(bytes(mmap.PAGESIZE))

    def there(self) -> int:
        return sum(path.exists() for path in self.paths)

    def remove(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)


@pytest.fixture
def port() -> Iterator[int]:
    yield (found := free_port())
    for left in buffers_of(found):
        left.unlink()


def buffers_of(port: int) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{port}_*"))


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bsq-", dir="/tmp") as made:
        yield Path(made) / "place"


def test_buffers_go_only_if_no_process_maps_one_of_them(port: int) -> None:
    buffers = Buffers(port)
    command = [sys.executable, "-c", HOLD, str(buffers.paths[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "mapped\n"
        assert not remove_buffers(port)
        assert buffers.there() == 2
        holder.kill()
    assert remove_buffers(port)
    assert buffers.there() == 0


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_buffers_that_a_starting_job_is_about_to_open_stay(port: int, family: socket.AddressFamily) -> None:
    buffers = Buffers(port)
    try:
        listener = socket.create_server(("", port), family=family)
    except OSError as error:
        pytest.skip(f"no {family.name} here: {error}")
    with listener:
        assert not remove_buffers(port)
        assert buffers.there() == 2
    assert remove_buffers(port)
    assert buffers.there() == 0


def test_buffers_of_other_ports_and_users_stay(port: int) -> None:
    # its port ends with ours; its address does
    others = [Buffers(int(f"1{port}")), Buffers(2, host=f"node_{port}"), Buffers(port, user=os.getuid() + 1)]
    try:
        own = Buffers(port, host="node_1")
        assert remove_buffers(port)
        assert own.there() == 0 and [each.there() for each in others] == [2, 2, 2]
    finally:
        for each in others:
            each.remove()


def test_a_killed_launchers_directory_goes_with_its_buffers_and_not_before_them(port: int, place: Path) -> None:
    directory = fresh_directory(place)
    launcher = claim_directory(directory, port)
    buffers = Buffers(port)
    assert not remove_dead_directory(directory), "its launcher lives"
    os.close(launcher)
    with socket.create_server(("", port)):
        assert not remove_dead_directory(directory), "its rank 0 lives"
        assert buffers.there() == 2
    assert remove_dead_directory(directory)
    assert buffers.there() == 0 and not directory.exists()


def test_a_launcher_that_ends_leaves_no_buffers(port: int, place: Path) -> None:
    directory = fresh_directory(place)
    os.close(claim_directory(directory, port))
    buffers = Buffers(port)
    close_directory(directory, port)
    assert buffers.there() == 0 and not place.exists()


@pytest.mark.slow
def test_a_job_whose_launcher_is_killed_leaves_nothing_in_shared_memory(tmp_path: Path, place: Path) -> None:
    config, run = tmp_path / "squeezer.toml", tmp_path / "run"
    config.write_text(f'[side]\nstudy = "{ROOT}/examples/digits.py"\n[run]\ndirectory = "{run}"\ncalibrate_s = 0.0\n')
    command = ds_squeeze(config, *pretrain(tmp_path / "losses", 1_000_000))
    log = tmp_path / "log"
    with log.open("wb") as output:
        job = subprocess.Popen(
            command, env=environment(place), cwd=tmp_path, stdout=output, stderr=output, start_new_session=True
        )
    try:
        events = [run / f"rank{rank}.events.jsonl" for rank in range(2)]
        wait_for(lambda: all(e.exists() and '"r":"step"' in e.read_text() for e in events), "steps", STARTING_S)
        (lock,) = place.glob("run-*/launcher.lock")
        port = int(lock.read_text().split()[1])
        assert len(buffers_of(port)) == 2, "DeepSpeed reduces in shared memory here"
        job.kill()
        job.wait()
        assert len(buffers_of(port)) == 2 and lock.exists(), "the ranks still train"
        for pid in session(job.pid):
            if "deepspeed.launcher.launch" in " ".join(words(pid)):
                os.kill(pid, signal.SIGTERM)  # it ends the ranks
        wait_for(lambda: not session(job.pid), "the end of all")
        assert buffers_of(port) == [] and not place.exists(), log.read_text()
    finally:
        for pid in session(job.pid):
            os.kill(pid, signal.SIGKILL)


def words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdecimal() else []
        except OSError:
            continue
        if fields and fields[3] == str(leader) and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found
