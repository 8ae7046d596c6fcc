"""NVIDIA's Multi-Process Service: whose server a process uses, and how a client leaves it before it is killed.

All is asked of the control program, which may hang as its server does, so each question has a limit. Ask only where a
side task starts or ends. We speak the control program's text interface; a control daemon of `--protocol 3` has another
one, and counts as one that lists no server.
"""

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from squeezer.calibration.mps_server import CONTROL

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_DIRECTORY = "/tmp/nvidia-mps"
"""Where CUDA looks for the control daemon unless `PIPE_VARIABLE` names another place."""
LIMIT_S = 2.0
_POLL_S = 0.005
_SERVER_NAME = "nvidia-cuda-mps-server"[:15]
"""As the kernel shows it."""


class MpsError(Exception):
    """There is no server that could be used; the text says why."""


class NoAnswerError(MpsError):
    """The control program took too long, as where many ask at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """The server that a process uses.

    Attributes:
        directory: of the control daemon's pipes.
        pid: of the server, as the control daemon calls it.
        clients: the processes that use it, as the control daemon calls them.
        owner: the server's user; None: `pid` is no such server here.
    """

    directory: Path
    pid: int
    clients: frozenset[int]
    owner: int | None

    @property
    def is_visible(self) -> bool:
        """Whether those numbers mean the same processes here.

        Not if the control daemon runs in another namespace of process ids, such as outside this container; then clients
        can be counted, but not told apart.
        """
        return self.owner is not None

    def is_same(self, other: "Server") -> bool:
        """Whether both are the same server, whoever its clients are."""
        return replace(self, clients=frozenset()) == replace(other, clients=frozenset())


def directory_of(environment: Mapping[str, str]) -> Path:
    """Where a process of that environment looks for the control daemon."""
    return Path(environment.get(PIPE_VARIABLE) or DEFAULT_DIRECTORY)


def has_control(directory: Path) -> bool:
    """Whether there is a control daemon, or was; not where the directory is another user's."""
    return os.path.exists(directory / "control")  # Path.exists raises there


def directory_of_process(pid: int) -> Path:
    """The same for a process that runs; what it has changed in its environment since its start is not seen.

    Raises:
        MpsError: it has ended, or is another user's.
    """
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError as error:
        raise MpsError(f"the environment of process {pid} cannot be read: {error.strerror}") from None
    return directory_of(dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries))


def server_of(pid: int) -> Server:
    """The server that process `pid` is a client of.

    Where numbers of processes mean others here, it cannot be known whose clients they are: that server, if it is the
    only one and has clients, is returned with `is_visible` false.

    Raises:
        MpsError: there is none, or it belongs to another user.
    """
    directory = directory_of_process(pid)
    servers = servers_at(directory)
    for server in servers:
        if pid in server.clients and server.is_visible:
            if server.owner != os.geteuid():
                raise MpsError(f"the MPS server of process {pid} belongs to another user ({server.owner})")
            return server
    if len(servers) == 1 and servers[0].clients and not servers[0].is_visible:
        return servers[0]
    raise MpsError(
        f"process {pid} is not a client of the MPS server at {directory}; it must be started after the control "
        f"daemon, with {PIPE_VARIABLE}={directory}"
    )


def servers_at(directory: Path) -> list[Server]:
    """All servers of the control daemon at `directory`; none before its first client.

    Raises:
        MpsError: there is no control daemon, or it does not answer.
    """
    if not has_control(directory):
        raise MpsError(f"there is no MPS control daemon at {directory}")
    limit_s = time.monotonic() + LIMIT_S  # of all questions together
    return [
        Server(
            directory=directory,
            pid=pid,
            clients=frozenset(_numbers(ask(directory, f"get_client_list {pid}", limit_s - time.monotonic()))),
            owner=_owner(pid),
        )
        for pid in _numbers(ask(directory, "get_server_list", LIMIT_S))
    ]


def terminate_client(server: Server, pid: int, meanwhile: Callable[[], None]) -> bool:
    """Let the server drop a client and the work that it has outstanding.

    A client that is killed with work outstanding is a fatal fault of the server, and so of its other clients.

    Args:
        server: whose.
        pid: of the client's process.
        meanwhile: called every few milliseconds until it is done.

    Returns:
        Whether it was asked to: `pid` was a client, and the control program answered.
    """
    if not server.is_visible:
        return False
    with suppress(MpsError):
        if pid in _numbers(ask(server.directory, f"get_client_list {server.pid}", LIMIT_S, meanwhile)):
            ask(server.directory, f"terminate_client {server.pid} {pid}", LIMIT_S, meanwhile)
            return True
    return False


def ask(directory: Path, command: str, limit_s: float, meanwhile: Callable[[], None] | None = None) -> str:
    """What the control program says to one command.

    Raises:
        MpsError: it is not there, fails, or takes longer than `limit_s`.
    """
    end_s = time.monotonic() + max(limit_s, _POLL_S)
    try:
        process = subprocess.Popen(
            [CONTROL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, PIPE_VARIABLE: str(directory)},
        )
    except OSError as error:
        raise MpsError(f"{CONTROL} cannot be run: {error.strerror}") from None
    with process:
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(f"{command}\n".encode())
        process.stdin = None  # `communicate` may time out before it writes, and would not write later
        while True:
            try:
                said = process.communicate(timeout=_POLL_S)[0].decode(errors="replace")
                break
            except subprocess.TimeoutExpired:
                pass
            if meanwhile is not None:
                meanwhile()
            if time.monotonic() > end_s:
                process.kill()
                raise NoAnswerError(f"{CONTROL} did not answer {command.split()[0]} in time")
    if process.returncode:
        raise MpsError(f"{CONTROL} failed: {said.strip() or process.returncode}")
    return said


def _numbers(said: str) -> list[int]:
    """The lines that are a number; others are greetings or complaints."""
    return [int(line) for line in said.split("\n") if line.strip().isdecimal()]


def _owner(pid: int) -> int | None:
    """The user of the MPS server `pid`; None: there is no such server here."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        status = dict(line.partition(":")[::2] for line in lines)
        if status["Name"].strip() == _SERVER_NAME:
            return int(status["Uid"].split()[1])
    return None
