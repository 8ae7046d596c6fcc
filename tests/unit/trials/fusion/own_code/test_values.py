"""Code under `vmap` that asks for values: it goes on where all trials have the same answer, and else trials loop."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import RecordingGate, Solo, ToyStudy, assert_fused_is_solo, assert_same_trial, members
from trials import TrialGroup
from trials.fusion.own_code.values import MOST_UNLIKE

QUESTIONS: dict[str, Callable[[Tensor], bool]] = {
    "bool": lambda y: bool(y.isfinite().all()),
    "contains": lambda y: 1e9 not in y,
    "item": lambda y: y.isnan().sum().item() == 0,
    "tolist": lambda y: not any(y.isnan().any(1).tolist()),
    "int": lambda y: int(y.isnan().sum()) == 0,
    "float": lambda y: float(y.isnan().sum()) == 0.0,
    "index": lambda y: range(1, 9)[y.isnan().sum()] == 1,
    "equal": lambda y: torch.equal(y, y.clone()) and torch.allclose(y, y),
}


class Asks(nn.Module):
    """Asks its batch before, and its activations behind a layer."""

    def __init__(self, n: int, asks: str) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(3, 3), nn.Dropout(0.1 * n), nn.Linear(3, 2)
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 100:
            x = x / 2
        with torch.profiler.record_function("asks"):  # an operator, but it draws nothing
            y = self.drop(self.a(x))
        return self.b(y.tanh() if QUESTIONS[self.asks](y) else y)


@pytest.mark.parametrize("asks", QUESTIONS)
def test_one_answer_of_all_trials_lets_vmap_go_on(asks: str) -> None:
    group = assert_fused_is_solo(lambda n: Asks(n, asks), [torch.randn(4, 3), torch.randn(5, 3)])
    ways = dict(group.ways())
    assert ways["Asks as a whole"].startswith("vmap: model Asks cannot be traced")
    assert ways["a.Linear"] == "rule FusedLinear"


class Scaled(nn.Module):
    """Its graph has a number, which only one trial has, or one batch that all share."""

    def __init__(self, of_batch: bool) -> None:
        super().__init__()
        self.of_batch, self.a, self.drop = of_batch, nn.Linear(3, 3), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.a(x))
        return y * (x if self.of_batch else y).mean().item()


@pytest.mark.parametrize("of_batch", [True, False])
def test_a_graph_that_fails_for_another_kind_of_batch_is_left(of_batch: bool) -> None:
    stream = torch.Generator().manual_seed(1)
    x_KB, y = torch.randn(3, 4, 3, dtype=torch.float64, generator=stream), torch.zeros(4)
    study = ToyStudy(lambda n: Scaled(of_batch).double(), "sgd", [(x_KB[0], y)])
    first = range(3) if of_batch else range(1)
    group, solos = TrialGroup(study, members(study, first), RecordingGate()), [Solo(study, n) for n in range(3)]
    group.train_step(x_KB[0], y)
    assert dict(group.ways())["a.Linear"] == "rule FusedLinear" and len(list(group.ways())) == 2
    for number in first:
        solos[number].step(x_KB[0], y)
    if not of_batch:
        group.add(members(study, [1, 2]))
    group.train_step(x_KB, y.expand(3, 4), per_trial=True)
    for row, solo in enumerate(solos):
        solo.step(x_KB[row], y)
        assert_same_trial(group, row, solo)


def test_different_answers_loop() -> None:
    class Unlike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.a(x)
            return y * 2 if y.sum().item() > 0 else y

    group = assert_fused_is_solo(lambda n: Unlike(), [torch.randn(4, 3)])
    way = "loop over trials: UnlikeError: the code asks for values ('item'), and trials have different ones"
    assert dict(group.ways())["Unlike as a whole"] == way


def test_a_batch_for_which_answers_differ_loops_and_the_next_does_not() -> None:
    study, gate = ToyStudy(lambda n: Asks(n, "bool").double(), "sgd"), RecordingGate()
    group, solos = TrialGroup(study, members(study, range(3)), gate), [Solo(study, number) for number in range(3)]
    alike = torch.randn(3, 4, 3, dtype=torch.float64)
    unlike = alike + torch.tensor([0.0, 100.0, 0.0], dtype=torch.float64)[:, None, None]
    y = torch.zeros(3, 4)

    def times(x: Tensor) -> int:
        """How often the gate is asked for the whole forward."""
        gate.entered.clear()
        group.train_step(x, y, True)
        for row, solo in enumerate(solos):
            solo.step(x[row], y[row])
        return gate.entered.count("Asks forward")

    compared = 1  # its dropout, with that of a trial alone
    assert [times(x) for x in (alike, unlike, alike, unlike, alike)] == [1 + compared, 3, 1, 3, 1]
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)
    for _ in range(MOST_UNLIKE):
        times(unlike)
    assert times(alike) == 3, "it is not tried again"
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)
