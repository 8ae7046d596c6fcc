"""Names of commands that moved: each old one ends with one line that says the new one."""

import sys
from typing import NoReturn

from ds_hooks.shared.processes.endings import USER_ERROR_STATUS

MOVED = {
    "python -m benchmarks.claims": "python -m benchmarks.published_figures",
    "python -m benchmarks.clerk_cost": "python -m benchmarks.search_cost",
    "python -m benchmarks.toggle": "python -m benchmarks.shared.toggle",
    "python -m benchmarks.utilization_picture": "python -m benchmarks.utilization.picture",
    "python -m squeezer.replay": "squeezer replay",
    "python -m squeezer.state": "python -m squeezer.policy.state",
    "python -m trials.clerk": "trials close",
    "python -m trials.explain": "trials explain",
    "python -m trials.runner": "trials measure",
    "ds_squeeze daemon": "squeezer daemon",
    "ds_squeeze doctor": "squeezer doctor",
    "ds_squeeze observe": "squeezer observe",
    "ds_squeeze replay": "squeezer replay",
    "ds_squeeze report": "squeezer report",
    "ds_squeeze why": "squeezer why",
    "squeezer best": "trials best",
    "squeezer check": "trials check",
    "squeezer close": "trials close",
    "squeezer deadline": "trials deadline",
    "squeezer explain": "trials explain",
    "squeezer launch": "ds_squeeze",
    "squeezer measure": "trials measure",
    "squeezer rank": "trials rank",
    "squeezer record": "ds_squeeze with record_events = true in [run], then squeezer replay",
    "squeezer run": "ds_squeeze",
    "squeezer shrink": "trials shrink",
    "squeezer squeeze": "ds_squeeze",
    "squeezer state": "python -m squeezer.policy.state",
    "squeezer transfer": "trials transfer",
    "trials clerk": "trials close",
    "trials daemon": "squeezer daemon",
    "trials doctor": "squeezer doctor",
    "trials observe": "squeezer observe",
    "trials queue": "squeezer queue",
    "trials replay": "squeezer replay",
    "trials report": "squeezer report",
    "trials runner": "trials measure",
    "trials submit": "squeezer submit",
    "trials why": "squeezer why",
}
"""Where each command went that had, or might be thought to have, another name."""


def refuse_moved_module() -> None:
    """Exit with one line if Python is about to run, by `-m`, a module that is now a command of another name.

    The packages that had such modules call this. While Python looks for the module to run, it imports the packages
    around it, and `sys.argv` begins with "-m".
    """
    if sys.argv[:1] != ["-m"]:
        return
    old = f"python -m {sys.orig_argv[-len(sys.argv)].removeprefix('-m')}"
    if old in MOVED:
        refuse(old, f"this command has moved; use: {MOVED[old]}")


def refuse(program: str, message: object) -> NoReturn:
    """End the process for a mistake of the user's, with one line.

    Args:
        program: the command as the user typed it.
        message: what is wrong, and what is allowed.
    """
    print(f"{program}: {message}", file=sys.stderr)
    raise SystemExit(USER_ERROR_STATUS)
