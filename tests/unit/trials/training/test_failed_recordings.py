"""Recordings that a device cannot end, as PyTorch did until its version 2.12. The device is made up."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import RecordingGate, ToyStudy, members
from trials import TrialGroup
from trials.training import cuda_graph, group
from trials.training.cuda_graph import WARM_UP_STEPS, record

POOL = (0, 7)


class Device:
    """What PyTorch keeps of recordings."""

    def __init__(self) -> None:
        self.under_way: list[Any] = []
        self.pools: list[Any] = []
        self.recording: set[int] = set()
        self.can_end = True
        self.recordings = 0

    def end(self, device: int, pool: Any) -> None:
        if pool not in self.under_way:
            raise RuntimeError("not currently recording")
        self.under_way.remove(pool)

    def release(self, device: int, pool: Any) -> None:
        if pool not in self.pools:
            raise RuntimeError("no such pool")
        self.pools.remove(pool)


class Stream:
    """A random stream, which knows whether it is recorded."""

    def __init__(self, is_recorded: bool = False) -> None:
        self.is_recorded = is_recorded

    def clone_state(self) -> "Stream":
        return Stream(self.is_recorded)

    def graphsafe_set_state(self, other: "Stream") -> None:
        self.is_recorded = other.is_recorded


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made, default = Device(), Stream()

    class Graph:
        def __init__(self) -> None:
            self.streams = [default]

        def register_generator_state(self, stream: Any) -> None:
            self.streams.append(stream)

        def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
            made.recordings += 1
            made.under_way.append(pool)
            made.pools.append(pool)
            for stream in self.streams:
                stream.is_recorded = True

        def capture_end(self) -> None:
            if not made.can_end:
                raise RuntimeError("operation failed due to a previous error during capture")
            made.end(0, POOL)
            for stream in self.streams:
                stream.is_recorded = False

        def reset(self) -> None:
            pass

    monkeypatch.setattr(cuda_graph, "_broken", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (default,))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    return made


class Streams:
    """What a recording reads of the rows."""

    def __init__(self) -> None:
        self.generators = [Stream(), Stream()]


@pytest.mark.parametrize("can_end", [True, False])
def test_a_recording_that_fails_leaves_the_device_as_before(device: Device, can_end: bool) -> None:
    rows: Any = Streams()
    device.can_end = can_end

    def run() -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        record(run, rows, True)
    assert not device.under_way
    assert device.pools == ([POOL] if can_end else []), "the pool of a recording that has ended goes with its graph"
    assert not any(stream.is_recorded for stream in (*rows.generators, *torch.cuda.default_generators))
    assert len(cuda_graph._broken) == (not can_end)


def test_an_end_that_fails_counts_as_failed(device: Device) -> None:
    rows: Any = Streams()
    device.can_end = False
    with pytest.raises(RuntimeError, match="previous error"):
        record(lambda: (torch.zeros(2), torch.zeros(())), rows, True)
    assert not device.under_way and not any(stream.is_recorded for stream in rows.generators)


class Plain(ToyStudy):
    """Whose loss can be traced."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)


def test_after_a_recording_that_could_not_be_ended_none_is_tried(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: Callable[[], Any], rows: Any, lends: bool) -> Any:
        own: Any = Streams()
        return record(lambda: 1 / 0, own, True)

    device.can_end = False
    monkeypatch.setattr(cuda_graph, "record", fail)
    monkeypatch.setattr(group, "can_capture", lambda device: True)
    batch = torch.ones(5, 4), torch.ones(5, 3)
    for _ in range(2):
        study = Plain(lambda n: nn.Linear(4, 3))
        trials = TrialGroup(study, members(study, range(2)), RecordingGate())
        for _ in range(WARM_UP_STEPS + 4):
            trials.train_step(*batch)
    assert device.recordings == 1
