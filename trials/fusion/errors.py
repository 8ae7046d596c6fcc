"""The errors of fusion."""

import errno

import torch

_HOST_SIGNS = ("can't allocate memory", "not enough memory", "std::bad_alloc")
"""In the text of PyTorch's errors; for the host's memory it has no class of its own."""


class FuseError(Exception):
    """Trials, or one of their layers, cannot be fused. The message names the module or setting, and what is allowed."""


class RefusedError(FuseError):
    """No way to fuse helps: the forward does something that K trials at once cannot do separately."""


class ApartError(FuseError):
    """Trials that were fused cannot be fused in the way that an audit has chosen; each alone they can be trained."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error` comes from an allocation that failed, on the device or on a host with `side.memory_mb`."""
    if error is None:
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    of_torch = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _HOST_SIGNS)
    return of_system or of_torch or is_out_of_memory(error.__cause__ or error.__context__)


def refused_freezing(where: str) -> RefusedError:
    """Return the error for a forward that freezes a parameter, or trains it again."""
    return RefusedError(
        f"the forward sets requires_grad in {where}, which trials that train at once cannot each do; allowed: "
        "torch.no_grad(), detach(), or to set it before the training"
    )
