"""The only place on the daemon's side that knows a device kind: one file each, behind `base.Device`."""

import os
from collections.abc import Callable, Mapping

from squeezer.config import DeviceTable
from squeezer.device.base import (
    PRIORITIES,
    CannotShareError,
    Device,
    SideProcess,
    has_ended,
    is_stopped,
    place_of,
    run_when_idle,
)
from squeezer.device.cpu import CpuDevice
from squeezer.device.cuda import CudaDevice

DEVICES: dict[str, Callable[["memoryview[int]", DeviceTable, int], Device]] = {"cpu": CpuDevice, "cuda": CudaDevice}
"""Registry by torch's device type."""

CUDA_SIGNS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""One of these exists where there is a CUDA device."""

HIDES_ALL = ("", "-1")
"""As the first of `CUDA_VISIBLE_DEVICES`, which ends at what is no device."""


def kind_of(
    config: DeviceTable,
    environment: Mapping[str, str] = os.environ,
    exists: Callable[[str], bool] = os.path.exists,
) -> str:
    """The kind of the main job's device, by what DeepSpeed goes by. Asks no driver: a context would be made."""
    if config.kind != "auto":
        return config.kind
    named = environment.get("DS_ACCELERATOR")
    if named is not None:
        return named if named in DEVICES else "cpu"
    first, _, _ = environment.get("CUDA_VISIBLE_DEVICES", "0").partition(",")
    is_hidden = first.strip() in HIDES_ALL
    return "cuda" if not is_hidden and any(exists(sign) for sign in CUDA_SIGNS) else "cpu"


__all__ = [
    "CUDA_SIGNS",
    "DEVICES",
    "PRIORITIES",
    "CannotShareError",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "SideProcess",
    "has_ended",
    "is_stopped",
    "kind_of",
    "place_of",
    "run_when_idle",
]
