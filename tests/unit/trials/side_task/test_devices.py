"""A side task on a CUDA device, with a PyTorch that only notes what is asked of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_hooks.shared.cuda_driver import CONTEXT_BYTES
from ds_hooks.shared.page.layout import Field
from tests.support.fake_torch_cuda import GB, TOTAL_BYTES, fake_torch_cuda
from tests.support.fused_and_solo import OPTIMIZERS
from tests.support.rich_study import RichStudy
from trials.gate.unit_records import UnitRecords
from trials.optim.several import by_phase
from trials.side_task import devices
from trials.side_task.devices import CpuSideDevice, CudaSideDevice, SideDeviceError, make_side_device
from trials.training.inputs.batches import Pinned
from trials.training.member import build


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of the device, in order."""
    return fake_torch_cuda(monkeypatch)


def test_the_host_is_told_to_sleep_before_there_is_a_context_and_the_stream_is_current_before_any_work(
    cuda: list[tuple[Any, ...]],
) -> None:
    make_side_device("cuda", 0.25)
    names = [name for name, *_ in cuda]
    assert names.index("sleep") < names.index("set_device") < names.index("set_stream") < names.index("empty")


def test_the_allocators_share_leaves_room_for_the_context(cuda: list[tuple[Any, ...]]) -> None:
    make_side_device("cuda", 0.25)
    (share,) = [args[0] for name, *args in cuda if name == "set_per_process_memory_fraction"]
    assert share * TOTAL_BYTES + CONTEXT_BYTES == pytest.approx(0.25 * TOTAL_BYTES)


@pytest.mark.parametrize("depth", [1, 2])
def test_its_gate_queues_as_much_as_was_measured(
    depth: int, cuda: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate: Any = SimpleNamespace(limit_queue=lambda units: cuda.append(("limit", units)))
    monkeypatch.setattr(devices, "CudaDriver", lambda: None)
    monkeypatch.setattr(devices, "CudaGate", lambda *_, **named: cuda.append(("uuid", named["device_uuid"])) or gate)
    monkeypatch.setattr(devices, "die_with_parent", lambda *, wanted: cuda.append(("dies", wanted)))
    page: Any = None
    assert make_side_device("cuda", 0.25, depth).gate(page, UnitRecords(), lambda slot, ns: None) is gate
    assert cuda[-3:] == [("uuid", 0x89F4A2C1000011112222F33344445555), ("limit", depth), ("dies", False)]


def test_the_devices_name_is_a_number(cuda: list[tuple[Any, ...]]) -> None:
    assert CudaSideDevice(0.25)._uuid == 0x89F4A2C1000011112222F33344445555


def test_a_share_that_holds_no_context_is_refused(cuda: list[tuple[Any, ...]]) -> None:
    with pytest.raises(SideDeviceError, match=r"memory_fraction = 0.005 is 410 MiB; a CUDA context alone takes 600"):
        CudaSideDevice(0.005)


@pytest.mark.parametrize(
    ("total", "cap", "may_hold"),
    [
        (TOTAL_BYTES, "0=4G", 4 * GB),
        (TOTAL_BYTES, "0=64G", 20 * GB),
        (4 * GB, "0=4G", 4 * GB),
        (3 * GB, "0=4G", 3 * GB),
    ],
)
def test_its_allocator_stays_below_what_an_mps_server_allows(
    total: int, cap: str, may_hold: int, cuda: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the driver calls that all there is: it is a share already."""
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", cap)
    properties = SimpleNamespace(total_memory=total, uuid=None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert CudaSideDevice(0.25)._limit == may_hold - CONTEXT_BYTES


def test_a_cap_that_holds_no_context_is_named(cuda: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=512M")
    with pytest.raises(SideDeviceError, match=r"0\.25, capped by CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=512M, is 512 MiB"):
        CudaSideDevice(0.25)


def test_without_a_device_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SideDeviceError, match="this PyTorch finds no CUDA device"):
        make_side_device("cuda", 0.5)


def test_cores_need_nothing() -> None:
    assert isinstance(make_side_device("cpu", 0.5), CpuSideDevice)


SLOPE = 64 << 20  # two trials take no more than one: a sixteenth of that is taken as each one's


@pytest.mark.parametrize(
    ("fails_at", "limit_bytes", "most"),
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
    cuda: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, fails_at: int, limit_bytes: int, most: int
) -> None:
    words = [0] * 64

    def try_out(study: Any, asked: Any, trials: int) -> None:
        assert asked is gate, "the main job may have begun its steps by now"
        words[Field.SIDE_LIMIT_BYTES] = limit_bytes
        if trials == fails_at:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(devices, "try_out", try_out)
    nothing: Any = None
    page: Any = SimpleNamespace(words=words)
    gate: Any = object()
    assert CudaSideDevice(0.25).rehearse(nothing, page, gate).trials == most


def pinned(asked: list[tuple[Any, ...]]) -> int:
    return sum(name == "pin_memory" for name, *_ in asked)


def test_a_study_need_not_know_the_device(cuda: list[tuple[Any, ...]]) -> None:
    data = [(torch.zeros(2, 3), torch.zeros(2))]
    study = RichStudy(lambda n: nn.Linear(3, 1), OPTIMIZERS["adamw"], data)
    device = CudaSideDevice(0.25)
    device._device = torch.device("meta")
    device.adopt(study)
    built = build(study, 0, {"n": 0})
    assert built.model.weight.device.type == "meta"
    (optimizer,) = by_phase(built.optimizer).values()
    assert all(p.device.type == "meta" for group in optimizer.param_groups for p in group["params"])
    assert list(study.batches(0)) == data and pinned(cuda) == 2
    assert len(list(study.validation())) > 0 and pinned(cuda) > 2


def test_every_tensor_of_a_batch_is_pinned(cuda: list[tuple[Any, ...]]) -> None:
    x = torch.zeros(2, 3)
    given = [({"a": x, "b": [x.bool(), None, 3]}, ())]
    torch.testing.assert_close(list(Pinned(given)), given)
    assert pinned(cuda) == 2
