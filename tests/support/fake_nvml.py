"""NVIDIA's management library as a made-up machine answers: the bindings' own errors and constants, other functions."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

from squeezer.device.nvml import Nvml

MB = 1 << 20
UUID = "89f4a2c1-0000-1111-2222-f33344445555"
GPU, INSTANCE = f"GPU-{UUID}", "MIG-12345678-0000-1111-2222-f33344445555"
NUMBER, INSTANCE_NUMBER = (int(name[4:].replace("-", ""), 16) for name in (GPU, INSTANCE))


class FakeNvml:
    """One device, of which a test sets what it says. What the bindings would not take cannot be called.

    Attributes:
        refuses: function -> the name of the error that it raises.
        calls: the functions that were called.
    """

    free, total = 70_000 * MB, 80_000 * MB
    sm_mhz, memory_mhz = 1980, 2619
    power_mw, energy_mj = 300_000, 10_000_000
    utilization, reasons, mode, split = 90, 0, 0, 0
    xid: int | None = None

    def __init__(self, *, has_instance: bool = False) -> None:
        self.refuses: dict[str, str] = {}
        self.calls: list[str] = []
        self.processes: list[tuple[int, int | None]] = []
        self._known = {GPU: "whole", **({INSTANCE: "instance"} if has_instance else {})}
        self._answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: b"580.65.06",
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByUUID": self._by_uuid,
            "nvmlDeviceGetHandleByIndex": lambda index: self._by_uuid(GPU.encode()) if not index else self._unknown(),
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda handle: "whole",
            "nvmlDeviceGetName": lambda handle: "A made-up device",
            "nvmlDeviceGetUUID": lambda handle: GPU if handle == "whole" else INSTANCE,
            "nvmlDeviceGetComputeMode": lambda handle: self.mode,
            "nvmlDeviceGetMigMode": lambda handle: [self.split, self.split],
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=self.total, free=self.free),
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
                SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes
            ],
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=self.utilization, memory=1),
            "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: self.reasons,
            "nvmlDeviceGetClockInfo": lambda handle, which: {1: self.sm_mhz, 2: self.memory_mhz}[which],
            "nvmlDeviceGetPowerUsage": lambda handle: self._of_whole(handle, self.power_mw),
            "nvmlDeviceGetTotalEnergyConsumption": lambda handle: self._of_whole(handle, self.energy_mj),
            "nvmlEventSetCreate": lambda: "events",
            "nvmlDeviceRegisterEvents": lambda handle, kinds, events: None,
            "nvmlEventSetWait_v2": lambda events, timeout_ms: self._event(),
        }

    def __getattr__(self, name: str) -> Any:
        found = getattr(pynvml, name)  # as an older or newer binding: AttributeError if it has no such function
        if not name.startswith("nvml") or not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            inspect.signature(found).bind(*arguments)  # or a TypeError
            self.calls.append(name)
            if name in self.refuses:
                raise getattr(pynvml, f"NVMLError_{self.refuses[name]}")
            return self._answers[name](*arguments)

        return call

    def _by_uuid(self, uuid: bytes) -> str:
        return self._known.get(uuid.decode()) or self._unknown()

    def _unknown(self) -> str:
        raise pynvml.NVMLError_NotFound

    def _of_whole(self, handle: str, value: int) -> int:
        if handle != "whole":
            raise pynvml.NVMLError_NotSupported
        return value

    def _event(self) -> Any:
        xid, self.xid = self.xid, None
        if xid is None:
            raise pynvml.NVMLError_Timeout
        return SimpleNamespace(eventData=xid)

    def vanish(self) -> None:
        """The device falls off its bus."""
        self.refuses = {name: "GpuIsLost" for name in self._answers}


def nvml_of(fake: FakeNvml) -> Nvml:
    """The library under test on a made-up machine."""
    return Nvml(lambda: fake)
