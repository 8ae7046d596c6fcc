"""Batches in pinned memory, and what happens where the host has no more of it."""

import pytest
import torch
from torch import Tensor

from trials import pinned_memory
from trials.pinned_memory import copied_to
from trials.training.inputs.batches import Pinned
from trials.training.inputs.trees import stacked


def test_a_copy_to_a_gpu_does_not_make_the_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch waits for the stream, and so at a shut gate, unless it is told not to."""
    asked: list[object] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: asked.append("pinned") or tensor)
    monkeypatch.setattr(Tensor, "to", lambda tensor, device, **how: asked.append((device.type, how)) or tensor)
    copied_to(torch.device("cuda"), torch.ones(2))
    assert asked == ["pinned", ("cuda", {"non_blocking": True})]
    asked.clear()
    copied_to(torch.device("cpu"), torch.ones(2))
    assert asked == [("cpu", {})]


def test_a_host_without_room_for_pinned_memory_trains_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(tensor: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(Tensor, "pin_memory", refuse)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(pinned_memory, "_said", [])
    data = [(torch.ones(2, 3), torch.zeros(2)), (torch.ones(1, 3), torch.zeros(1))]
    read = list(Pinned(data))
    assert all(
        torch.equal(one, other)
        for own, given in zip(read, data, strict=True)
        for one, other in zip(own, given, strict=True)
    )
    assert stacked([torch.ones(2), torch.zeros(2)]).tolist() == [[1, 1], [0, 0]]
    (said,) = caplog.messages
    assert said.endswith("cannot be pinned: CUDA error: out of memory"), "once, and in one line"
