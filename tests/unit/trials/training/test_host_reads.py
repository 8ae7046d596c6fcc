"""What a training step reads from the device: on a GPU, the host would wait for each value behind a gate.

There it reads nothing. Elsewhere it reads the losses' sum, once, after the gate has settled: whether a trial is lost
decides if its optimizer steps.
"""

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.fused_and_solo import RecordingGate, ToyStudy, members
from tests.support.optimizer_settings import SETTINGS
from trials import TrialGroup
from trials.optim.facts import rule_of
from trials.training.alive import STEPS_AT_MOST

READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")
"""Methods that give the host a value, or need one for a shape."""
READING_OPERATIONS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "equal", "_unique2")
OWN = f"{Path(__file__).parents[4] / 'trials'}/"


class SettlingGate(RecordingGate):
    """A gate that also writes down when it is settled."""

    def settle(self) -> None:
        self.entered.append("settled")


class _Operations(TorchDispatchMode):
    """Notes the operations that read a value, called by whatever means."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READING_OPERATIONS:
            self._note()
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SettlingGate, list[tuple[str, str]]]]:
    """A gate, and every read of a value: (what the gate was asked last, the line of ours that reads)."""
    gate, found = SettlingGate(), []
    is_reading = False

    def note() -> None:
        ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(OWN)]
        if not is_reading:
            found.append((gate.entered[-1], ours[-1].line or "") if ours else (gate.entered[-1], "not ours"))

    def noting(read: Any) -> Any:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_reading
            note()
            is_reading = True  # its own operations are the same read
            try:
                return read(self, *args, **kwargs)
            finally:
                is_reading = False

        return method

    for name in READS:
        monkeypatch.setattr(Tensor, name, noting(getattr(Tensor, name)))
    with _Operations(note):
        yield gate, found


STEPPED_BY_TORCH = {"asgd", "adafactor"}
"""Optimizers without a rule of ours: each trial's steps by itself, and torch's own code reads its state."""
LAYERS: dict[str, tuple[tuple[int, ...], Callable[[int], nn.Module]]] = {
    "perceptron": ((6, 4), lambda n: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.1 * (n + 1)))),
    "convolutions": (
        (6, 2, 8, 8),
        lambda n: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.GroupNorm(2, 4)),
    ),
    "transformer": ((6, 5, 8), lambda n: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)),
    "recurrent": ((6, 5, 4), lambda n: nn.Sequential(nn.LayerNorm(4), Last(nn.LSTM(4, 3, batch_first=True)))),
}


class Last(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)[0]
        return outputs


def has_rule(name: str) -> bool:
    return rule_of(SETTINGS[name](0, [nn.Parameter(torch.zeros(1))])) is not None


def read_in_a_step(
    reads: tuple[SettlingGate, list[tuple[str, str]]], make: Callable[[int], nn.Module], optimizer: Any, x: Tensor
) -> list[tuple[str, str]]:
    """All reads of the third step: by then kernels are chosen, and the optimizer has its state."""
    gate, found = reads
    study = ToyStudy(make, optimizer, [(x, torch.zeros(len(x)))])
    gate.entered.append("host")
    group = TrialGroup(study, members(study, range(3)), gate)
    for _ in range(3):
        found.clear()
        group.train_step(*study.data[0])
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_of_an_optimizer_reads_the_losses_sum_and_nothing_else(
    name: str, reads: tuple[SettlingGate, list[tuple[str, str]]]
) -> None:
    found = read_in_a_step(reads, lambda n: nn.Linear(4, 3), SETTINGS[name], torch.ones(6, 4))
    if name in STEPPED_BY_TORCH:
        assert {asked for asked, _ in found[1:]} == {"one trial's optimizer step"}
        del found[1:]
    assert [(asked, "watch(losses_K" in line) for asked, line in found] == [("settled", True)], found


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("name", [name for name in SETTINGS if has_rule(name)])
def test_a_step_on_a_device_reads_nothing(name: str, reads: tuple[SettlingGate, list[tuple[str, str]]]) -> None:
    found = read_in_a_step(reads, LAYERS["convolutions"][1], SETTINGS[name], torch.ones(LAYERS["convolutions"][0]))
    assert found == []


@pytest.mark.usefixtures("on_device")
def test_the_host_waits_for_no_step_of_a_device(reads: tuple[SettlingGate, list[tuple[str, str]]]) -> None:
    gate, _ = reads
    study = ToyStudy(lambda n: nn.Linear(4, 3), "adamw", [(torch.ones(6, 4), torch.zeros(6))])
    gate.entered.append("host")
    group = TrialGroup(study, members(study, range(3)), gate)
    for _ in range(STEPS_AT_MOST):
        group.train_step(*study.data[0])
    assert "settled" not in gate.entered
    group.train_step(*study.data[0])
    assert gate.entered.count("settled") == 1, "it has counted enough that it may have to take back"
    assert gate.entered[gate.entered.index("settled") + 1] == "host", "what follows asks the gate again"


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_of_layers_reads_the_losses_sum_and_nothing_else(
    name: str, reads: tuple[SettlingGate, list[tuple[str, str]]]
) -> None:
    shape, make = LAYERS[name]
    found = read_in_a_step(reads, make, "adamw", torch.ones(shape))
    assert [(asked, "watch(losses_K" in line) for asked, line in found] == [("settled", True)], found
