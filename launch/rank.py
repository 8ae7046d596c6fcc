"""What DeepSpeed starts once per rank: pins the cores, starts this device's daemon, and becomes the training.

    rank.py [--local_rank=N] SCRIPT [ARGUMENT …]
    rank.py [--local_rank=N] --module MODULE [ARGUMENT …]

If anything fails here, the error is printed and the training starts all the same. This file is run by its path and
never imported by a process that runs user code: it replaces itself with `python -m ds_hooks`, which runs the script.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

CONFIG = "SQUEEZER_CONFIG"
"""The configuration's absolute path."""
RUN = "SQUEEZER_RUN"
"""The absolute path of the run's directory."""
PIN_CORES = "SQUEEZER_PIN_CORES"
""""0": somebody else, such as `--bind_cores_to_rank`, has pinned the ranks already."""

_OTHER_SIGNS = ("/dev/kfd", "/dev/davinci0", "/dev/accel")
"""One of these exists where there is an accelerator without CUDA."""


def runs_on_cores(environment: Mapping[str, str], exists: Callable[[str], bool] = os.path.exists) -> bool:
    """Whether the job's device is the CPU: asked for, or nothing else is there. Imports no torch, asks no driver."""
    from squeezer.device import CUDA_SIGNS

    named = environment.get("DS_ACCELERATOR")
    return named == "cpu" or (named is None and not any(exists(sign) for sign in (*CUDA_SIGNS, *_OTHER_SIGNS)))


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Part DeepSpeed's `--local_rank=N` (or None) from the rest: it stands before the script, where it is not ours."""
    if arguments and arguments[0].startswith("--local_rank="):
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


def core_share(cores: Sequence[int], local_rank: int, local_size: int) -> list[int]:
    """The even, contiguous share of `cores` for one of `local_size` ranks; if there are too few, one core in turn."""
    if local_size > len(cores):
        return [cores[local_rank % len(cores)]]
    begin, end = (len(cores) * part // local_size for part in (local_rank, local_rank + 1))
    return list(cores[begin:end])


def daemon_command(python: str, config: str, run: str, local_rank: int, job_pid: int, pid_file: Path) -> list[str]:
    """The command that starts this device's daemon, which ends with process `job_pid`.

    Nothing is imported from the training's working directory (`-P`): a file there may be called as a module of ours.
    """
    daemon = [python, "-P", "-m", "squeezer", "daemon", "--config", config, "--run", run]
    return [*daemon, "--local-rank", str(local_rank), "--job-pid", str(job_pid), "--pid-file", str(pid_file)]


def training_command(python: str, script: Sequence[str], local_rank_option: str | None) -> list[str]:
    """The command that starts the user's script, of whose arguments DeepSpeed's option becomes the first."""
    return [python, "-u", "-m", "ds_hooks", *([local_rank_option] if local_rank_option else []), *script]


def hidden_by() -> str | None:
    """The user's module that Python would run in place of our hooks; None: there is none. Imports nothing of either."""
    spec = PathFinder.find_spec("ds_hooks", [*([] if sys.flags.safe_path else [""]), *sys.path])
    if spec is None:  # ours is not found by a path
        return None
    found = next(iter(spec.submodule_search_locations or [str(spec.origin)]))
    return None if (Path(found) / "step_hooks.py").is_file() else found  # a checkout of ours, where many jobs start


def plain_command(python: str, script: Sequence[str], local_rank_option: str | None) -> list[str]:
    """The command that starts the user's script without hooks, as DeepSpeed does."""
    named = 1 + (script[0] == "--module")
    words = ["-m", script[1]] if named > 1 else [script[0]]
    return [python, "-u", *words, *([local_rank_option] if local_rank_option else []), *script[named:]]


def daemon_environment(environment: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """The daemon's environment: the ranks under one name each, whatever the launcher calls them.

    Records are named by the rank, so that two machines never write one file. The training's own environment stays as
    it is: a script may take `RANK` for a sign that all else of torchrun's is set, too.
    """
    from ds_hooks.shared.processes.ranks import RANK, first_number

    job_rank = first_number(environment, RANK)
    return {
        **environment,
        "RANK": str(local_rank if job_rank is None else job_rank),
        "LOCAL_RANK": str(local_rank),
    }


def daemon_pid_path(directory: Path, local_rank: int) -> Path:
    """The file in which the launcher finds the daemon that it waits for."""
    return directory / f"daemon{local_rank}.pid"


def _pin_cores(local_rank: int, local_size: int) -> None:
    if local_rank >= local_size:
        return  # the launcher does not say how many ranks share the machine, as Flux's, and binds them itself
    share = core_share(sorted(os.sched_getaffinity(0)), local_rank, local_size)
    os.sched_setaffinity(0, share)
    os.environ.setdefault("OMP_NUM_THREADS", str(len(share)))


def _start_daemon(local_rank: int, local_size: int) -> None:
    from ds_hooks.shared.page.file import DIRECTORY_VARIABLE, make_private_dir
    from ds_hooks.shared.processes.identity import why_no_pidfd, why_no_proc
    from squeezer.own_packages import check_own_packages

    if (why := why_no_proc() or why_no_pidfd()) is not None:
        raise OSError(why)
    check_own_packages()  # before any code of a user's module that is called as one of them runs here
    from launch.leftovers import move_records_aside
    from launch.room_for_processes import LEAST_PER_RANK, room_for_processes

    room, needed = room_for_processes(), LEAST_PER_RANK * local_size
    if room is not None and room.left < needed:
        text = f"this job may start {room.left} more processes and threads ({room.limit})"
        raise OSError(f"{text}, which the training may need itself; allowed: {needed} or more")
    directory = Path(os.environ[DIRECTORY_VARIABLE])
    if not directory.parent.exists():  # on a node other than the launcher's
        make_private_dir(directory.parent)
    make_private_dir(directory)  # or refuse what another user has made
    pid_file = daemon_pid_path(directory, local_rank)
    environment = daemon_environment(os.environ, local_rank)
    if not pid_file.exists():  # else DeepSpeed begins again, and continues its records
        move_records_aside(Path(os.environ[RUN]), int(environment["RANK"]))  # on a node whose disk no launcher saw
    command = daemon_command(sys.executable, os.environ[CONFIG], os.environ[RUN], local_rank, os.getpid(), pid_file)
    _start_apart(command, environment, pid_file)


def _start_apart(command: Sequence[str], environment: Mapping[str, str], pid_file: Path) -> None:
    """Start a process that is no child of this one, and note its number.

    This one becomes the training, which may wait until it has no children, or take the end of one for a fault.
    """
    from ds_hooks.shared.processes.priority import leave_real_time

    starter = os.fork()
    if starter == 0:
        status = 1
        try:
            leave_real_time()
            # in a group of its own: what a terminal sends to the job's processes is for the training
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, process_group=0)
            try:
                pid_file.write_text(str(daemon.pid), encoding="ascii")
                status = 0
            except OSError:
                daemon.kill()  # the launcher would not wait for it
                daemon.wait()
                raise
        except OSError as error:
            print(error, file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    with suppress(ChildProcessError):  # whoever started this one has SIGCHLD ignored
        if os.waitpid(starter, 0)[1]:
            raise OSError("it could not be started")


def main() -> None:
    """Prepare, then become the training. Does not return."""
    local_rank_option, script = split_arguments(sys.argv[1:])
    named = local_rank_option.partition("=")[2] if local_rank_option else ""
    own_folder = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != own_folder]  # it holds no modules to import
    hides = hidden_by()
    if hides is not None:
        text = f"{hides} hides our package ds_hooks, so nothing is squeezed; training continues. Rename it"
        print(f"[squeezer] {text}", file=sys.stderr, flush=True)
        command = plain_command(sys.executable, script, local_rank_option)
        os.execv(command[0], command)
    from ds_hooks.shared.processes.ranks import LOCAL_RANK, LOCAL_SIZE, first_number

    local_rank = int(named) if named.isdecimal() else first_number(os.environ, LOCAL_RANK) or 0
    try:
        from squeezer.config import load_config

        config = load_config(os.environ[CONFIG])
        local_size = first_number(os.environ, LOCAL_SIZE) or 1
        if config.run.pin_cores and os.environ.get(PIN_CORES) != "0" and runs_on_cores(os.environ):
            _pin_cores(local_rank, local_size)
        _start_daemon(local_rank, local_size)
    except Exception as error:
        from ds_hooks.shared import logs

        logs.set_up(rank=int(daemon_environment(os.environ, local_rank)["RANK"]))
        text = "no daemon, so nothing is squeezed; training continues"
        logging.getLogger("launch.rank").error("%s: %s: %s", text, type(error).__name__, error)
    command = training_command(sys.executable, script, local_rank_option)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
