"""What the end of one MPS client does to another: ended by its server, or by a signal while it waits or runs.

It starts a server of its own, a main job that runs a kernel every 0.1 s, and side tasks. Run it where nobody else uses
the device: the main job is expected to die of the last. What came of each end is on disk before the next one.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.shared.paths import ROOT
from benchmarks.shared.results import finish, parse, write
from ds_hooks.shared.cuda_driver import DriverError
from ds_hooks.shared.processes.parent import die_with_parent
from squeezer.calibration.limited import ended_when_asked
from squeezer.calibration.measured_device import LateError, MeasuredDevice, Word, until
from squeezer.calibration.mps import MpsError, ask, directory_of, servers_at
from squeezer.calibration.mps_server import NoServerError, mps_server

NAME = "gpu_mps_faults"
CLIENT = f"benchmarks.{NAME}"
_LIMIT_S = 30.0
_LOOK_S, _NAP_S = 1.5, 0.01
_NEW_CLIENTS = 4


def main() -> None:
    """Measure, print, write."""
    if sys.argv[1:2] == ["client"]:
        _client(*sys.argv[2:])
        return
    options: argparse.Namespace = parse(NAME, __doc__ or "")
    runs: list[dict[str, Any]] = []
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="bsq-mps-")))
        try:
            environment = ends.enter_context(mps_server(folder))
        except NoServerError as error:
            sys.exit(f"nothing was measured: {error}")
        for scenario, end in ENDS.items():
            runs.append({"scenario": scenario, **_measure(Clients(folder, environment), *end)})
            if options.json:
                write(NAME, options, runs, _summary(runs))
    finish(NAME, options, runs, _summary(runs))


def _summary(runs: list[dict[str, Any]]) -> dict[str, str]:
    """What became of the main job in each scenario, or why that is not known."""
    return {run["scenario"]: run.get("main_job") or run["error"] for run in runs}


@dataclass(frozen=True, slots=True)
class Client:
    """A process on the device, and the file to which it prints: no reader of that can be held up."""

    process: "subprocess.Popen[bytes]"
    out: Path

    def said(self) -> list[str]:
        """Its lines, once it is killed."""
        self.process.kill()
        self.process.wait(_LIMIT_S)
        return self.out.read_text(encoding="utf-8").splitlines()


class Clients:
    """Starts clients of one server, and kills them in the end.

    Args:
        folder: where they keep their files.
        environment: what makes them clients.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
        self.pipes = directory_of(environment)
        self._started: list[Client] = []

    def start(self, what: str) -> Client:
        """Start one, and wait until it says a line or ends.

        Raises:
            LateError: it does neither.
        """
        own = Path(tempfile.mkdtemp(dir=self._folder))
        out = own / "said"
        command = [sys.executable, "-m", CLIENT, "client", str(own / "words"), what]
        with out.open("wb") as file:
            process = subprocess.Popen(
                command, env=self._environment, stdout=file, preexec_fn=partial(die_with_parent, os.getpid())
            )
        client = Client(process, out)
        self._started.append(client)
        until(lambda: b"\n" in out.read_bytes() or process.poll() is not None, _LIMIT_S, _NAP_S)
        return client

    def kill(self) -> None:
        """Kill all."""
        for client in self._started:
            client.process.kill()
        for client in self._started:
            with suppress(subprocess.TimeoutExpired):  # the driver may keep even who is killed
                client.process.wait(_LIMIT_S)


End = Callable[[Clients, Client], dict[str, Any]]
"""Ends a side task; returns what it saw."""


def _measure(clients: Clients, what: str, end: End) -> dict[str, Any]:
    """What becomes of a main job and of the next clients when a side task ends; or why that is not known."""
    try:
        main_job, side = clients.start("runs"), clients.start(what)
        found = end(clients, side)
        side.process.wait(_LIMIT_S)
        new = _new_clients(clients)
        time.sleep(_LOOK_S)
        lives = main_job.process.poll() is None
        return {**found, "new": new, "main_job": "lives" if lives else "died", "main_job_said": main_job.said()}
    except (LateError, MpsError, OSError, subprocess.SubprocessError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        clients.kill()


def _terminate(clients: Clients, side: Client) -> dict[str, Any]:
    """Its server ends it, then it is killed."""
    pid = side.process.pid
    server = next((server for server in servers_at(clients.pipes) if pid in server.clients), None)
    if server is None:
        raise MpsError("the side task is no client of the server")
    answer = ask(clients.pipes, f"terminate_client {server.pid} {pid}", _LIMIT_S)
    left = [client for server in servers_at(clients.pipes) for client in sorted(server.clients)]
    time.sleep(_LOOK_S)
    side.process.kill()
    return {"answer": answer, "clients": left}


def _signal(number: signal.Signals, clients: Clients, side: Client) -> dict[str, Any]:
    side.process.send_signal(number)
    return {}


ENDS: dict[str, tuple[str, End]] = {
    "terminated": ("waits", _terminate),
    "waits, SIGTERM": ("waits", partial(_signal, signal.SIGTERM)),
    "waits, SIGKILL": ("waits", partial(_signal, signal.SIGKILL)),
    "spins, SIGKILL": ("spins", partial(_signal, signal.SIGKILL)),
}
"""What the side task does, and what ends it. By SIGTERM it exits by itself. The one known to be fatal comes last."""


def _new_clients(clients: Clients) -> list[dict[str, Any]]:
    """Start processes until one can use the device: when, and what the others met."""
    begin_s, found = time.monotonic(), []
    for _ in range(_NEW_CLIENTS):
        said = clients.start("idles").said()
        found.append({"after_s": round(time.monotonic() - begin_s, 2), "said": said})
        if said[:1] == ["ready"]:
            break
    return found


def _client(path: str, what: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # with its work outstanding
    try:
        device = MeasuredDevice.open(Path(path))
        if what == "waits":
            device.wait_for(Word.READY, 1)
            device.kernels.work(device.stream, 1000)
        elif what == "spins":
            device.kernels.receive(device.stream, device.address(Word.READY), 1)
        print("ready", flush=True)
        while what == "runs":
            device.kernels.work(device.stream, 1_000_000)
            device.finish()
            time.sleep(0.1)
    except (DriverError, LateError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return
    time.sleep(2 * _LIMIT_S)


if __name__ == "__main__":
    with ended_when_asked():
        main()
