"""What NVIDIA's management library (NVML) says of one device, of which every part may be missing.

No library, no driver, no permission, a call that a device does not support, a device that is gone: the answer is None,
and `why` says why. Nothing here raises, makes a CUDA context, or is on the way of a bubble. A look makes at most
`CALLS_OF_A_LOOK` calls. The package is `nvidia-ml-py`, which is imported as `pynvml`; the main job's hooks never do.

Sources: NVML API reference, "Device Queries"; pynvml.py of nvidia-ml-py 13.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

MIG = "MIG-"
"""What the name of a MIG instance begins with; that of a whole device begins with "GPU-"."""
CALLS_OF_A_LOOK = 8
SLOWED_BY = {
    0x004: "the power cap",
    0x008: "the hardware",
    0x010: "sync boost",
    0x020: "heat (by the driver)",
    0x040: "heat (by the hardware)",
    0x080: "the power brake",
    0x200: "the board's limit",
    0x400: "its reliability limit",
}
"""Bits of the clocks' event reasons. Left out: an idle device, and clocks that somebody has set."""


class ComputeMode(Enum):
    """How many processes may have a context on the device."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What the device's meters say at one time; None: unknown.

    Attributes:
        free_bytes: its free memory.
        utilization: percent of the last sixth to one second in which any kernel ran, on however few multiprocessors.
        sm_mhz: the clock of its multiprocessors.
        memory_mhz: the clock of its memory.
        power_mw: its power, on most devices averaged over a second.
        energy_mj: what it has used since its driver was loaded.
        slowed_by: why its clocks are lower than they could be; see `SLOWED_BY`.
        xid: an error that the driver has reported since the last look.
    """

    free_bytes: int | None = None
    utilization: int | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    power_mw: int | None = None
    energy_mj: int | None = None
    slowed_by: tuple[str, ...] | None = None
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A process that has a context on the device, and what it holds there; None: unknown, as in a container."""

    pid: int
    bytes: int | None


def _load() -> Any:
    import pynvml

    return pynvml


class Nvml:
    """The library.

    Args:
        load: imports it.

    Attributes:
        why_not: why it cannot be used; empty: it can.
    """

    def __init__(self, load: Callable[[], Any] = _load) -> None:
        self.why_not = ""
        self._library: Any = None
        try:
            library = load()
        except (ImportError, OSError, SyntaxError):
            self.why_not = "the Python package nvidia-ml-py is not installed"
            return
        try:
            library.nvmlInit()
        except _errors(library) as error:
            self.why_not = f"NVML does not start: {error}"
            return
        self._library = library

    def driver_version(self) -> str | None:
        """The driver's version."""
        return None if self._library is None else _Asked(self._library).text("nvmlSystemGetDriverVersion")

    def open(self, name: str) -> "Meters | None":
        """A device by its UUID with "GPU-" or "MIG-" before it, or by NVML's number; None: it does not know it.

        Of a UUID with "GPU-" the first characters will do.
        """
        if self._library is None:
            return None
        asked = _Asked(self._library)
        numbered = name.isdecimal()
        call = "nvmlDeviceGetHandleByIndex" if numbered else "nvmlDeviceGetHandleByUUID"
        handle = asked(call, int(name) if numbered else name.encode())
        if handle is None and name.startswith("GPU-"):
            handle = _that_begins_with(name, asked)
        if handle is None:
            return None
        whole = asked("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if name.startswith(MIG) else None
        return Meters(self._library, handle, handle if whole is None else whole)


class Meters:
    """One device, or one MIG instance of it. See `Nvml.open`.

    Args:
        library: pynvml.
        handle: of the device or instance.
        whole: of the device that an instance is a part of; else `handle`. Clocks and modes are the whole's. Power
            and energy are not asked of the whole: others may use the rest of it.
    """

    def __init__(self, library: Any, handle: Any, whole: Any) -> None:
        self._handle, self._whole = handle, whole
        self._ask = _Asked(library)
        self._library = library
        self._events: Any = None

    @property
    def why(self) -> dict[str, str]:
        """Why some calls have given nothing: call -> reason."""
        return self._ask.refused

    @property
    def lost(self) -> str:
        """Why the device is gone; empty: it is not."""
        return self._ask.lost

    def name(self) -> str | None:
        """Its model's name."""
        return self._ask.text("nvmlDeviceGetName", self._handle)

    def uuid(self) -> str | None:
        """Its UUID, with "GPU-" or "MIG-" before it."""
        return self._ask.text("nvmlDeviceGetUUID", self._handle)

    def compute_mode(self) -> ComputeMode | None:
        """How many processes it lets in."""
        mode = self._ask.number("nvmlDeviceGetComputeMode", self._whole)
        return next((each for each in ComputeMode if each.value == mode), None)

    def is_split(self) -> bool | None:
        """Whether it is in MIG mode: contexts are made on instances, not on the whole."""
        modes = self._ask("nvmlDeviceGetMigMode", self._whole)
        return None if modes is None else bool(modes[0])

    def memory(self) -> tuple[int, int] | None:
        """(total, free) bytes."""
        found = self._ask("nvmlDeviceGetMemoryInfo", self._handle)
        return None if found is None else (int(found.total), int(found.free))

    def neighbours(self) -> list[Neighbour] | None:
        """Other processes that compute on it. Their numbers are the host's, which a container does not know."""
        found = self._ask("nvmlDeviceGetComputeRunningProcesses", self._handle)
        if found is None:
            return None
        own = os.getpid()
        return [Neighbour(each.pid, each.usedGpuMemory or None) for each in found if each.pid != own]

    def look(self) -> Look:
        """Read all meters once."""
        ask, whole = self._ask, self._whole
        memory = self.memory()
        rates = ask("nvmlDeviceGetUtilizationRates", self._handle)
        slowed = ask.number("nvmlDeviceGetCurrentClocksEventReasons", whole)
        return Look(
            free_bytes=None if memory is None else memory[1],
            utilization=None if rates is None else int(rates.gpu),
            sm_mhz=ask.number("nvmlDeviceGetClockInfo", whole, self._library.NVML_CLOCK_SM),
            memory_mhz=ask.number("nvmlDeviceGetClockInfo", whole, self._library.NVML_CLOCK_MEM),
            power_mw=ask.number("nvmlDeviceGetPowerUsage", self._handle),
            energy_mj=ask.number("nvmlDeviceGetTotalEnergyConsumption", self._handle),
            slowed_by=None if slowed is None else tuple(text for bit, text in SLOWED_BY.items() if slowed & bit),
            xid=self._xid(),
        )

    def watch_errors(self) -> None:
        """From now on a look gives the driver's errors (Xid), too."""
        events = self._ask("nvmlEventSetCreate")
        if events is not None:
            self._ask("nvmlDeviceRegisterEvents", self._whole, self._library.nvmlEventTypeXidCriticalError, events)
            self._events = None if "nvmlDeviceRegisterEvents" in self.why else events

    def _xid(self) -> int | None:
        if self._events is None:
            return None
        event = self._ask("nvmlEventSetWait_v2", self._events, 0)
        return None if event is None else int(event.eventData)


class _Asked:
    """Calls the library. A call that the device does not support is not made again, nor any once the device is gone."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.refused: dict[str, str] = {}
        self.lost = ""
        self._never: set[str] = set()
        names = ("NotSupported", "FunctionNotFound", "NoPermission")
        self._for_good = tuple(getattr(library, f"NVMLError_{name}") for name in names)
        self._gone = tuple(getattr(library, f"NVMLError_{name}") for name in ("GpuIsLost", "ResetRequired"))

    def __call__(self, call: str, *arguments: Any) -> Any:
        if self.lost or call in self._never:
            return None
        try:
            return getattr(self._library, call)(*arguments)
        except self._library.NVMLError_Timeout:
            return None  # no event
        except _errors(self._library) as error:
            self.refused[call] = str(error)
            if isinstance(error, self._gone):
                self.lost = str(error)
            elif isinstance(error, (*self._for_good, AttributeError)):
                self._never.add(call)
            return None

    def number(self, call: str, *arguments: Any) -> int | None:
        """The answer as a number."""
        found = self(call, *arguments)
        return None if found is None else int(found)

    def text(self, call: str, *arguments: Any) -> str | None:
        """The answer as text, which older versions give as bytes."""
        found = self(call, *arguments)
        return found.decode(errors="replace") if isinstance(found, bytes) else found


def _that_begins_with(name: str, asked: _Asked) -> Any:
    """The device whose UUID begins so: CUDA takes such a name, too."""
    for index in range(asked.number("nvmlDeviceGetCount") or 0):
        handle = asked("nvmlDeviceGetHandleByIndex", index)
        if handle is not None and (asked.text("nvmlDeviceGetUUID", handle) or "").startswith(name):
            return handle
    return None


def _errors(library: Any) -> tuple[type[Exception], ...]:
    """What a call may raise: NVML's own errors, and those of a library older or newer than these bindings."""
    return (library.NVMLError, AttributeError, OSError, TypeError, ValueError)
