"""Verdicts of this machine's devices, kept between runs in the user's state directory.

A verdict holds for a device, its driver and the way to share it: with another driver, or with MPS in place of taking
turns, the device has to be measured again. What an earlier version of this program kept is read with what it lacks
marked so: see `Verdict.is_old`.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from squeezer.calibration.verdict import VERSION, Verdict

DRIVER_FILE = Path("/proc/driver/nvidia/version")
_NOWHERE = "/dev/null"
"""Nothing can be read or written below it."""


def state_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Where verdicts are kept; a path that cannot exist for a user without a home, such as a container's."""
    homes = (environment.get("HOME", ""), os.path.expanduser("~"))
    places = (environment.get("XDG_STATE_HOME", ""), *(os.path.join(home, ".local/state") for home in homes))
    return Path(next(filter(os.path.isabs, places), _NOWHERE), "bubble-squeezer", "devices.json")


def driver_version(file: Path = DRIVER_FILE) -> str:
    """The version of the kernel's driver; an empty string if it does not say."""
    try:
        words = file.read_text(encoding="utf-8").splitlines()[0].split()
    except (OSError, IndexError):
        return ""
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), "")


def keep(uuid: str, driver: str, verdict: Verdict, *, mps: bool, file: Path) -> None:
    """Keep a verdict, in place of an older one.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:  # another device may be measured at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write(file, {**_read(file), _key(uuid, driver, mps): asdict(verdict)})


def _write(file: Path, kept: dict[str, Any]) -> None:
    new = file.with_suffix(f".{os.getpid()}.tmp")
    new.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    new.replace(file)


def kept(uuid: str, driver: str, *, mps: bool, file: Path) -> Verdict | None:
    """The verdict that holds for this device, this driver and this way; None: it has not been measured."""
    found = _read(file).get(_key(uuid, driver, mps))
    try:
        verdict = Verdict(**found) if driver and found else None
    except TypeError:
        return None  # kept by another version
    return verdict if verdict is not None and _is_ours(verdict) else None


def _is_ours(verdict: Verdict) -> bool:
    """Whether all that is used later is of its type, and means what it means here."""
    numbers = (verdict.margin_ns, verdict.opening_ns, verdict.queue_depth, verdict.version)
    if not (isinstance(verdict.sound, bool) and all(isinstance(each, int) for each in numbers)):
        return False
    return min(numbers) >= 0 and verdict.queue_depth > 0 and verdict.version <= VERSION


def _key(uuid: str, driver: str, mps: bool) -> str:
    uuid = uuid.removeprefix("MIG-").removeprefix("GPU-")  # CUDA does not say that a device is an instance
    return f"{uuid}, driver {driver}, {'MPS' if mps else 'taking turns'}"


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
