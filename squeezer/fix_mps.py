"""`squeezer doctor --fix-mps`: what starts an MPS server for this user."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from squeezer.calibration.mps import DEFAULT_DIRECTORY, PIPE_VARIABLE, MpsError, directory_of, servers_at
from squeezer.calibration.mps_server import CONTROL

LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
START_S = 20.0
"""How long the control daemon may take to start."""


def main_fix_mps(environment: Mapping[str, str], run: bool) -> int:
    """Print the commands that start an MPS server for this user, and execute them if asked to.

    Args:
        environment: whose directories are used, where it names some.
        run: execute them, too.

    Returns:
        The exit status: 1 if that cannot work here, or did not.
    """
    if shutil.which(CONTROL, path=environment.get("PATH")) is None:
        print(f"# {CONTROL} is not on PATH; it comes with NVIDIA's driver")
        return 1
    own = Path(environment.get(PIPE_VARIABLE) or f"{DEFAULT_DIRECTORY}-{os.getuid()}")
    pipes = next(filter(_answers, (directory_of(environment), own)), None)
    if pipes is not None:
        print(f"# there is an MPS control daemon at {pipes}")
    else:
        pipes = own
        logs = Path(environment.get(LOG_VARIABLE) or f"{pipes}-log")
        commands = mps_commands(pipes, logs)
        print("# starts an MPS server for you; to end it: echo quit | " + CONTROL)
        print("\n".join(commands), flush=True)
        if run and not _start(commands, pipes, environment):
            return 1
    print("# in the shell that starts the training job; then, once for each device: squeezer doctor --measure")
    print(f"export {PIPE_VARIABLE}={shlex.quote(str(pipes))}")
    return 0


def _answers(pipes: Path) -> bool:
    """Whether a control daemon is there."""
    with suppress(MpsError):
        servers_at(pipes)
        return True
    return False


def mps_commands(pipes: Path, logs: Path) -> list[str]:
    """The shell commands that start an MPS server with these directories."""
    both = shlex.join([str(pipes), str(logs)])
    return [
        f"mkdir -p -m 700 {both}",
        *(f"test -O {shlex.quote(str(each))}" for each in (pipes, logs)),  # nobody else's
        f"export {PIPE_VARIABLE}={shlex.quote(str(pipes))} {LOG_VARIABLE}={shlex.quote(str(logs))}",
        f"env -u CUDA_VISIBLE_DEVICES {CONTROL} -d",  # or clients would have to number devices anew
    ]


def _start(commands: list[str], pipes: Path, environment: Mapping[str, str]) -> bool:
    """Execute them; returns whether there is a control daemon then."""
    try:
        subprocess.run(["sh", "-exc", "\n".join(commands)], check=True, env=dict(environment), timeout=START_S)
        servers_at(pipes)
    except subprocess.SubprocessError:
        print("# a command failed, so there is no server")
        return False
    except MpsError as error:
        print(f"# {error}")
        return False
    print("# done")
    return True
