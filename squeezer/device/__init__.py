"""The only place on the daemon's side that knows a device kind: one file each, behind `base.Device`."""

from squeezer.device.base import Device, SideProcess
from squeezer.device.cpu import CpuDevice

DEVICES: dict[str, type[Device]] = {"cpu": CpuDevice}
"""Registry by torch's device type."""

__all__ = ["DEVICES", "CpuDevice", "Device", "SideProcess"]
