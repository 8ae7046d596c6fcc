"""The port at which the ranks of a job meet."""

import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_GIVEN_BY_THE_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _END = 10_000, 30_000
"""Above these are Kubernetes' services, and what the kernel gives to connections."""
_TRIES = 100


def needs_port(options: Sequence[str], hostfile_exists: bool) -> bool:
    """Whether to choose a free master port: on a single node, unless the user named one, abbreviated or not."""
    return not hostfile_exists and not any(option.startswith("--master_p") for option in options)


def free_port() -> int:
    """Find a TCP port that nobody uses now, and that no connection gets until the job listens there."""
    end = _END
    with suppress(OSError, ValueError):
        end = min(_END, int(_GIVEN_BY_THE_KERNEL.read_text(encoding="ascii").split()[0]))
    for port in random.sample(range(_FIRST, end), min(_TRIES, max(0, end - _FIRST))):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
