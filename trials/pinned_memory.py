"""Pinned memory of the host, from which a device copies by itself."""

import torch
from torch import Tensor

from trials.own_logger import own_logger

log = own_logger(__name__)
_said: list[bool] = []


def copied_to(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor of the host's on a device. The host does not wait until the device has come so far."""
    return in_pinned_memory(tensor).to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def in_pinned_memory(tensor: Tensor) -> Tensor:
    """A copy of a tensor of the host's in pinned memory; the tensor itself where the host has no more of that.

    A device copies from there, too, through memory of its driver's.
    """
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        if not _said:
            log.warning("batches are copied more slowly, as they cannot be pinned: %s", str(error).partition("\n")[0])
        _said.append(True)
        return tensor
