"""Passes taken by recorded graphs, which threads of the host play here: the same as step by step, or not at all."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import RecordingGate, ToyStudy, members, same_bits
from trials import TrialGroup
from trials.fusion.own_code.streams import saved
from trials.fusion.rows import Rows
from trials.training import cuda_graph, group
from trials.training.cuda_graph import PROVEN_STEPS, WARM_UP_STEPS, Captured, Pass

FIRST = 1
"""The step that shows whether all of it runs by rules."""
UNIT = "graph of forward, loss and backward"
WIDTH = 6


class Played:
    """A graph that does again what was recorded, with the same tensors. It keeps its numbers of the host's."""

    replays = 0
    unasked: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, run: Callable[[], Pass], rows: Rows) -> None:
        self._run, self._rows = run, rows
        restore = saved(rows.buffers, rows.generators)
        self.result = run()
        self._gradients = {name: p.grad for name, p in rows.parameters.items() if p.grad is not None}
        restore()

    @classmethod
    def of(cls, run: Callable[[], Pass], rows: Rows, lends: bool) -> tuple[Pass, "Played"]:
        """In place of `cuda_graph.record`."""
        graph = cls(run, rows)
        return graph.result, graph

    def replay(self) -> None:
        Played.replays += 1
        self._rows.forget_gradients()
        with Played.unasked():
            again = self._run()
        for kept, own in zip(self.result, again, strict=True):
            kept.copy_(own)
        for name, gradient in self._gradients.items():
            new = self._rows.parameters[name].grad
            assert new is not None
            gradient.copy_(new)


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Played, "replays", 0)
    monkeypatch.setattr(cuda_graph, "record", Played.of)
    monkeypatch.setattr(group, "can_capture", lambda device: True)


def model(n: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1 + 0.1 * n), nn.Linear(8, 3)
    ).double()


class Plain(ToyStudy):
    """Whose loss can be traced."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)


def data(sizes: tuple[int, ...] = (5,) * 10) -> list[tuple[Tensor, Tensor]]:
    stream = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(size, WIDTH, generator=stream, dtype=torch.float64),
            torch.randn(size, 3, generator=stream, dtype=torch.float64),
        )
        for size in sizes
    ]


class Run:
    """Two groups of the same trials: one that may use graphs, and one that does not."""

    def __init__(self, kind: type[ToyStudy] = Plain, make: Callable[[int], nn.Module] = model, trials: int = 3) -> None:
        self.gate = RecordingGate()
        self.groups = []
        for graphs in (True, False):
            study = kind(make, "adam", data())
            study.cuda_graphs = graphs
            self.groups.append(
                TrialGroup(study, members(study, range(trials)), self.gate if graphs else RecordingGate())
            )
        Played.unasked = staticmethod(self.groups[0]._units.unasked)

    def step(self, *batch: Any) -> None:
        for each in self.groups:
            each.train_step(*batch)

    def assert_same(self) -> None:
        one, other = self.groups
        for row in range(one.size):
            assert same_bits(one.extract(row), other.extract(row))
        assert same_bits(one.losses_K(), other.losses_K())
        assert all(
            torch.equal(a.get_state(), b.get_state())
            for a, b in zip(one._fused.rows.generators, other._fused.rows.generators, strict=True)
        )


def test_steps_are_the_same_in_every_bit() -> None:
    run = Run()
    for batch in data():
        run.step(*batch)
        run.assert_same()
    assert Played.replays == 10 - FIRST - WARM_UP_STEPS


def test_each_shape_of_batches_has_a_graph_up_to_a_limit() -> None:
    run = Run()
    for batch in data((2, 3, 4, 5, 6, 7) * 6):
        run.step(*batch)
    run.assert_same()
    assert Played.replays == cuda_graph.MOST_SHAPES * (6 - WARM_UP_STEPS)


def test_a_replay_is_one_unit() -> None:
    run = Run()
    for batch in data():
        run.gate.entered.clear()
        run.step(*batch)
    assert run.gate.units[0] == UNIT
    assert not any(name.endswith((" forward", " backward")) for name in run.gate.units[1:])


def test_trials_that_leave_and_come() -> None:
    run = Run()
    for batch in data():
        run.step(*batch)
    for each in run.groups:
        each.keep([2, 0])
    for batch in data():
        run.step(*batch)
        run.assert_same()
    for each in run.groups:
        each.add(members(each._study, [5]))
    for batch in data():
        run.step(*batch)
        run.assert_same()
    assert Played.replays == 3 * (10 - WARM_UP_STEPS) - FIRST


def test_trials_whose_memory_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    for batch in data():
        run.step(*batch)
    monkeypatch.setattr(Captured, "_addresses", lambda self: [1, 2])
    for batch in data():
        run.step(*batch)
        run.assert_same()
    assert Played.replays == 2 * (10 - WARM_UP_STEPS) - FIRST


def test_a_learning_rate_that_changes() -> None:
    run = Run()
    for number, batch in enumerate(data()):
        for each in run.groups:
            each.set_lr(1, 0.01 * (1 + number))
        run.step(*batch)
        run.assert_same()


def test_after_a_trial_is_lost_steps_are_ordinary() -> None:
    run = Run(make=lambda n: nn.Sequential(nn.Linear(WIDTH, 3)).double())
    batches = data()
    for number, (x, y) in enumerate(batches):
        if number == 7:
            for each in run.groups:
                each._fused.rows.parameters["0.weight"].data[1] = float("inf")
        run.step(x, y)
        run.assert_same()
    assert Played.replays == 8 - FIRST - WARM_UP_STEPS


def test_a_graph_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Stale(Played):
        def replay(self) -> None:
            super().replay()
            next(iter(self._gradients.values())).mul_(1.01)

    monkeypatch.setattr(cuda_graph, "record", Stale.of)
    run = Run()
    with caplog.at_level("INFO", logger="trials"):
        for batch in data():
            run.step(*batch)
            run.assert_same()
    assert Played.replays == 1
    assert "it gave another gradient of 0.weight than an ordinary step" in caplog.text


def test_what_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def record(run: Callable[[], Pass], rows: Rows, lends: bool) -> tuple[Pass, Played]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(cuda_graph, "record", record)
    run = Run()
    with caplog.at_level("INFO", logger="trials"):
        for batch in data():
            run.step(*batch)
            run.assert_same()
    assert "cannot be recorded: operation not permitted when stream is capturing" in caplog.text


def test_where_a_step_does_not_fit_the_bubbles_no_graph_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingGate, "fits", lambda self, needs_ns: False)
    run = Run()
    for batch in data():
        run.step(*batch)
        run.assert_same()
    assert Played.replays == 0


@pytest.mark.parametrize("fitting", range(1, PROVEN_STEPS + 2))
def test_a_graph_that_fits_no_more_is_not_replayed(monkeypatch: pytest.MonkeyPatch, fitting: int) -> None:
    asked = 0

    def fits(self: RecordingGate, needs_ns: float) -> bool:
        nonlocal asked
        asked += 1
        return asked <= fitting

    monkeypatch.setattr(RecordingGate, "fits", fits)
    run = Run()
    for batch in data():
        run.step(*batch)
        run.assert_same()
    assert Played.replays == fitting


def test_graphs_of_several_shapes_are_several_units() -> None:
    run, names = Run(), {5: "", 3: ""}
    for x, y in data((5, 3) * 7):
        run.gate.entered.clear()
        run.step(x, y)
        names[len(x)] = run.gate.entered[0]
    assert sorted(names.values()) == [UNIT, f"{UNIT}#2"]


def no_room(*given: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_proof_for_which_there_is_no_room_costs_only_the_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for owner, name in ((Played, "replay"), (cuda_graph, "_apart"), (cuda_graph, "record")):
        with monkeypatch.context() as full, caplog.at_level("INFO", logger="trials"):
            caplog.clear()
            full.setattr(owner, name, no_room)
            run = Run()
            for batch in data():
                run.step(*batch)
                run.assert_same()
        assert "out of memory" in caplog.text
        assert not run.groups[0].graphs_ns()


class Counting(Plain):
    """Whose loss depends on how often it was called."""

    calls = 0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        type(self).calls += 1
        return super().loss(outputs, targets) * (1 + type(self).calls // 1000)


class Branching(nn.Module):
    """Whose forward depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if float(x.sum()) > 0 else -y


@pytest.mark.parametrize(
    ("kind", "make"), [(Counting, model), (Plain, lambda n: Branching().double())], ids=["a loss", "a forward"]
)
def test_code_of_the_users_own_is_never_recorded(kind: type[ToyStudy], make: Callable[[int], nn.Module]) -> None:
    run = Run(kind, make)
    for batch in data():
        run.step(*batch)
        run.assert_same()
    assert Played.replays == 0


class Recurs(nn.Module):
    """A layer for which no graph stands."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(WIDTH, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(x.unsqueeze(1))[0][:, 0])
        return y


def test_a_layer_that_was_never_seen_in_a_graph_is_not_recorded() -> None:
    run = Run(make=lambda n: Recurs().double())
    for batch in data():
        run.step(*batch)
        run.assert_same()
    assert Played.replays == 0


def test_graphs_are_dropped_where_the_memory_is_needed() -> None:
    run = Run()
    for batch in data():
        run.step(*batch)
    cuda_graph.forget_all()
    for batch in data():
        run.step(*batch)
        run.assert_same()
    assert Played.replays == 2 * (10 - WARM_UP_STEPS) - FIRST
