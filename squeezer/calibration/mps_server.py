"""An MPS server of our own, for the time of a measurement."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
_END_S = 20.0


@contextmanager
def mps_server(folder: Path) -> Iterator[dict[str, str]]:
    """Start a server that keeps its sockets and logs in `folder`; give what its clients' environments must have.

    Raises:
        FileNotFoundError: CUDA's tools are not installed here.
        subprocess.CalledProcessError: it does not start.
    """
    directories = {f"CUDA_MPS_{kind}_DIRECTORY": str(folder / f"mps-{kind.lower()}") for kind in ("PIPE", "LOG")}
    for directory in directories.values():
        Path(directory).mkdir()
    environment = {**os.environ, **directories}
    subprocess.run([CONTROL, "-d"], check=True, env=environment, timeout=_END_S)
    try:
        yield directories
    finally:
        # it may wait for its clients
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([CONTROL], input="quit\n", text=True, check=False, env=environment, timeout=_END_S)
