"""Which trials the search worker finds, and what the sampler knows then."""

from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState
from torch import nn

from ds_hooks.shared.trial_attributes import REASON, WORKER
from tests.support.fused_and_solo import AtOnce, ToyStudy
from tests.support.slow_cases import others_slow
from trials.search.files import checkpoint_files
from trials.search.storage import claim_tables
from trials.search.storage.claims import LEASE_S, MOST_DEATHS
from trials.search.worker import SearchWorker, WorkerConfig
from trials.study_error import StudyError


class Seen(optuna.samplers.RandomSampler):
    """Suggests the number of trials that have parameters, as far as a sampler sees."""

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return sum(bool(other.params) for other in study._get_trials(deepcopy=False, use_cache=True))


class Asked(ToyStudy):
    trials = 5

    def sampler(self) -> optuna.samplers.BaseSampler:
        return Seen()

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {"n": trial.suggest_int("n", 0, 99)}


Hire = Callable[..., SearchWorker]


KINDS = ["journal", "sqlite", "postgresql"]
TWO_KINDS = others_slow(KINDS, ["journal", "postgresql"])
in_a_database_too = pytest.mark.parametrize("storage_kind", TWO_KINDS, indirect=True)
"""Of tests that count what is read, or have several workers."""


@pytest.fixture(params=others_slow(KINDS, ["journal"]))
def storage_kind(request: pytest.FixtureRequest) -> str:
    """What differs between databases is shown by `test_claims.py` and `test_measured.py`, on all."""
    return str(request.param)


@pytest.fixture
def hire(storage: str, tmp_path: Path) -> Hire:
    """A search worker of the same study, for the worker of that name."""

    def worker(worker: str = "me") -> SearchWorker:
        study = Asked(lambda n: nn.Linear(1, 1), torch.optim.SGD)
        config = WorkerConfig(storage=storage, study_name="s", worker=worker, directory=tmp_path)
        return SearchWorker(study, config, AtOnce())

    return worker


def numbers(answer: dict[str, Any]) -> list[int]:
    return [trial["number"] for trial in answer["trials"]]


def test_each_of_the_trials_that_are_asked_for_at_once_is_suggested_in_the_light_of_the_others(hire: Hire) -> None:
    answer = hire().ask(3)
    assert answer["trials"] == [{"number": n, "params": {"n": n}} for n in range(3)]
    assert not answer["exhausted"] and not answer["over"]


@in_a_database_too
def test_several_workers_make_no_trial_too_many(hire: Hire) -> None:
    one, other = hire(), hire("another")
    assert numbers(one.ask(2)) == [0, 1]
    last = other.ask(4)
    assert last["trials"] == [{"number": n, "params": {"n": n}} for n in (2, 3, 4)]
    assert last["exhausted"] and not last["over"], "another worker may still die and leave trials"
    for number in (2, 3, 4):
        other.report(number, 1, 0.5, True)
    assert one.ask(1) == {"trials": [], "exhausted": True, "over": True, "bar": None}


def whole_reads(worker: SearchWorker, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Each read of all trials adds an item."""
    found: list[object] = []
    read = worker._storage.get_all_trials

    def counted(*arguments: Any, **named: Any) -> Any:
        found.append(arguments)
        return read(*arguments, **named)

    monkeypatch.setattr(worker._storage, "get_all_trials", counted)
    return found


@in_a_database_too
def test_a_trial_from_first_to_last_reads_the_whole_study_once_beside_its_sampler(
    hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = hire()
    worker._study.pruner = optuna.pruners.NopPruner()
    reads = whole_reads(worker, monkeypatch)
    (trial,) = worker.ask(1)["trials"]
    for epoch in (1, 2, 3):
        worker.report(trial["number"], epoch, 0.5, epoch == 3)
    assert len(reads) == 2, "the claim, and `Seen`"


@in_a_database_too
@pytest.mark.parametrize("error", [optuna.TrialPruned, TypeError("of the user's own")])
def test_a_trial_that_cannot_begin_reads_no_study_again(
    error: BaseException, hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def suggest(trial: optuna.Trial) -> dict[str, Any]:
        if trial.number < 3:
            raise error
        return {}

    worker = hire()
    monkeypatch.setattr(worker._user_study, "suggest", suggest)
    reads = whole_reads(worker, monkeypatch)
    assert numbers(worker.ask(4)) == [3, 4]
    assert len(reads) == 2, "two claims"


def test_the_score_to_beat_is_known_once_a_trial_has_been_among_the_best(hire: Hire, tmp_path: Path) -> None:
    def completed(worker: SearchWorker, score: float) -> Any:
        (trial,) = worker.ask(1)["trials"]
        written = tmp_path / "best" / f"trial-{trial['number']}.1.tmp"
        written.parent.mkdir(exist_ok=True)
        written.write_text("weights")
        worker.report(trial["number"], 1, score, True, str(written))
        return worker.ask(0)["bar"]

    one, other = hire(), hire("another")
    assert completed(one, 0.5) == 0.5 and completed(one, 0.4) == 0.5
    assert other.ask(0)["bar"] is None, "it takes no look for this alone"
    assert completed(other, 0.3) == 0.5
    assert hire("a third").ask(0)["bar"] == 0.5
    assert [file.name for file in (tmp_path / "best").glob("trial-*")] == ["trial-0.pt"]


def test_enqueued_trials_come_first_and_count_as_any(hire: Hire) -> None:
    worker = hire()
    for n in (50, 60, 70):
        worker._study.enqueue_trial({"n": n})
    answer = worker.ask(2)
    assert answer["trials"] == [{"number": 0, "params": {"n": 50}}, {"number": 1, "params": {"n": 60}}]
    assert not answer["exhausted"]
    assert numbers(worker.ask(9)) == [2, 3, 4]
    worker._study.enqueue_trial({"n": 80})
    assert worker.ask(9)["trials"] == [{"number": 5, "params": {"n": 80}}], "the user wants it"
    assert {trial.user_attrs[WORKER] for trial in worker._study.get_trials()} == {"me"}


def test_a_study_enqueues_its_own_points_once(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asked, "enqueue", lambda study: [{"n": 50}, {"n": 60}])
    assert hire().ask(1)["trials"] == [{"number": 0, "params": {"n": 50}}]
    assert hire("another").ask(2)["trials"] == [{"number": 1, "params": {"n": 60}}, {"number": 2, "params": {"n": 2}}]


def test_what_of_an_enqueued_point_the_study_does_not_ask_for_is_named(
    hire: Hire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Asked, "enqueue", lambda study: [{"n": 50, "m": 1, "N": 2}, {"m": 2, "N": 2}, {"n": 60}])
    assert len(hire().ask(3)["trials"]) == 3
    said = [record.getMessage() for record in caplog.records if "enqueued" in record.getMessage()]
    assert said == ["trial 0: the study suggests no 'N', 'm', of which an enqueued point has a value"], "once"


def test_a_trial_that_cannot_be_suggested_fails_and_another_takes_its_place(hire: Hire) -> None:
    worker = hire()

    def suggest(trial: optuna.Trial) -> dict[str, Any]:
        if trial.number == 1:
            raise ValueError("no")
        return {}

    worker._user_study.suggest = suggest  # type: ignore[method-assign]
    assert numbers(worker.ask(3)) == [0, 2, 3]
    assert worker._study.get_trials()[1].state is TrialState.FAIL


def test_a_suggestion_that_is_no_dict_is_named(hire: Hire) -> None:
    worker = hire()
    worker._user_study.suggest = lambda trial: None  # type: ignore[method-assign, assignment, return-value]
    assert worker.ask(1)["trials"] == []
    reason = "suggest: TypeError: it returned None; allowed: a dict of hyperparameters"
    assert {trial.user_attrs[REASON] for trial in worker._study.get_trials()} == {reason}


def test_a_trial_whose_suggestion_ends_one_process_after_another_fails(
    hire: Hire, caplog: pytest.LogCaptureFixture
) -> None:
    def suggest(trial: optuna.Trial) -> dict[str, Any]:
        if trial.number == 0:
            raise KeyboardInterrupt
        return {}

    for _ in range(MOST_DEATHS):
        worker = hire()
        worker._user_study.suggest = suggest  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            worker.ask(1)
    worker = hire()
    worker._user_study.suggest = suggest  # type: ignore[method-assign]
    assert numbers(worker.ask(1)) == [1]
    assert worker._study.get_trials()[0].state is TrialState.FAIL
    assert f"trial 0 failed: {MOST_DEATHS} workers died in it" in caplog.text


def test_a_trial_that_waited_while_workers_died_is_first_at_its_last_try(hire: Hire, tmp_path: Path) -> None:
    """It may not have been trained at all. Behind the others it would wait, and be blamed, once more."""

    def save(*saved: int) -> None:
        for number in saved:
            written = checkpoint_files.temporary_path(tmp_path, number, 1)
            written.touch()
            assert worker.checkpoint(number, written) == {"taken": number, "epoch": 1, "place": 0}

    for _ in range(MOST_DEATHS - 1):
        worker = hire()
        assert numbers(worker.ask(4)) == [0, 1, 2, 3]
        save(0, 1)
    worker = hire()
    last = worker.ask(4)
    assert numbers(last) == [2] and not last["over"], "the others wait until it has been saved"
    save(2)
    assert numbers(worker.ask(3)) == [0, 1, 4], "and 3 until it can be alone"
    save(0, 1)
    worker = hire()
    assert numbers(worker.ask(4)) == [3]


def test_a_trial_whose_last_score_is_no_number_fails_with_that_reason(
    hire: Hire, caplog: pytest.LogCaptureFixture
) -> None:
    worker = hire()
    worker.ask(2)
    assert worker.report(0, 1, nan, False) == {"kept": 0}
    worker.report(0, 2, nan, True)
    worker.report(1, 1, inf, True)
    lost, endless = worker._study.get_trials()
    assert lost.state is TrialState.FAIL and lost.user_attrs[REASON] == "its score is nan"
    assert "trial 0 failed: its score is nan" in caplog.messages
    assert endless.state is TrialState.COMPLETE and endless.value == inf


def test_a_study_with_a_parameter_that_begun_trials_lack_is_refused_when_one_fails_for_it(
    hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hire()
    assert numbers(first.ask(2)) == [0, 1]
    first.stop()

    def suggest(study: Asked, trial: optuna.Trial) -> dict[str, Any]:
        return {"n": trial.suggest_int("n", 0, 99), "momentum": trial.suggest_float("momentum", 0, 1)}

    monkeypatch.setattr(Asked, "suggest", suggest)
    worker = hire()
    assert numbers(worker.ask(3)) == [0, 1, 2]
    with pytest.raises(
        StudyError, match="trial 0 was begun without hyperparameter 'momentum', which the study has now"
    ):
        worker.fail(0, "KeyError: 'momentum' (study.py, line 10)")
    assert worker._study.get_trials()[0].state is TrialState.RUNNING
    worker.fail(1, "ValueError: of another kind")
    worker.fail(2, "KeyError: 'momentum' (study.py, line 10)")
    assert [trial.state for trial in worker._study.get_trials()[1:]] == [TrialState.FAIL] * 2, "not for want of it"


def test_what_the_side_task_trains_before_it_hears_that_a_trial_is_pruned_is_lost_and_counted(hire: Hire) -> None:
    worker = hire()
    worker._study.pruner = optuna.pruners.ThresholdPruner(lower=0.0)
    assert numbers(worker.ask(2)) == [0, 1]
    worker.note({0: 2, 1: 2})
    assert worker.report(0, 2, -1.0, False) == {"pruned": 0}
    worker.note({0: 3, 1: 3})
    worker.note({0: 4, 1: 4})
    assert worker.ask(0, here=[1])["trials"] == [], "it has heard"
    worker.note({0: 9, 1: 5})
    spans = [(span.from_epoch, span.to_epoch, span.kept) for span in worker._claims.spans() if span.trial == 0]
    assert spans == [(0, 2, True), (2, 3, False), (3, 4, False)]


def test_of_trials_that_train_together_only_the_one_that_ends_processes_fails(hire: Hire) -> None:
    guilty, deaths = 2, 0
    worker = hire()
    for _ in range(12):
        asked = numbers(worker.ask(4))
        if guilty in asked:
            worker, deaths = hire(), deaths + 1  # as the next process does
            continue
        for number in asked:
            worker.report(number, 1, 0.5, True)
    states = [trial.state for trial in worker._study.get_trials()]
    assert states == [TrialState.FAIL if n == guilty else TrialState.COMPLETE for n in range(Asked.trials)]
    assert deaths == MOST_DEATHS and worker.ask(4)["over"]


def test_why_trials_cannot_be_suggested_is_said_once_per_reason(hire: Hire, caplog: pytest.LogCaptureFixture) -> None:
    worker = hire()

    def suggest(trial: optuna.Trial) -> dict[str, Any]:
        for error in {2: [SystemExit("enough")], 3: []}.get(trial.number, [ValueError("no")]):
            raise error
        return {}

    worker._user_study.suggest = suggest  # type: ignore[method-assign]
    assert numbers(worker.ask(1)) == [3]
    said = [message.partition(" (")[0] for message in caplog.messages if " failed: " in message]
    assert said == ["trial 0 failed: suggest: ValueError: no", "trial 2 failed: suggest: SystemExit: enough"]


@in_a_database_too
def test_what_an_earlier_process_left_is_taken_over(hire: Hire) -> None:
    hire().ask(2)
    again = hire()
    assert sorted(numbers(again.ask(3))) == [0, 1, 2]


def test_what_an_idle_worker_has_is_taken_rather_than_nothing(hire: Hire) -> None:
    idle, other = hire("idle"), hire("other")
    busy_ns = 0
    assert numbers(idle.ask(2)) == [0, 1]
    idle.measures.watch(lambda: busy_ns, patience_s=0.0)
    idle.renew()
    assert numbers(other.ask(2)) == [2, 3] and numbers(other.ask(2)) == [4], "new ones first"
    busy_ns = 1
    idle.measures.watch(lambda: busy_ns, patience_s=1e9)
    idle.renew()
    assert other.ask(2) == {"trials": [], "exhausted": True, "over": False, "bar": None}, "it trains again"
    idle.measures.watch(lambda: busy_ns, patience_s=0.0)
    idle.renew()
    assert numbers(other.ask(1)) == [0] and numbers(other.ask(1)) == [1]
    assert idle.report(0, 1, 0.5, False) == {"lost": 0}
    for number in range(5):
        other.report(number, 1, 0.5, True)
    assert other.ask(1)["over"]
    assert {trial.state for trial in other._study.get_trials()} == {TrialState.COMPLETE}


def test_what_a_dead_worker_has_is_taken_rather_than_nothing(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, other = hire("dead"), hire("other")
    assert numbers(dead.ask(2)) == [0, 1] and numbers(other.ask(3)) == [2, 3, 4]
    assert numbers(other.ask(2)) == []
    now_s = claim_tables.now_s
    monkeypatch.setattr(claim_tables, "now_s", lambda connection: now_s(connection) + LEASE_S + 1)
    assert numbers(other.ask(2)) == [0, 1], "at once, and not when it next looks for dead ones"


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_lost_trial_is_not_claimed_anew_before_the_side_task_has_dropped_it(hire: Hire, is_noticed: bool) -> None:
    one, other = hire(), hire("another")
    assert numbers(one.ask(1)) == [0]
    other._lock.alone(lambda held: other._released(held, held.release("me", died=True)))
    if is_noticed:
        assert one.report(0, 1, 0.5, False) == {"lost": 0}
    answer = one.ask(4, here=[0])
    assert numbers(answer) == [1, 2, 3, 4] and not answer["over"]
    assert one.news() == ([] if is_noticed else [{"lost": 0}])
    assert one.report(0, 2, 0.5, False) is None, "it was on its way"
    assert one.ask(1, here=[0, 1, 2, 3, 4])["over"] is False
    assert numbers(one.ask(1, here=[1, 2, 3, 4])) == [0]
    assert one._study.trials[0].intermediate_values == {}


@in_a_database_too
def test_a_report_reads_no_other_trials_than_its_pruner_does(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = hire()
    worker._study.pruner = optuna.pruners.NopPruner()
    worker.ask(4)
    reads: list[int] = []
    monkeypatch.setattr(worker._storage, "get_all_trials", lambda *_, **__: reads.append(1))
    assert worker.report(2, 1, 0.5, False) == {"kept": 2}
    assert worker.report(2, 2, 0.25, True) is None
    assert worker.report(2, 2, 0.75, True) is None, "it has ended, and this was on its way"
    assert reads == []
    monkeypatch.undo()
    finished = worker._study.trials[2]
    assert (finished.state, finished.value, finished.intermediate_values) == (
        TrialState.COMPLETE,
        0.25,
        {1: 0.5, 2: 0.25},
    )
