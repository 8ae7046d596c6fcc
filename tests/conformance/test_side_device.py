"""What every side device must do: the cores, a CUDA device that threads play, and a GPU where there is one.

The test is the side task, and plays the main job that holds one long bubble open for it.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu.fake_driver import FakeDriver
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import DeviceGate, Field
from ds_hooks.shared.statuses import Status
from tests.support.fake_torch_cuda import fake_torch_cuda
from tests.support.fused_and_solo import ToyStudy, members
from tests.support.main_job import MainJob
from trials.gate.base import GATE_SIGNALS, HOST_UNIT, Gate, OpenGate
from trials.gate.unit_records import UnitRecords
from trials.side_task import devices
from trials.side_task.devices import CpuSideDevice, CudaSideDevice, SideDevice, make_side_device
from trials.training.group import TrialGroup
from trials.training.scores.objectives import Score

pytestmark = pytest.mark.integration

BUBBLE_MS = 600_000


def cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SideDevice]:
    made = make_side_device("cpu", 0.5)
    assert isinstance(made, CpuSideDevice)
    yield made


def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SideDevice]:
    """Tensors stay on the host, and the gate's stream is a thread."""
    with FakeDriver() as driver:
        fake_torch_cuda(monkeypatch, driver.create_stream())
        monkeypatch.setattr(devices, "CudaDriver", lambda: driver)
        made = make_side_device("cuda", 0.5)
        assert isinstance(made, CudaSideDevice)
        made._device = torch.device("cpu")
        yield made


def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SideDevice]:
    yield make_side_device("cuda", 0.5)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.set_stream(torch.cuda.default_stream())


GPU = pytest.param(
    cuda, marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


@pytest.fixture(params=[cpu, fake_cuda, GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SideDevice]:
    make: Callable[[pytest.MonkeyPatch], Iterator[SideDevice]] = request.param
    yield from make(monkeypatch)


@pytest.fixture
def page(memory_path: Path) -> Iterator[Page]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GATE_SIGNALS)
    made = Page.open(page_path(memory_path / "pages", 0))
    MainJob(made).open(BUBBLE_MS)
    yield made
    while signal.sigtimedwait(GATE_SIGNALS, 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    made.close()


@pytest.fixture
def gate(device: SideDevice, page: Page) -> Iterator[Gate]:
    made = device.gate(page, UnitRecords(), lambda slot, overrun_ns: None)
    yield made
    page.words[Field.DEVICE_GATE] = DeviceGate.FORCED
    assert made.close(), "the page may be unmapped"


def new_study() -> ToyStudy:
    made = ToyStudy(
        lambda n: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
        "adam",
        [
            (torch.ones(5, 3, dtype=torch.float64), torch.zeros(5)),
            (torch.zeros(5, 3, dtype=torch.float64), torch.ones(5)),
        ],
    )
    made.fused = 3
    return made


def scores(study: ToyStudy, gate: Gate) -> Sequence[Score]:
    """Two trials after one epoch."""
    gate.enter(HOST_UNIT)
    group = TrialGroup(study, members(study, range(2)), gate)
    for batch in group.batches(0):
        group.train_step(*batch)
    return group.evaluate()


def bits(study: ToyStudy) -> list[Tensor]:
    """A fresh model, and all batches."""
    (member,) = members(study, [1])
    batches = [tensor for pair in (*study.batches(0), *study.validation()) for tensor in pair]
    return [tensor.detach().cpu() for tensor in (*member.model.state_dict().values(), *batches)]


def test_an_adopted_study_makes_the_same_models_and_batches(device: SideDevice) -> None:
    plain, adopted = new_study(), new_study()
    device.adopt(adopted)
    assert all(torch.equal(one, other) for one, other in zip(bits(plain), bits(adopted), strict=True))


def test_trials_train_through_its_gate_and_give_the_same(device: SideDevice, gate: Gate) -> None:
    study = new_study()
    device.adopt(study)
    assert scores(study, gate) == pytest.approx(scores(new_study(), OpenGate()), rel=1e-9)


def test_a_rehearsal_finds_how_many_trials_fit_and_leaves_no_trace(
    device: SideDevice, page: Page, gate: Gate, capfd: pytest.CaptureFixture[str]
) -> None:
    study = new_study()
    device.adopt(study)
    before = scores(study, gate)
    assert device.rehearse(study, page, gate).trials >= study.rows
    assert capfd.readouterr().err == "", "it found nothing wrong"
    assert scores(study, gate) == before


def test_a_rehearsal_reports_what_is_wrong_and_goes_on(
    device: SideDevice, page: Page, gate: Gate, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    study = new_study()

    def model(params: dict[str, Any]) -> nn.Module:
        raise ArithmeticError("no model today")

    setattr(study, "model", model)  # noqa: B010 - mypy forbids assigning to a method
    device.adopt(study)
    device.rehearse(study, page, gate)
    assert "no model today" in capfd.readouterr().err + caplog.text


def test_nothing_moves_while_the_main_job_has_the_memory_it_needs(device: SideDevice, page: Page, gate: Gate) -> None:
    sent: list[dict[str, Any]] = []
    offload = device.offload(page, gate, lambda **status: sent.append(status))
    if offload is not None:
        offload.step_ended()
        offload.trim()
    assert sent == []


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_what_has_moved_to_the_host_can_be_read_there_and_comes_back(
    device: SideDevice, page: Page, gate: Gate
) -> None:
    weight = nn.Parameter(torch.arange(1 << 20, device="cuda"), requires_grad=False)
    memory = weight.untyped_storage()
    seen: list[tuple[str, int, int]] = []

    def report(status: Status) -> None:
        seen.append((weight.device.type, memory.nbytes(), int(weight.sum())))
        page.words[Field.SIDE_LIMIT_BYTES] = 0

    offload = device.offload(page, gate, report)
    assert offload is not None
    page.words[Field.SIDE_LIMIT_BYTES] = 1
    offload.step_ended()
    total = (1 << 19) * ((1 << 20) - 1)
    assert seen == [("cpu", 0, total), ("cuda", 8 << 20, total)]
    assert weight.untyped_storage() is memory
