"""Passes taken by graphs that see nothing of what the host changes after they were recorded."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.frozen_graph import Frozen
from tests.support.fused_and_solo import RecordingGate, ToyStudy, members, same_bits
from trials import TrialGroup
from trials.fusion.rows import Rows
from trials.optim import block
from trials.training import cuda_graph, group, step_graph
from trials.training.cuda_graph import PROVEN_STEPS, WARM_UP_STEPS, Pass
from trials.training.step_graph import StepGraphs

BEFORE = 1 + WARM_UP_STEPS + PROVEN_STEPS + 1
"""After so many steps, a graph stands for those that follow."""
WIDTH = 6


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(run: Callable[[], Pass], rows: Rows, lends: bool) -> tuple[Pass, Frozen]:
        graph = Frozen(run, rows)
        return graph.result, graph

    monkeypatch.setattr(Frozen, "replays", 0)
    monkeypatch.setattr(cuda_graph, "record", record)
    monkeypatch.setattr(group, "can_capture", lambda device: True)


class Plain(ToyStudy):
    """Whose loss can be traced."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)


def drops_first(n: int) -> nn.Module:
    return nn.Sequential(nn.Dropout(0.1 + 0.1 * n), nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def made(count: int, *shape: int) -> list[tuple[Tensor, Tensor]]:
    stream = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(*shape, WIDTH, generator=stream, dtype=torch.float64),
            torch.randn(*shape, 3, generator=stream, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def assert_same(
    batches: Sequence[Any],
    optimizer: Any = "adam",
    make: Callable[[int], nn.Module] = drops_first,
    study: type[ToyStudy] = Plain,
) -> None:
    """Train by graphs, and without: all is the same after each step."""
    groups = []
    for graphs in (True, False):
        own = study(make, optimizer)
        own.cuda_graphs = graphs
        groups.append(TrialGroup(own, members(own, range(3)), RecordingGate()))
    one, other = groups
    for batch in batches:
        for each in groups:
            each.train_step(*batch)
        assert same_bits(one.losses_K(), other.losses_K())
        for row in range(one.size):
            assert same_bits(one.extract(row), other.extract(row))


def test_steps_are_the_same_in_every_bit() -> None:
    assert_same(made(10, 5))
    assert Frozen.replays == 10 - 1 - WARM_UP_STEPS


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[StepGraphs]:
    """The optimizers that step by graphs, as on a device: without the single-pass kernels of a CPU."""
    found: list[StepGraphs] = []
    run = StepGraphs.run

    def seen(self: StepGraphs, *args: Any) -> None:
        found.append(self)
        run(self, *args)

    monkeypatch.setattr(block, "SinglePass", type(None))
    monkeypatch.setattr(StepGraphs, "run", seen)
    return found


OPTIMIZERS: dict[str, Callable[[int, Any], torch.optim.Optimizer]] = {
    "Adam": lambda n, parameters: torch.optim.Adam(parameters, lr=0.01 * (n + 1), weight_decay=0.1),
    "AdamW": lambda n, parameters: torch.optim.AdamW(parameters, lr=0.01 * (n + 1), amsgrad=True),
    "SGD": lambda n, parameters: torch.optim.SGD(parameters, lr=0.01 * (n + 1), momentum=0.9, maximize=True),
    "NAdam": lambda n, parameters: torch.optim.NAdam(parameters, lr=0.01 * (n + 1)),
    "RAdam": lambda n, parameters: torch.optim.RAdam(parameters, lr=0.01 * (n + 1)),
    "RMSprop": lambda n, parameters: torch.optim.RMSprop(parameters, lr=0.01 * (n + 1), momentum=0.5, centered=True),
    "Adagrad": lambda n, parameters: torch.optim.Adagrad(parameters, lr=0.01 * (n + 1), lr_decay=0.1),
    "Adamax": lambda n, parameters: torch.optim.Adamax(parameters, lr=0.01 * (n + 1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_the_optimizer_by_graph(steps: list[StepGraphs], name: str) -> None:
    count = BEFORE + PROVEN_STEPS + 4
    assert_same(made(count, 5), OPTIMIZERS[name])
    assert len(steps) > PROVEN_STEPS
    assert Frozen.replays == count - 1 - WARM_UP_STEPS + len(steps)


class Scheduled(Plain):
    """Whose rates change at each step, and whose gradients are clipped by norm and by value."""

    scheduler_every = "step"

    def scheduler(self, params: dict[str, Any], optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def clip_norm(self, params: dict[str, Any]) -> float | None:
        return 0.05 * (1 + params["n"])

    def clip_value(self, params: dict[str, Any]) -> float | None:
        return 0.02


def test_steps_by_graph_with_rates_that_change_and_clipping(steps: list[StepGraphs]) -> None:
    count = BEFORE + PROVEN_STEPS + 4
    assert_same(made(count, 5), OPTIMIZERS["Adam"], study=Scheduled)
    assert Frozen.replays == count - 1 - WARM_UP_STEPS + len(steps)


def test_a_trial_that_is_lost_is_left_as_it_is(steps: list[StepGraphs]) -> None:
    """Its last step has begun by graph, and ends without."""
    batches = made(BEFORE + PROVEN_STEPS + 6, 5)
    batches[-3][0][0, 0] = float("inf")
    assert_same(batches, OPTIMIZERS["Adam"])
    assert len(steps) >= PROVEN_STEPS + 2


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_where_the_device_finds_a_lost_trial_the_others_go_on_by_graph(steps: list[StepGraphs], name: str) -> None:
    batches = made(BEFORE + PROVEN_STEPS + 6, 3, 5)
    batches[-3][0][1, 0] = float("inf")  # of one trial, whose last step that is
    assert_same([(*batch, True) for batch in batches], OPTIMIZERS[name])
    assert len(steps) == len(batches) - 1 - WARM_UP_STEPS - PROVEN_STEPS
    assert Frozen.replays == len(batches) - 1 - WARM_UP_STEPS + len(steps)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_queued_ungated_after_a_recording(
    steps: list[StepGraphs], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Settled(RecordingGate):
        """Knows whether it was asked since all had ended."""

        asked = True

        def enter(self, unit: int) -> None:
            self.asked = True

        def settle(self) -> None:
            self.asked = False

    gate = Settled()
    found: list[bool] = []
    recordings: list[Any] = []
    ordinary, replay, record = StepGraphs._ordinary, Frozen.replay, cuda_graph.record

    def recorded(run: Callable[[], Any], rows: Rows, lends: bool) -> Any:
        recordings.append(run)
        if fails and len(recordings) > 1:  # the first is of the pass
            raise RuntimeError("operation not permitted when stream is capturing")
        try:
            return record(run, rows, lends)
        finally:
            found.clear()  # what was recorded was not done

    def seen(do: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            found.append(gate.asked)
            do(*args)

        return run

    monkeypatch.setattr(cuda_graph, "record", recorded)
    monkeypatch.setattr(StepGraphs, "_ordinary", seen(ordinary))
    monkeypatch.setattr(Frozen, "replay", seen(replay))
    study = Plain(drops_first, OPTIMIZERS["Adam"])
    trials = TrialGroup(study, members(study, range(3)), gate)
    for batch in made(BEFORE + PROVEN_STEPS + 2, 5):
        trials.train_step(*batch)
    assert len(recordings) == 2 and found and all(found)


def test_a_step_whose_graph_is_stale_is_found(
    steps: list[StepGraphs], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Coefficients that are not copied in are those of the step that was recorded."""
    monkeypatch.setattr(step_graph._Step, "copy_in", lambda self: None)
    with caplog.at_level("INFO", logger="trials"):
        assert_same(made(BEFORE + PROVEN_STEPS + 4, 5), OPTIMIZERS["Adam"])
    assert "it gave other weights than an ordinary step" in caplog.text


def test_batches_in_another_order_in_memory() -> None:
    batches = [(x if number < BEFORE else x.mT.contiguous().mT, y) for number, (x, y) in enumerate(made(14, 5))]
    assert_same(batches)
    assert Frozen.replays > PROVEN_STEPS


def test_a_batch_for_all_trials_of_the_shape_of_one_for_each() -> None:
    assert_same([(*batch, number >= BEFORE) for number, batch in enumerate(made(14, 3, 5))])
    assert Frozen.replays > PROVEN_STEPS


def test_inputs_that_take_gradients_keep_them() -> None:
    x, y = made(1, 5)[0]
    found = []
    for graphs in (True, False):
        study, own = Plain(drops_first), x.clone().requires_grad_()
        study.cuda_graphs = graphs
        trials = TrialGroup(study, members(study, range(3)), RecordingGate())
        for _ in range(BEFORE + 2):
            trials.train_step(own, y)
        found.append(own.grad)
    assert same_bits(*found)


class Heavy(torch.optim.Optimizer):
    """Whose step also goes along the last gradient, which it keeps without a copy."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups:
            for p in each["params"]:
                before = self.state[p].get("before", p.grad)
                p.sub_(each["lr"] * (p.grad + 0.5 * before))
                self.state[p]["before"] = p.grad


def test_an_optimizer_that_keeps_gradients() -> None:
    assert_same(made(10, 5), lambda n, parameters: Heavy(parameters, 0.01 * (n + 1)))


class Drops(nn.Module):
    """Whose own code drops."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), 0.3, self.training)


def around(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), *layers, nn.Linear(8, 3))


def indices(count: int, *shape: int) -> list[Any]:
    """Batches for a table: of all trials, or of three trials each."""
    return [
        (torch.randint(9, shape), torch.ones(*shape, 3, dtype=torch.float64) * number, len(shape) > 1)
        for number in range(count)
    ]


def table(**settings: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(9, WIDTH, **settings), nn.Linear(WIDTH, 3))


@pytest.mark.parametrize(
    ("make", "batches"),
    [
        (lambda n: Drops(), made(10, 5)),
        (lambda n: around(nn.LeakyReLU(0.3), nn.LayerNorm(8), nn.Dropout(0.1 * n)), made(10, 5)),
        (lambda n: around(nn.BatchNorm1d(8, momentum=None)), made(10, 5)),
        (lambda n: table(), indices(10, 5)),
    ],
)
def test_no_number_of_the_hosts_is_copied_where_all_trials_have_the_same(
    make: Callable[[int], nn.Module], batches: Sequence[Any]
) -> None:
    assert_same(batches, make=lambda n: make(n).double())
    assert Frozen.replays == 10 - 1 - WARM_UP_STEPS


@pytest.mark.parametrize(
    ("make", "batches"),
    [
        (lambda n: around(nn.LeakyReLU(0.1 + 0.1 * n)), made(10, 5)),
        (lambda n: around(nn.BatchNorm1d(8, momentum=0.1 + 0.1 * n)), made(10, 5)),
        (lambda n: around(nn.LayerNorm(8, eps=10.0 ** (-5 + n))), made(10, 5)),
        (lambda n: table(), indices(10, 3, 5)),
        (lambda n: table(max_norm=1.0), indices(10, 5)),
    ],
)
def test_what_no_device_records_is_not_tried(
    make: Callable[[int], nn.Module], batches: Sequence[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="trials"):
        assert_same(batches, make=lambda n: make(n).double())
    assert not Frozen.replays and "CUDA graph" not in caplog.text
