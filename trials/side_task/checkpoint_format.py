"""A trial on disk. PyTorch reads a file with flipped bits without complaint, so a digest stands in front of it."""

import hashlib
import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ds_hooks.shared.private_file import open_private
from trials.fusion.errors import FuseError, is_out_of_memory
from trials.training.trial_state import TrialState

MAGIC = b"squeezer trial 1\n"
"""Names the format; another one gets another number."""

_DIGEST_BYTES = 32


class CheckpointError(Exception):
    """A file is no checkpoint, or not what was written. The message names it."""


def save(state: TrialState, path: Path) -> None:
    """Write a checkpoint. It is not on disk for sure before an `fsync`.

    Raises:
        FuseError: the trial keeps what cannot be saved.
        OSError: such as a full disk.
    """
    try:
        content = _bytes(state.plain())
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise FuseError(f"{error}; allowed in schedulers: numbers, text, tensors and plain containers") from error
    with open(path, "wb", opener=open_private) as file:
        file.write(MAGIC + hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest())
        file.write(content)


def load(path: Path) -> TrialState:
    """Read a checkpoint, onto the host.

    Raises:
        CheckpointError: it is torn, damaged or of another format, such as a later PyTorch's.
        OSError: it cannot be read.
    """
    raw = path.read_bytes()
    if not raw.startswith(MAGIC):
        raise CheckpointError(f"{path}: no checkpoint of this version")
    content = memoryview(raw)[len(MAGIC) + _DIGEST_BYTES :]
    if hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() != raw[len(MAGIC) :][:_DIGEST_BYTES]:
        raise CheckpointError(f"{path}: torn or damaged, its digest differs")
    try:
        return TrialState.from_plain(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    except Exception as error:  # it is whole, so another version of PyTorch, or of ours, has written it
        if is_out_of_memory(error):
            raise
        raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error


def save_weights(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a `state_dict`, which ``torch.load(path, weights_only=True)`` reads.

    Raises:
        OSError: such as a full disk.
    """
    content = _bytes({name: tensor.cpu() for name, tensor in weights.items()})
    with open(path, "wb", opener=open_private) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _bytes(value: Any) -> memoryview:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()
