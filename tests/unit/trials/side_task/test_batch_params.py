"""Batches that depend on hyperparameters: trials that share them are fused, and each is trained as alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import FrozenTrial, TrialState
from torch import Tensor, nn

from ds_hooks.shared import statuses
from tests.support.fused_and_solo import AtOnce, close
from tests.support.logged import logged
from tests.support.side_task_runs import Direct, Starving
from tests.support.states import reloaded
from trials.fusion import FuseError
from trials.gate.base import OpenGate
from trials.search.worker import SearchWorker, WorkerConfig
from trials.side_task.scheduler import Scheduler
from trials.study import Study
from trials.training.group import TrialGroup
from trials.training.member import build_member, facts_of, group_key
from trials.training.rehearsal import measure_dedicated, rehearse

SIZES = (2, 3, 6)


@pytest.fixture(autouse=True)
def set_up() -> Iterator[None]:
    with logged():
        yield


class Sized(Study):
    """Nine trials of three batch sizes; the number of steps of an epoch follows."""

    trials, fused, epochs, rungs = 9, 9, 3, (1,)
    batch_params = ("size",)
    widths: tuple[int, ...] = (4,)

    def __init__(self) -> None:
        self.asked: list[tuple[int, dict[str, Any]]] = []

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        n = trial.number
        return {"lr": 0.01 * (n + 1), "size": SIZES[n % 3], "width": self.widths[n % len(self.widths)]}

    def model(self, params: dict[str, Any]) -> nn.Module:
        width = params["width"]
        return nn.Sequential(nn.Linear(3, width), nn.Dropout(0.2), nn.Tanh(), nn.Linear(width, 1)).double()

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), params["lr"])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    def batches(self, epoch: int, params: dict[str, Any] | None = None) -> Any:
        assert params is not None
        self.asked.append((epoch, params))
        inputs = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(epoch))
        return [(part, part.sum(1, keepdim=True)) for part in inputs.split(params["size"])]

    def validation(self) -> Any:
        return self.batches(99, {"size": 12})

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -self.loss(outputs, targets)

    def pruner(self) -> optuna.pruners.BasePruner:
        return optuna.pruners.NopPruner()


def trained(study: Sized, directory: Path | None = None) -> tuple[list[FrozenTrial], list[int]]:
    """The trials, and the sizes of the groups that trained them."""
    config = WorkerConfig(
        storage="sqlite:///:memory:" if directory is None else f"{directory}/study.journal",
        study_name="s",
        worker="w",
        directory=directory,
    )
    worker, gate = SearchWorker(study, config, AtOnce()), Starving(())
    sent: list[statuses.Status] = []
    Scheduler(study, gate, Direct(worker), sent.append, directory=directory).run()
    assert isinstance(sent[-1], statuses.Finished)
    return worker._study.get_trials(), gate.sizes


def alone(study: Sized, number: int, params: dict[str, Any]) -> dict[int, float]:
    """The scores of an ordinary loop."""
    torch.manual_seed(number)
    model = study.model(params)
    optimizer = study.optimizer(params, model)
    scores = {}
    for epoch in range(study.epochs):
        for inputs, targets in study.batches(epoch, {"size": params["size"]}):
            optimizer.zero_grad()
            study.loss(model(inputs), targets).backward()
            optimizer.step()
        ((inputs, targets),) = study.validation()
        model.eval()
        scores[epoch + 1] = study.score(model(inputs), targets).item()
        model.train()
    return {epoch: scores[epoch] for epoch in (1, 3)}


def test_each_trial_sees_batches_of_its_own_size_and_no_other_hyperparameter() -> None:
    study = Sized()
    trials, sizes = trained(study)
    assert max(sizes) == 3, "three trials of each size"
    assert {tuple(params) for _, params in study.asked} == {("size",)}
    for trial in trials:
        assert trial.state is TrialState.COMPLETE
        params = study.suggest(optuna.trial.FixedTrial({}, number=trial.number))
        solo = alone(study, trial.number, params)
        assert trial.intermediate_values.keys() == solo.keys()
        for epoch, score in solo.items():
            close(trial.intermediate_values[epoch], score, f"trial {trial.number}, epoch {epoch}")


def test_trials_go_on_from_checkpoints_in_their_own_groups() -> None:
    study = Sized()
    params = [study.suggest(optuna.trial.FixedTrial({}, number=number)) for number in range(6)]
    members = [build_member(study, number, own) for number, own in enumerate(params)]
    assert [group_key(members[0]) == group_key(other) for other in members] == [True, False, False] * 2
    assert ("trial", "params['size']") in facts_of(members[0])
    group = reloaded(TrialGroup(study, [members[0], members[3]], OpenGate()), study)
    again = [state.member(study) for state in (group.export(0), group.export(1))]
    assert group_key(again[0]) == group_key(again[1])
    other = TrialGroup(study, [members[1]], OpenGate()).export(0).member(study)
    assert group_key(again[0]) != group_key(other)


def test_a_hyperparameter_that_is_not_suggested_is_named() -> None:
    study = Sized()
    study.batch_params = ("sice",)
    with pytest.raises(FuseError, match=r"names 'sice', which Study.suggest did not return; it returned \['lr', 's"):
        build_member(study, 0, {"lr": 0.1, "size": 3})


@pytest.mark.parametrize("widths", [(4,), (4, 5), (2, 3, 4, 5)])
def test_a_rate_is_measured_where_not_all_trials_can_be_fused(
    widths: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    study = Sized()
    study.widths = widths
    rehearse(study)
    assert measure_dedicated(study, 4, 0.01)["trials"] == 4
    assert capsys.readouterr().err == ""
