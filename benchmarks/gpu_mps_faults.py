"""What the end of one MPS client does to another: ended by its server, or by a signal while it waits or runs.

It starts a server of its own, a main job that runs a kernel every 0.1 s, and side tasks. Run it where nobody else uses
the device: the main job is expected to die of the last.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.paths import ROOT
from benchmarks.shared.results import finish, parse
from ds_hooks.shared.cuda_driver import DriverError
from squeezer.calibration.measured_device import LateError, MeasuredDevice, Word
from squeezer.calibration.mps_server import CONTROL, mps_server

NAME = "gpu_mps_faults"
_LIMIT_S = 30.0
_LOOK_S = 1.5
_NEW_CLIENTS = 4
_ENDS = (("waits", signal.SIGTERM), ("waits", signal.SIGKILL), ("spins", signal.SIGKILL))


def main() -> None:
    """Measure, print, write."""
    if sys.argv[1:2] == ["client"]:
        _client(*sys.argv[2:])
        return
    options: argparse.Namespace = parse(NAME, __doc__ or "")
    with tempfile.TemporaryDirectory(prefix="bsq-mps-") as folder, mps_server(Path(folder)) as directories:
        runs = [_terminated(Path(folder), directories)]
        for what, signal_number in _ENDS:  # the one that is known to be fatal comes last
            runs.append(_ended(Path(folder), directories, what, signal_number))
    finish(NAME, options, runs, {run["scenario"]: run["main_job"] for run in runs})


def _terminated(folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """A side task waits at a gate; its server ends it, then it is killed."""
    main_job, side = _start(folder, environment, "runs"), _start(folder, environment, "waits")
    server = _ask(environment, "get_server_list").split()[0]
    answer = _ask(environment, f"terminate_client {server} {side.pid}")
    clients = _ask(environment, f"get_client_list {server}").split()
    time.sleep(0.3)
    side.kill()
    side.wait()
    new = _new_clients(folder, environment)
    return {"scenario": "terminated", "answer": answer, "clients": clients, "new": new, **_end(main_job)}


def _ended(folder: Path, environment: Mapping[str, str], what: str, number: int) -> dict[str, Any]:
    """A side task waits at a gate, or its kernel runs, and a signal ends it; by SIGTERM it exits by itself."""
    main_job, side = _start(folder, environment, "runs"), _start(folder, environment, what)
    side.send_signal(number)
    side.wait(_LIMIT_S)
    new = _new_clients(folder, environment)
    return {"scenario": f"{what}, {signal.Signals(number).name}", "new": new, **_end(main_job)}


def _new_clients(folder: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Start processes until one can use the device: when, and what the others met."""
    begin_s, found = time.monotonic(), []
    for _ in range(_NEW_CLIENTS):
        client = _start(folder, environment, "idles")
        client.kill()
        found.append({"after_s": round(time.monotonic() - begin_s, 2), "said": _said(client)})
        if client.first_line == "ready":
            break
    return found


def _end(main_job: "Client") -> dict[str, Any]:
    time.sleep(_LOOK_S)
    lives = main_job.poll() is None
    main_job.kill()
    return {"main_job": "lives" if lives else "died", "main_job_said": _said(main_job)}


class Client(subprocess.Popen[str]):
    """A process on the device, and the first line that it said."""

    first_line = ""


def _start(folder: Path, environment: Mapping[str, str], what: str) -> Client:
    words = tempfile.mktemp(prefix="words-", dir=folder)
    command = [sys.executable, "-m", f"benchmarks.{NAME}", "client", words, what]
    client = Client(
        command, env={**os.environ, **environment, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    client.first_line = client.stdout.readline().strip()
    return client


def _said(client: Client) -> list[str]:
    rest, _ = client.communicate(timeout=_LIMIT_S)
    return [client.first_line, *rest.splitlines()[-1:]]


def _ask(environment: Mapping[str, str], line: str) -> str:
    answer = subprocess.run(
        [CONTROL],
        input=f"{line}\n",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=_LIMIT_S,
    )
    return answer.stdout


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
    main()
