"""How much of a device's memory a client of an MPS server may hold: the driver itself refuses it more.

The variable names devices as the client sees them, "0=2048M,1=1G". A client can only lower what its server allows.

Source: NVIDIA, Multi-Process Service, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT".
"""

import re
from collections.abc import Collection

VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_SHIFTS = {"K": 10, "M": 20, "G": 30, "T": 40}


def cap_text(cap_bytes: int) -> str:
    """The variable's value for the only device that a process sees: whole MiB."""
    return f"0={max(1, cap_bytes >> 20)}M"


def cap_bytes(text: str, names: Collection[str]) -> int | None:
    """What the variable's value `text` allows on a device; None: nothing that could be read.

    Args:
        text: of the variable.
        names: what it may call the device: its number, its UUID.
    """
    for entry in text.split(","):
        device, _, amount = entry.partition("=")
        found = re.fullmatch(r"(\d+) ?([KMGT])B?", amount.strip(), re.IGNORECASE)
        if found is not None and device.strip() in names:
            return int(found[1]) << _SHIFTS[found[2].upper()]
    return None
