"""Search workers on different devices: who gets which of the waiting trials, and what does not fit where."""

import time
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
import torch
from optuna.trial import TrialState
from torch import nn

from ds_hooks.shared.trial_attributes import REASON
from tests.support.fused_and_solo import AtOnce, ToyStudy
from tests.support.side_task_runs import expire
from trials.search.worker import SearchWorker, WorkerConfig

STORAGES = ["{}/study.journal", "sqlite:///{}/study.db"]
WORDS = "MemoryError: not even one trial fits into the side task's memory"


class Two(ToyStudy):
    """Trials with an even number have the structure "even", the others "odd"."""

    trials, epochs, fused = 12, 9, 2

    def __init__(self, *, promotes: bool = False) -> None:
        super().__init__(lambda n: nn.Linear(1, 1), torch.optim.SGD)
        if promotes:
            self.search, self.rungs = "asha", (1, 3)


class Place:
    """Where workers of one study meet."""

    def __init__(self, storage: str, directory: Path, study: Two) -> None:
        self._storage, self._directory, self._study = storage, directory, study

    def hire(self, name: str, even: float = 0.0, odd: float = 0.0) -> SearchWorker:
        """A worker that has measured these samples per second."""
        config = WorkerConfig(storage=self._storage, study_name="s", worker=name, directory=self._directory)
        worker = SearchWorker(self._study, config, AtOnce())
        for structure, speed in (("even", even), ("odd", odd)):
            if speed:
                worker.measures.ran(structure, 2, int(speed * 100), 0.0, 100.0)
        worker.renew()
        return worker


@pytest.fixture(params=[STORAGES[0], pytest.param(STORAGES[1], marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param.format(tmp_path), tmp_path, Two())


def ask(worker: SearchWorker, most: int) -> list[int]:
    """Build up to so many trials."""
    found = [trial["number"] for trial in worker.ask(most)["trials"]]
    for number in found:
        worker.measures.built(number, "odd" if number % 2 else "even")
    return found


def leave(place: Place, trials: int) -> None:
    """Somebody builds so many trials, and goes."""
    earlier = place.hire("earlier")
    ask(earlier, trials)
    earlier.stop()


def test_each_worker_gets_first_what_it_trains_best_and_then_the_rest(place: Place) -> None:
    leave(place, 8)
    a, b = place.hire("a", even=10, odd=1), place.hire("b", even=1, odd=10)
    assert ask(a, 3) == [0, 2, 4] and ask(b, 3) == [1, 3, 5]
    assert ask(a, 4) == [6, 7, 8, 9], "rather than nothing, and new trials only then"


def test_a_worker_that_has_gone_is_not_counted_with(place: Place) -> None:
    leave(place, 8)
    a, b = place.hire("a", even=10, odd=1), place.hire("b", even=1, odd=10)
    b.stop()
    assert ask(a, 4) == [0, 1, 2, 3]


def test_what_is_not_measured_leaves_the_order_as_it_is(place: Place) -> None:
    leave(place, 4)
    a, _ = place.hire("a"), place.hire("b")
    assert ask(a, 4) == [0, 1, 2, 3]


def statements(worker: SearchWorker, most: int) -> list[str]:
    """What a claim sends to the database of claims."""
    sent: list[str] = []

    def note(c: Any, cursor: Any, statement: str, *rest: Any) -> None:
        sent.append(statement)

    sa.event.listen(worker._claims._engine, "before_cursor_execute", note)
    ask(worker, most)
    sa.event.remove(worker._claims._engine, "before_cursor_execute", note)
    return sent


@pytest.mark.parametrize("waiting", [0, 6])
def test_where_nothing_is_to_be_chosen_nothing_is_looked_up(waiting: int, place: Place) -> None:
    if waiting:
        leave(place, waiting)
    a, _ = place.hire("a", even=10), place.hire("b", even=1)
    sent = statements(a, 2)
    assert len([each for each in sent if "squeezer_speed" in each]) == (1 if waiting else 0)
    assert not [each for each in sent if "structure" in each and "squeezer_speed" not in each and " IN (" in each]


def test_what_does_not_fit_waits_for_a_worker_where_it_may(place: Place) -> None:
    little, roomy = place.hire("little"), place.hire("roomy")
    assert ask(little, 1) == [0]
    little.note({0: 1})
    assert little.does_not_fit(0, WORDS) is None
    assert little._study.get_trials()[0].state is TrialState.WAITING and 0 not in little.trained
    assert ask(little, 1) == [1], "a new one"
    assert ask(roomy, 1) == [0]
    assert roomy._study.get_trials()[0].state is TrialState.RUNNING
    roomy.report(0, 9, 0.5, True)
    assert roomy._study.get_trials()[0].state is TrialState.COMPLETE


def test_the_rest_of_its_structure_is_left_as_well(place: Place) -> None:
    leave(place, 6)
    little, roomy = place.hire("little"), place.hire("roomy")
    assert ask(little, 1) == [0]
    little.does_not_fit(0, WORDS)
    assert ask(little, 6) == [1, 3, 5, 6, 7, 8]
    assert ask(roomy, 2) == [0, 2]


def test_one_that_cannot_even_be_built_is_left_alone(place: Place) -> None:
    little, roomy = place.hire("little"), place.hire("roomy")
    (trial,) = little.ask(1)["trials"]
    assert little.does_not_fit(trial["number"], "RuntimeError: can't allocate memory") is None
    assert ask(little, 1) == [1] and ask(roomy, 1) == [0]


def test_what_fits_nowhere_fails(place: Place) -> None:
    one, other = place.hire("one"), place.hire("other")
    for worker in (one, other):
        assert ask(worker, 1) == [0]
        worker.does_not_fit(0, WORDS)
    ended = one._study.get_trials()[0]
    assert ended.state is TrialState.FAIL and ended.user_attrs[REASON] == WORDS


def test_alone_it_fails_at_once_with_its_own_reason(place: Place) -> None:
    one = place.hire("one")
    ask(one, 1)
    one.does_not_fit(0, "RuntimeError: can't allocate memory (mine.py, line 7)")
    ended = one._study.get_trials()[0]
    assert (ended.state, ended.user_attrs[REASON]) == (
        TrialState.FAIL,
        "RuntimeError: can't allocate memory (mine.py, line 7)",
    )


@pytest.mark.parametrize("promotes", [False, True])
def test_it_fails_once_the_only_worker_that_might_have_it_is_gone(promotes: bool, tmp_path: Path) -> None:
    study = Two(promotes=promotes)
    study.trials = 1
    place = Place(f"{tmp_path}/study.journal", tmp_path, study)
    little, _ = place.hire("little"), place.hire("roomy")
    ask(little, 1)
    little.does_not_fit(0, WORDS)
    for _ in range(2):
        answer = little.ask(1)
        assert answer["trials"] == [] and answer["exhausted"] and not answer["over"], "it may be taken yet"
    expire(little, "roomy")
    little.ask(1)
    ended = little._study.get_trials()[0]
    assert ended.state is TrialState.FAIL and ended.user_attrs[REASON] == WORDS
    assert little.ask(1)["over"]


def test_a_worker_that_begins_anew_tries_again(place: Place) -> None:
    little, _ = place.hire("little"), place.hire("roomy")
    ask(little, 1)
    little.does_not_fit(0, WORDS)
    little.stop()
    assert ask(place.hire("little"), 1) == [0], "it may have more memory now"


def test_a_worker_that_was_taken_for_dead_tells_again_what_does_not_fit(place: Place) -> None:
    little, roomy = place.hire("little"), place.hire("roomy")
    ask(little, 1)
    little.does_not_fit(0, WORDS)
    expire(roomy, "little")
    little.renew()
    assert ask(little, 1) == [1]


@pytest.mark.parametrize("storage", STORAGES)
def test_a_trial_is_promoted_where_it_fits(storage: str, tmp_path: Path) -> None:
    place = Place(storage.format(tmp_path), tmp_path, Two(promotes=True))
    little, roomy = place.hire("little"), place.hire("roomy")
    for number in ask(roomy, 3):
        roomy.report(number, 1, -number, False)
    assert [trial.number for trial in roomy._next.paused()] == [0, 1, 2]
    little.measures.does_not_fit("even")
    little.renew()
    assert ask(little, 1) == [3], "the best one is even"
    assert ask(roomy, 1) == [0]


def test_paused_trials_are_not_ended_while_one_waits_for_another_worker(tmp_path: Path) -> None:
    study = Two(promotes=True)
    study.trials = 3
    place = Place(f"{tmp_path}/study.journal", tmp_path, study)
    little, roomy = place.hire("little"), place.hire("roomy")
    for number in ask(roomy, 3):
        roomy.report(number, 1, -number, False)
    little.measures.does_not_fit("even")
    little.renew()
    assert not little.ask(1)["over"]
    assert {trial.state for trial in little._study.get_trials()} == {TrialState.WAITING}
    assert ask(roomy, 1) == [0]


def test_a_promoted_trial_that_turns_out_too_large_keeps_its_milestone(tmp_path: Path) -> None:
    place = Place(f"{tmp_path}/study.journal", tmp_path, Two(promotes=True))
    little, roomy = place.hire("little"), place.hire("roomy")
    for number in ask(roomy, 3):
        roomy.report(number, 1, -number, False)
    (promoted,) = little.ask(1)["trials"]
    assert (promoted["number"], promoted["milestone"], promoted["epoch"]) == (0, 3, 1)
    little.does_not_fit(0, WORDS)
    (again,) = roomy.ask(1)["trials"]
    assert again == promoted


def test_a_verdict_on_the_deadline_comes_with_a_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Two()
    study.deadline, study.rungs = "2020-01-01 00:00", (1,)
    worker = Place(f"{tmp_path}/study.journal", tmp_path, study).hire("me")
    ask(worker, 2)
    worker.note({0: 1, 1: 1})
    worker.report(0, 1, 0.5, False)
    assert worker.news() == [], "too early to tell"
    now_s = time.monotonic()
    worker.measures.ran("even", 2, 100, now_s - 600, now_s)
    worker.renew()
    monkeypatch.setattr(worker._watch, "_again_s", 0.0)
    worker.report(1, 1, 0.5, False)
    (said,) = worker.news()
    assert said["warns"] and said["said"].startswith("deadline 2020-01-01 00:00 has passed; at its pace so far the")
    assert worker.news() == []
    assert optuna.trial.TrialState.RUNNING in {trial.state for trial in worker._study.get_trials()}, "it trains on"
