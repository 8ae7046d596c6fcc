"""A side task's place on a CUDA device, with a PyTorch that only notes what is asked of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trials.side_task.devices as places
from ds_hooks.shared.page import Field
from tests.support.fused_and_solo import OPTIMIZERS
from tests.support.rich_study import RichStudy
from trials.side_task.devices import CONTEXT_BYTES, CpuSideDevice, CudaSideDevice, SideDeviceError, make_side_device

GB = 1 << 30
TOTAL = 80 * GB


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of the device, in order."""
    asked: list[tuple[Any, ...]] = []

    def note(name: str, gives: Any = None) -> None:
        monkeypatch.setattr(torch.cuda, name, lambda *args, **named: asked.append((name, *args)) or gives)

    note("is_available", True)
    note("set_device")
    note("get_device_properties", SimpleNamespace(total_memory=TOTAL, uuid="89f4a2c1-0000-1111-2222-f33344445555"))
    note("set_per_process_memory_fraction")
    note("Stream", SimpleNamespace(cuda_stream=77))
    note("set_stream")
    note("reset_peak_memory_stats")
    note("max_memory_allocated", 1 << 30)
    real_empty = torch.empty

    def empty(*args: Any, **named: Any) -> Any:
        if named.get("device") == torch.device("cuda", 0):
            return asked.append(("empty", *args))
        return real_empty(*args, **named)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(places, "_sleep_while_waiting", lambda: asked.append(("sleep",)))
    return asked


def test_the_host_is_told_to_sleep_before_there_is_a_context_and_the_stream_is_current_before_any_work(
    cuda: list[tuple[Any, ...]],
) -> None:
    make_side_device("cuda", 0.25)
    names = [name for name, *_ in cuda]
    assert names.index("sleep") < names.index("set_device") < names.index("set_stream") < names.index("empty")


def test_the_allocators_share_leaves_room_for_the_context(cuda: list[tuple[Any, ...]]) -> None:
    make_side_device("cuda", 0.25)
    (share,) = [args[0] for name, *args in cuda if name == "set_per_process_memory_fraction"]
    assert share * TOTAL + CONTEXT_BYTES == pytest.approx(0.25 * TOTAL)


def test_the_devices_name_is_a_number(cuda: list[tuple[Any, ...]]) -> None:
    assert CudaSideDevice(0.25)._uuid == 0x89F4A2C1000011112222F33344445555


def test_a_share_that_holds_no_context_is_refused(cuda: list[tuple[Any, ...]]) -> None:
    with pytest.raises(SideDeviceError, match=r"memory_fraction = 0.005 is 410 MiB; a CUDA context alone takes 600"):
        CudaSideDevice(0.005)


def test_without_a_device_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SideDeviceError, match="this PyTorch finds none"):
        make_side_device("cuda", 0.5)


def test_cores_need_nothing() -> None:
    assert isinstance(make_side_device("cpu", 0.5), CpuSideDevice)


SLOPE = 64 << 20  # two trials take no more than one: a sixteenth of that is taken as each one's


@pytest.mark.parametrize(
    ("fails_at", "told", "most"),
    [
        (1, 0, 0),
        (2, 0, 1),
        (3, 0, 1 + int(0.9 * (20 * GB - CONTEXT_BYTES) - GB) // SLOPE),
        (3, 2 * GB, 1 + int(0.9 * 2 * GB - GB) // SLOPE),
        (3, 40 * GB, 1 + int(0.9 * (20 * GB - CONTEXT_BYTES) - GB) // SLOPE),
        (3, GB, 0),
    ],
)
def test_what_one_and_two_trials_take_tells_how_many_fit_into_the_share_and_beside_the_main_job(
    cuda: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, fails_at: int, told: int, most: int
) -> None:
    words = [0] * 64

    def try_out(study: Any, gate: Any, trials: int) -> None:
        words[Field.SIDE_LIMIT_BYTES] = told
        if trials == fails_at:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(places, "try_out", try_out)
    nothing: Any = None
    page: Any = SimpleNamespace(words=words)
    assert CudaSideDevice(0.25).rehearse(nothing, page, nothing) == most


def test_a_study_need_not_know_the_device(cuda: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    data = [(torch.zeros(2, 3), torch.zeros(2))]
    study = RichStudy(lambda n: nn.Linear(3, 1), OPTIMIZERS["adamw"], data)
    place = CudaSideDevice(0.25)
    place._device = torch.device("meta")
    place.adopt(study)
    model = study.model({"n": 0})
    assert model.weight.device.type == "meta"
    study.optimizer({"n": 0}, model)
    assert list(study.batches(0)) == data and len(pinned) == 2
    assert len(list(study.validation())) > 0 and len(pinned) > 2
