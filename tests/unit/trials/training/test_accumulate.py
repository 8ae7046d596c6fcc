"""Steps on the gradients of several batches: each fused trial is as the trial alone in an ordinary loop."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

from ds_hooks.shared import statuses
from tests.support.fused_and_solo import OPTIMIZERS, Batch, assert_same_trial, close, members
from tests.support.logged import logged
from tests.support.rich_study import RichSolo, RichStudy
from tests.support.side_task_runs import Starving, assert_as_alone, make_study, run
from tests.support.slow_cases import others_slow
from tests.support.tree_models import CASES, study_of
from trials import Study, TrialGroup, build_member
from trials.gate.base import OpenGate
from trials.study import load_study
from trials.study_error import StudyError
from trials.training.audits.audit import Audit


@pytest.fixture(autouse=True)
def set_up() -> Iterator[None]:
    with logged():
        yield


def batches(seed: int, count: int) -> list[Batch]:
    draws = torch.Generator().manual_seed(seed)
    sizes = [5] * (count - 1) + [3]
    return [(torch.randn(size, 4, dtype=torch.float64, generator=draws), torch.zeros(size)) for size in sizes]


def network(n: int) -> nn.Module:
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.1 * (n + 1)), nn.Linear(6, 2)
    return nn.Sequential(*layers).double()


def rich(accumulate: int, count: int, own: bool = False, **more: Any) -> RichStudy:
    study = RichStudy(
        network,
        OPTIMIZERS["adamw"],
        batches(0, count),
        own=lambda n, epoch: batches(1 + 10 * n + epoch, count) if own else None,
        **more,
    )
    study.accumulate = accumulate
    return study


def train(group: TrialGroup, epochs: int) -> int:
    steps = 0
    for epoch in range(epochs):
        for batch in group.batches(epoch):
            group.train_step(*batch)
            steps += 1
        group.end_epoch()
    return steps


def assert_as_in_a_loop(study: Study, size: int, steps: int, audit: Audit | None = None) -> TrialGroup:
    group = TrialGroup(study, members(study, range(size)), OpenGate(), audit)
    assert train(group, 2) == steps
    for row in range(size):
        solo = RichSolo(study, row)
        for _ in range(2):
            solo.epoch()
        assert_same_trial(group, row, solo)
        close(group.history(row)["loss"], solo.losses, f"row {row}")
        close(group.losses_K()[row].item(), solo.loss, f"row {row}")
        close(group.evaluate()[row], solo.score(), f"row {row}")
    return group


@pytest.mark.parametrize(("size", "own"), others_slow(product([1, 3], [False, True]), [(1, False), (3, True)]))
@pytest.mark.parametrize(("accumulate", "steps"), [(1, 5), (2, 3), (3, 2), (9, 1)])
def test_a_step_is_of_so_many_batches_and_the_last_of_what_is_left(
    size: int, own: bool, accumulate: int, steps: int
) -> None:
    study = rich(accumulate, 5, own)
    audit = Audit(study)
    assert_as_in_a_loop(study, size, 2 * steps, audit)
    assert audit.done >= 2 and not audit.mismatches


@pytest.mark.parametrize("every", ["epoch", "step"])
def test_schedulers_clipping_and_loss_scaling_see_whole_steps(every: str) -> None:
    study = rich(
        *(2, 5, True),
        schedule=lambda n, o: lrs.StepLR(o, 2, 0.5),
        every=every,
        norm=lambda n: 0.05 * (n + 1),
        value=lambda n: 0.02,
        scale=lambda n: torch.amp.GradScaler("cpu", 64.0, growth_interval=2),
    )
    audit = Audit(study)
    assert_as_in_a_loop(study, 3, 6, audit)
    assert not audit.mismatches


@pytest.mark.parametrize("name", ["dict", "mask now and then", "labels inside", "a branch on a mask", "nested"])
@pytest.mark.parametrize("size", others_slow([1, 2], [2]))
def test_batches_in_any_containers_accumulate(name: str, size: int) -> None:
    study = study_of(name, count=5)
    study.accumulate = 2
    audit = Audit(study)
    assert_as_in_a_loop(study, size, 6, audit)
    assert not audit.mismatches and name in CASES


class Fork(nn.Module):
    """Each trial uses one of two layers, by its data; the first batch runs under `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        if len(x) == 5:
            return y + self.left(x)
        return y + (self.left(x) if y.sum() > 0 else self.right(x))


def test_a_parameter_that_some_batch_of_a_step_uses_has_a_gradient() -> None:
    study = rich(2, 4)
    study.make = lambda n: Fork().double()
    study.data = [*batches(3, 2), *batches(4, 2)]  # 5 and 3 examples in turn
    assert_as_in_a_loop(study, 4, 4)
    study.data = [*batches(5, 1), *batches(6, 1), *batches(7, 2)]  # twice 3, then both
    assert_as_in_a_loop(study, 4, 4)


@pytest.mark.usefixtures("noticed")
def test_a_trial_that_is_lost_in_a_batch_keeps_what_it_was() -> None:
    def own(n: int, epoch: int) -> list[Batch]:
        found = batches(n, 4)
        if n == 1:
            found[3][0][0, 0] = torch.nan
        return found

    study = rich(2, 4)
    study.own = own
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    for batch in group.batches(0):
        group.train_step(*batch)
    assert group.finite_K().tolist() == [True, False, True]
    for row in range(3):
        solo = RichSolo(study, row)
        data = own(row, 0)
        solo.step(*data[:2])
        if row != 1:
            solo.step(*data[2:])
        assert_same_trial(group, row, solo)


@pytest.mark.parametrize(
    ("own", "times"), others_slow(product([False, True], [(), {2, 5}]), [(False, ()), (True, {2, 5})])
)
def test_a_whole_run(own: bool, times: Any) -> None:
    study = make_study(own)
    study.accumulate = 2
    trials, reported = run(own, Starving(times), study)
    assert_as_alone(trials, study)
    finished = reported[-1]
    assert isinstance(finished, statuses.Finished) and finished.work % (3 * 5) == 0


class Judges(nn.Module):
    """Two methods, which train different layers."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = nn.Linear(4, 3), nn.Linear(3, 1)

    def judging(self, x: Tensor) -> Tensor:
        y: Tensor = self.judge(self.maker(x).detach().tanh())
        return y

    def making(self, x: Tensor) -> Tensor:
        y: Tensor = -self.judge(self.maker(x).tanh())
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.making(x)


class Adversaries(RichStudy):
    def optimizer(self, params: dict[str, Any], model: Any) -> Any:
        return {
            "judging": torch.optim.Adam(model.judge.parameters(), 0.01 + 0.01 * params["n"]),
            "making": torch.optim.SGD(model.maker.parameters(), 0.02),
        }


def test_each_phase_accumulates_by_itself() -> None:
    study = Adversaries(lambda n: Judges().double(), "sgd", batches(0, 5))
    study.accumulate = 2
    audit = Audit(study)
    group = TrialGroup(study, members(study, range(3)), OpenGate(), audit)
    train(group, 1)
    assert audit.done and not audit.mismatches
    for row in range(3):
        member = build_member(study, row, {"n": row})
        optimizers: Any = member.optimizer
        for first in (0, 2, 4):
            window = study.data[first : first + 2]
            for phase, optimizer in optimizers.items():
                member.model.zero_grad()
                for x, y in window:
                    (study.loss(getattr(member.model, phase)(x), y) / len(window)).backward()
                optimizer.step()
        for name, value in member.model.state_dict().items():
            close(group.extract(row)[0][name], value, f"row {row} {name}")


def test_it_is_a_whole_number(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    source = (Path(__file__).parents[4] / "examples" / "digits.py").read_text()
    path.write_text(source.replace("    trials =", "    accumulate = 0\n    trials =", 1))
    with pytest.raises(StudyError, match="accumulate = 0; allowed: a positive whole number"):
        load_study(path)
