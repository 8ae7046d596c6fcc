"""What waits on the device must get through before its process may be ended."""

from ds_hooks.shared.page.layout import DeviceGate, Field


def force_gate(words: "memoryview[int]") -> None:
    """Let everything through that waits on the device. Others may shut it again, so ask again until all has passed."""
    words[Field.PERMIT_LEFT] = words[Field.DEVICE_GATE] = DeviceGate.FORCED
