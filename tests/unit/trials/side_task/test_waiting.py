"""Trials of several structures: those that can be fused begin together, soon, and none waits for ever."""

from typing import Any

import pytest
import torch
from optuna.trial import TrialState
from torch import nn

from tests.support.side_task_runs import Direct, Starving, assert_as_alone, of_widths, run
from tests.support.slow_cases import others_slow
from trials.training.group import TrialGroup


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The trials of every training step."""
    found: list[list[int]] = []
    step = TrialGroup.train_step

    def noted(group: TrialGroup, *batch: Any) -> None:
        found.append(list(group.numbers))
        step(group, *batch)

    monkeypatch.setattr(TrialGroup, "train_step", noted)
    return found


def mean_rows(steps: list[list[int]]) -> float:
    return sum(map(len, steps)) / len(steps)


@pytest.mark.parametrize(
    ("structures", "before", "rows"),
    others_slow([(1, 16, 16), (2, 3.1, 8), (4, 2.1, 5), (8, 1.5, 3)], [(4, 2.1, 5)]),
)
def test_groups_are_filled_with_trials_of_one_structure(
    structures: int, before: float, rows: float, steps: list[list[int]]
) -> None:
    """`before`: a group's mean rows when trials began in the order in which they came."""
    study = of_widths(lambda n: 4 + n % structures)
    trials, _ = run(False, Starving(()), study)
    assert all(len({number % structures for number in numbers}) == 1 for numbers in steps)
    assert len(steps[0]) == 16 // structures, "from the first step on"
    assert mean_rows(steps) >= max(rows, before)
    assert {trial.state for trial in trials} == {TrialState.COMPLETE} and len(trials) == 32
    assert_as_alone(trials[::5], study)


def test_training_begins_with_the_first_answer(steps: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The search worker answers only once while nothing has been trained."""
    answers = Direct.answers
    given = 0

    def slow(line: Direct, wait_s: float = 0.0) -> list[dict[str, Any]]:
        nonlocal given
        if given and not steps:
            return []
        found = answers(line, wait_s)
        given += bool(found)
        return found

    monkeypatch.setattr(Direct, "answers", slow)
    run(False, Starving(()), of_widths(lambda n: 4 + n % 8))
    assert len(steps[0]) == 2


def test_a_rare_structure_does_not_wait_for_ever(steps: list[list[int]]) -> None:
    study = of_widths(lambda n: 9 if n == 3 else 4)
    study.trials, study.fused = 64, 4
    run(False, Starving(()), study)
    begun = list(dict.fromkeys(number for numbers in steps for number in numbers))
    assert len(begun) == 64
    assert begun.index(3) <= 4 + 2 * 4 + 4, "when twice as many as there are rows have begun before it"


def test_a_trial_that_cannot_be_built_harms_no_other(steps: list[list[int]]) -> None:
    study = of_widths(lambda n: 4 + n % 2)
    make = study.model

    def model(params: dict[str, Any]) -> nn.Module:
        if params["n"] == 5:
            raise ValueError("no")
        return make(params)

    study.model = model  # type: ignore[method-assign]
    trials, _ = run(False, Starving(()), study)
    assert [trial.number for trial in trials if trial.state is TrialState.FAIL] == [5]
    assert [len(numbers) for numbers in steps[:2]] == [8, 8]


def test_structures_that_do_not_fit_together_into_the_memory_come_one_after_another(
    steps: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = TrialGroup.__init__

    def crowded(group: TrialGroup, study: Any, members: Any, *others: Any) -> None:
        if len(members) > 4:
            raise torch.OutOfMemoryError("no more")
        begin(group, study, members, *others)

    monkeypatch.setattr(TrialGroup, "__init__", crowded)
    study = of_widths(lambda n: 4 + n % 2)
    trials, _ = run(False, Starving(()), study)
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert max(map(len, steps)) <= 4
    assert_as_alone(trials[::7], study)
