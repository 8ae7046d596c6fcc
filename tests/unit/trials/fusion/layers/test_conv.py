"""Convolutions in each of their ways, and how a way is chosen."""

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import RecordingGate, ToyStudy, assert_fused_is_solo, members
from tests.support.layer_cases import LAYERS, batches, before
from trials import TrialGroup
from trials.fusion import autotune
from trials.fusion.layers import conv, recurrent
from trials.fusion.layers.conv import FusedConv
from trials.fusion.rows import Rows, stack_parameters

pytestmark = pytest.mark.usefixtures("only_rules")

NAMES = [
    *("Conv1d {}", "Conv2d {}", "Conv3d {}", "Conv2d {'out_channels': 6, 'groups': 2, 'padding': 1}"),
    *("Conv1d {'kernel_size': 1}", "Conv2d {'kernel_size': 1, 'bias': False, 'padding': 'same'}"),
    *("Conv1d on one example", "ConvTranspose2d {}", "Conv2d {'padding': 1, 'padding_mode': 'reflect'}"),
    "ConvTranspose2d {'out_channels': 6, 'groups': 2, 'padding': 1}",
]


@pytest.mark.parametrize("way", ["grouped", "looped", "product"])
@pytest.mark.parametrize("name", NAMES)
def test_each_way_behind_another_layer(name: str, way: str) -> None:
    shape, make = LAYERS[name]
    with autotune.pinned(way):
        assert_fused_is_solo(lambda n: nn.Sequential(before(name), make(n)), batches(*shape), steps=5)


@pytest.mark.parametrize("way", ["wide", "looped"])
@pytest.mark.parametrize("name", NAMES)
def test_each_way_on_the_shared_input(name: str, way: str) -> None:
    shape, make = LAYERS[name]
    with autotune.pinned(way):
        assert_fused_is_solo(make, batches(*shape), steps=5)


@pytest.mark.parametrize("name", NAMES)
def test_one_trial(name: str) -> None:
    shape, make = LAYERS[name]
    assert_fused_is_solo(lambda n: nn.Sequential(before(name), make(n)), batches(*shape), steps=5, size=1)
    assert_fused_is_solo(make, batches(*shape), steps=5, size=1)


def test_transposed_convolution_to_a_given_size() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(4, 3, 3, stride=2), nn.ConvTranspose2d(3, 4, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.down(x), output_size=x.shape[-2:]) + self.up(x[:, :3], [13, 14]).mean()

    assert_fused_is_solo(lambda n: Model(), batches(2, 4, 6, 6), steps=5)


def test_what_a_tuned_layer_computes_and_trains_is_the_same_in_all_ways() -> None:
    x_K = torch.randn(3, 2, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    found = []
    modules = [nn.Conv2d(4, 4, 1, dtype=torch.float64) for _ in range(3)]
    for way in ("grouped", "looped", "product"):
        parameters = {name: stack_parameters([getattr(m, name) for m in modules]) for name in ("weight", "bias")}
        layer = FusedConv(modules[0], "")
        layer.bind(Rows(parameters, {}, {}, {}, [torch.Generator() for _ in modules], [""] * len(modules)))
        with autotune.pinned(way):
            y, _ = layer.run(x_K, True, True)
        found.append([y, *torch.autograd.grad(y.sin().sum(), [x_K, *parameters.values()])])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-12)


def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A clock that only a way itself moves."""
    passed_ns = [0]
    monkeypatch.setattr(autotune, "time", SimpleNamespace(perf_counter_ns=lambda: passed_ns[0]))
    monkeypatch.setattr(autotune, "_chosen", {})

    def wait(took_ns: int) -> None:
        passed_ns[0] += took_ns

    return wait


def test_the_fastest_way_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = clock(monkeypatch)
    calls: list[str] = []

    def way(name: str, took_ns: int) -> Callable[..., Tensor]:
        def run(x: Tensor) -> Tensor:
            calls.append(name)
            wait(took_ns)
            return x * 2

        return run

    ways = {"slow": way("slow", 50), "fast": way("fast", 20)}
    x = torch.ones(3, requires_grad=True)
    assert autotune.choose("here", ways, x) == "fast"
    assert sorted(set(calls)) == ["fast", "slow"]
    count = len(calls)
    assert autotune.choose("here", ways, x) == "fast"
    assert len(calls) == count
    autotune.choose("here", ways, torch.ones(4))
    assert len(calls) == 2 * count
    with torch.no_grad():
        autotune.choose("here", ways, x)
    assert len(calls) == 3 * count
    assert x.grad is None


def test_a_long_way_is_run_twice_for_its_first_run_is_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = clock(monkeypatch)
    calls: list[str] = []

    def slow(x: Tensor) -> Tensor:
        calls.append("slow")
        wait(10**9)
        return x

    autotune.choose("here", {"slow": slow, "fast": lambda x: x}, torch.ones(1))
    assert calls == ["slow", "slow"]
    calls.clear()

    def cold(x: Tensor) -> Tensor:
        calls.append("cold")
        wait(90 * 10**6 if calls.count("cold") == 1 else 30 * 10**6)
        return x

    def even(x: Tensor) -> Tensor:
        wait(50 * 10**6)
        return x

    assert autotune.choose("there", {"cold": cold, "even": even}, torch.ones(1)) == "cold"


def test_measuring_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_chosen", {})
    random_state = torch.get_rng_state()
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    torch.set_rng_state(random_state)
    seen: list[Any] = []
    weight.register_hook(seen.append)
    autotune.choose("here", {"a": torch.mm, "b": torch.matmul}, x, weight)
    assert torch.equal(random_state, torch.get_rng_state())
    assert x.grad is None and weight.grad is None and not seen


def test_on_a_device_each_run_waits_for_a_bubble_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            asked.append("mark")

        def synchronize(self) -> None:
            asked.append("end")

        def elapsed_time(self, end: object) -> float:
            return {"slow": 3.0, "fast": 2.0}[next(name for name in reversed(asked) if name in ("slow", "fast"))]

    def way(name: str) -> Callable[..., Tensor]:
        return lambda x: (asked.append(name), x)[1]

    monkeypatch.setattr(autotune, "_chosen", {})
    monkeypatch.setattr(autotune, "_is_on_cuda", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    turns = autotune.Turns(lambda: asked.append("ask"), lambda: asked.append("settle"))
    assert autotune.choose("device", {"slow": way("slow"), "fast": way("fast")}, torch.ones(1), turns=turns) == "fast"
    run = ["ask", "mark", "slow", "mark", "settle", "end"]
    assert asked[:-1] == 3 * run + ["ask"] + 3 * [{"slow": "fast"}.get(name, name) for name in run]
    assert asked[-1] == "ask", "what follows in the unit waits, too"


class Sequences(nn.Module):
    """A recurrent layer, as one of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].flatten(1)


@pytest.mark.parametrize(
    ("module", "make"),
    [(conv, lambda n: nn.Sequential(nn.Conv1d(4, 2, 1), nn.Flatten())), (recurrent, lambda n: Sequences())],
    ids=["convolution", "recurrent"],
)
def test_a_layer_measures_its_ways_through_its_groups_gate(
    module: ModuleType, make: Callable[[int], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, asked = RecordingGate(), []

    def measure(situation: object, ways: Sequence[str], *inputs: object, turns: autotune.Turns) -> str:
        unit, asked_before = gate.entered[-1], len(gate.entered)
        turns.again()
        asked.append(gate.entered[asked_before:] == [unit])
        turns.settle()
        return next(iter(ways))

    monkeypatch.setattr(gate, "settle", lambda: asked.append(True))
    monkeypatch.setattr(module, "choose", measure)
    study = ToyStudy(make, "sgd", [(torch.randn(2, 4, 3), torch.zeros(2))])
    group = TrialGroup(study, members(study, range(2)), gate)
    asked.clear()
    group.train_step(torch.randn(2, 4, 3), torch.zeros(2))
    assert len(asked) >= 2 and all(asked), "the unit under way asks once more"


def test_pinned_ways_are_not_measured() -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError("measured")

    with autotune.pinned("b"):
        assert autotune.choose("pinned", {"a": never, "b": never}, torch.ones(1)) == "b"
        with autotune.pinned("c", "a"):
            assert autotune.choose("pinned", {"a": never, "b": never}, torch.ones(1)) == "a"
        assert autotune.choose("pinned", {"only": never}, torch.ones(1)) == "only"
