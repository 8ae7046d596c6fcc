"""A trial's losses and scores go with it, whatever its group goes through, and are kept with it in Optuna."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
from optuna.trial import TrialState as Ended
from torch import nn

from tests.support.audited import Audited
from tests.support.fused_and_solo import OPTIMIZERS, alike, close, members
from tests.support.rich_study import RichSolo, RichStudy
from tests.support.side_task_runs import Seven, Starving, data, make_study, run
from trials import TrialGroup
from trials.gate.base import OpenGate
from trials.training.scores.history import History
from trials.training.trial_state import TrialState


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("times", [(), {2, 5, 9}])
def test_optuna_gets_the_losses_of_all_epochs_and_the_scores_at_rungs(own: bool, times: Collection[int]) -> None:
    trials, _ = run(own, Starving(times))
    study = make_study(own)
    assert {trial.state for trial in trials} == {Ended.COMPLETE, Ended.FAIL, Ended.PRUNED}
    for trial in trials:
        if trial.state is Ended.FAIL:
            continue
        solo = RichSolo(study, trial.number)
        found = trial.user_attrs["squeezer_history"]
        for _ in found["loss"]:
            solo.epoch()
        assert len(found["loss"]) == (3 if trial.state is Ended.COMPLETE else max(trial.intermediate_values))
        close(found["loss"], solo.losses, f"trial {trial.number}")
        scores = {int(epochs): value for epochs, value in found["score"].items()}
        assert scores == trial.intermediate_values and "metrics" not in found


class WithMetrics(Seven):
    def metrics(self, outputs: Any, targets: Any) -> Mapping[str, Any]:
        return {"spread": outputs.std(), "none": float("inf")}


def test_metrics_are_kept_with_the_scores() -> None:
    plain = make_study(False)
    study = WithMetrics(plain.make, plain.make_optimizer, data(0, 3))
    study.length = plain.length
    trials, _ = run(False, Starving(()), study)
    found = trials[0].user_attrs["squeezer_history"]
    assert list(found["metrics"]) == list(found["score"]) == ["1", "2", "3"]
    solo = RichSolo(study, 0)
    for epochs in ("1", "2", "3"):
        solo.epoch()
        with torch.no_grad():
            spread = torch.cat([solo.model.eval()(x) for x, _ in study.data]).std().item()
        alike(found["metrics"][epochs], {"spread": spread, "none": None}, "metrics")


def study_of(length: int = 4) -> RichStudy:
    return RichStudy(lambda n: nn.Linear(3, 2).double(), OPTIMIZERS["adamw"], data(0, length))


def test_a_trial_takes_the_epoch_under_way_along() -> None:
    study = study_of()
    one, other = (TrialGroup(study, members(study, numbers), OpenGate()) for numbers in ([0, 1], [2]))
    for batch in study.data[:3]:
        one.train_step(*batch)
    moved = TrialState.from_plain(one.export(1).plain())
    other.add([moved])  # beside one whose epoch has not begun
    for group in (one, other):
        group.train_step(*study.data[3])
        group.end_epoch()
    solo = RichSolo(study, 1)
    solo.epoch()
    close(other.history(1)["loss"], solo.losses, "moved")
    close(one.history(1)["loss"], solo.losses, "stayed")
    close(other.history(0)["loss"], other.losses_K()[:1].tolist(), "one step")
    one.keep([1])
    one.merge(other)
    for batch in study.data:
        one.train_step(*batch)
    one.note_scores([1.0, 2.0, 3.0])
    one.end_epoch()
    solo.epoch()
    for row in (0, 2):
        close(one.history(row)["loss"], solo.losses, f"row {row}")
    assert [one.history(row)["score"] for row in range(3)] == [{"1": 1.0}, {"1": 2.0}, {"1": 3.0}]
    assert len(one.history(1)["loss"]) == 2


def test_a_step_that_an_audit_takes_again_counts_once() -> None:
    class Different(nn.Module):
        """Gives something else under `vmap`."""

        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.one(x)
            return y + 1 if torch._C._functorch.is_batchedtensor(y) else y

    audited = Audited(lambda n: nn.Sequential(Different()), size=2)
    losses: list[list[float]] = [[], []]
    for batch in audited.study.data:
        audited.group.train_step(*batch)
        for solo, own in zip(audited.solos, losses, strict=True):
            solo.step(*batch)
            own.append(solo.loss)
    audited.group.end_epoch()
    assert audited.found
    for row, own in enumerate(losses):
        close(audited.group.history(row)["loss"], [sum(own) / 3], f"row {row}")


def test_a_group_that_is_put_back_has_its_history_back() -> None:
    study = study_of()
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    group.train_step(*study.data[0])
    put_back, before = group.saved(), group.export(0).history
    group.train_step(*study.data[1])
    group.end_epoch()
    put_back()
    assert group.export(0).history == before and before["steps"] == 1


def test_what_is_not_finite_is_none_in_json() -> None:
    shown = History([1.0, float("nan")], {1: float("inf")}, {2: {"a": float("-inf")}}).shown()
    assert shown == {"loss": [1.0, None], "score": {"1": None}, "metrics": {"2": {"a": None}}}
    assert "NaN" not in json.dumps(shown)
