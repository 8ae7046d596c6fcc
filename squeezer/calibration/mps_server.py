"""An MPS server of our own, for the time of a measurement."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
_START_S, _END_S = 20.0, 20.0
_QUIT_AT_LAST = f"read -r _; echo quit | {CONTROL}"
"""Waits until nobody can write to its input any more, then ends the control daemon and its servers."""


class NoServerError(RuntimeError):
    """No server could be started; the text says why."""


@contextmanager
def mps_server(folder: Path) -> Iterator[dict[str, str]]:
    """Start a server that keeps its sockets and logs in `folder`; give what its clients' environments must have.

    It ends with this process, even if that is killed: a shell at the other end of a pipe then tells the control daemon
    to quit. NVIDIA documents that command as the way to end it, but not what a signal does to it and its servers.

    Raises:
        NoServerError: CUDA's tools are not installed here, or the control daemon does not start.
    """
    directories = {f"CUDA_MPS_{kind}_DIRECTORY": str(folder / f"mps-{kind.lower()}") for kind in ("PIPE", "LOG")}
    for directory in directories.values():
        Path(directory).mkdir()
    environment = {**os.environ, **directories}
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # or clients would have to number devices anew
    quitter = subprocess.Popen(
        ["/bin/sh", "-c", _QUIT_AT_LAST],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _start(environment)
        yield directories
    finally:
        with suppress(subprocess.TimeoutExpired):  # the server may wait for its clients; it ends after them
            quitter.communicate(timeout=_END_S)


def _start(environment: Mapping[str, str]) -> None:
    try:
        subprocess.run([CONTROL, "-d"], check=True, env=dict(environment), timeout=_START_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoServerError(f"no MPS server starts: {error}") from None
