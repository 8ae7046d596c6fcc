"""Several search workers promote trials of one study: some die, and what the dead still write counts for nothing."""

import random
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import optuna
import pytest
import torch
from optuna.trial import FrozenTrial, TrialState
from torch import nn

from ds_hooks.shared.trial_attributes import MILESTONE
from tests.support.fused_and_solo import AtOnce, ToyStudy
from tests.support.side_task_runs import expire
from tests.support.slow_cases import others_slow
from trials.search.close import Ended, close_study
from trials.search.files import checkpoint_files
from trials.search.storage.optuna_storage import open_storage
from trials.search.worker import SearchWorker, WorkerConfig

Seen = list[tuple[int, TrialState, float | None]]


class Bracket(ToyStudy):
    trials, epochs, rungs, search, reduction_factor = 12, 9, (1, 3), "asha", 3

    def __init__(self) -> None:
        super().__init__(lambda n: nn.Linear(1, 1), torch.optim.SGD)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {"x": trial.suggest_float("x", 0, 1)}


class Trainer:
    """A worker with up to two trials, each of which scores its number. It saves every epoch."""

    def __init__(self, study: Bracket, storage: str, directory: Path, name: str, exclusive_rows: int = 0) -> None:
        self.name, self._directory, self._study = name, directory, study
        config = WorkerConfig(
            storage=storage, study_name="s", worker=name, directory=directory, exclusive_rows=exclusive_rows
        )
        self.search = SearchWorker(study, config, AtOnce())
        self.trials: dict[int, tuple[int, int]] = {}
        self.is_over = False

    def step(self) -> None:
        """Ask, or train one epoch of the first trial."""
        if len(self.trials) < 2:
            answer = self.search.ask(2 - len(self.trials))
            for trial in answer["trials"]:
                assert trial["number"] not in self.trials
                self.trials[trial["number"]] = trial.get("epoch", 0), trial["milestone"]
            self.is_over = answer["over"]
        if not self.trials:
            return
        number = next(iter(self.trials))
        epoch, milestone = self.trials.pop(number)
        epoch += 1
        self.search.note({number: epoch})
        written = checkpoint_files.temporary_path(self._directory, number, epoch)
        written.write_bytes(b"of no matter")
        if epoch < self._study.epochs and self.search.checkpoint(number, written) == {"lost": number}:
            return
        refused = None
        if epoch in self._study.rungs or epoch == self._study.epochs:
            refused = self.search.report(number, epoch, float(number), epoch == self._study.epochs)
        if refused is None and epoch < milestone:
            self.trials[number] = epoch, milestone


STORAGES = ["{}/study.journal", "sqlite:///{}/study.db"]


@pytest.mark.parametrize(("storage", "draw"), others_slow(product(STORAGES, range(6)), [(STORAGES[0], 0)]))
def test_many_workers_of_which_some_die_end_every_trial_once(storage: str, draw: int, tmp_path: Path) -> None:
    study, chance = Bracket(), random.Random(draw)
    hired = 0

    def hire() -> Trainer:
        nonlocal hired
        hired += 1
        return Trainer(study, storage.format(tmp_path), tmp_path, f"worker {hired}")

    alive = [hire() for _ in range(3)]
    dead: list[Trainer] = []
    for _ in range(3000):
        trainer = chance.choice(alive + dead)
        if trainer in alive and chance.random() < 0.04:
            alive.remove(trainer)
            dead.append(trainer)
            alive.append(hire())
            expire(alive[-1].search, trainer.name)
        elif trainer in dead and not trainer.trials:
            dead.remove(trainer)  # it has noticed
        elif trainer in alive or trainer.trials:
            before = len(trainer.trials)
            trainer.step() if trainer in alive else late(trainer)
            assert before or trainer in alive
        if any(trainer.is_over and not trainer.trials for trainer in alive):
            break
    else:
        pytest.fail("it does not end")
    trials = optuna.load_study(study_name="s", storage=open_storage(storage.format(tmp_path))).get_trials()
    assert len(trials) == study.trials and {trial.state for trial in trials} == {TrialState.COMPLETE, TrialState.PRUNED}
    for trial in trials:
        reached = max(trial.intermediate_values)
        assert trial.state is (TrialState.COMPLETE if reached == study.epochs else TrialState.PRUNED)
        assert trial.user_attrs[MILESTONE] == reached and set(trial.intermediate_values.values()) == {trial.number}
        spans = [span for span in alive[0].search._claims.spans() if span.trial == trial.number and span.kept]
        ends = sorted((span.from_epoch, span.to_epoch) for span in spans)
        assert [0, *(to for _, to in ends)] == [*(begin for begin, _ in ends), reached]
    for rung in study.rungs:
        at = sorted(trial.number for trial in trials if rung in trial.intermediate_values)
        above = {trial.number for trial in trials if max(trial.intermediate_values) > rung}
        assert set(at[len(at) - len(at) // 3 :]) <= above, "the best third"


def late(trainer: Trainer) -> None:
    """One that has lost its trials trains on, and notices with its first write."""
    number = next(iter(trainer.trials))
    trainer.trials.pop(number)
    answer = trainer.search.report(number, 1, 99.0, False)
    assert answer in ({"lost": number}, None)


def hire(study: Bracket, directory: Path, name: str = "me") -> SearchWorker:
    config = WorkerConfig(storage=f"{directory}/study.journal", study_name="s", worker=name, directory=directory)
    return SearchWorker(study, config, AtOnce())


def pause(worker: SearchWorker, count: int) -> None:
    """Let a worker begin so many trials, each of which scores its number and pauses."""
    for trial in worker.ask(count)["trials"]:
        worker.report(trial["number"], trial["milestone"], float(trial["number"]), False)


def test_paused_trials_are_read_again_only_once_someone_has_claimed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Bracket()
    study.trials = 60
    one, other = (Trainer(study, STORAGES[1].format(tmp_path), tmp_path, name).search for name in ("one", "other"))
    rows: list[int] = []
    read = other._storage._backend._get_trials
    monkeypatch.setattr(
        other._storage._backend, "_get_trials", lambda *a, **b: rows.append(len(f := read(*a, **b))) or f
    )

    def read_by_a_look() -> int:
        rows.clear()
        other._lock.alone(lambda held: other._next.paused())
        return sum(rows)

    for _ in range(2):  # the trials of the second round have a promoted one among them
        pause(one, 20)
    paused = {trial.number for trial in one._next.paused()}
    assert len(paused) >= 30 and read_by_a_look() >= 30 and read_by_a_look() == 0
    (best,) = one.ask(1)["trials"]
    assert best["number"] in paused and read_by_a_look() == 1 and read_by_a_look() == 0
    one.report(best["number"], best["milestone"], 1.0, False)
    assert read_by_a_look() == 1 and read_by_a_look() == 0
    assert [trial.user_attrs[MILESTONE] for trial in other._next.paused() if trial.number == best["number"]] == [
        best["milestone"]
    ]


def test_a_promotion_and_its_pause_between_two_looks_of_another_are_seen(tmp_path: Path) -> None:
    study = Bracket()
    one, other = (Trainer(study, STORAGES[1].format(tmp_path), tmp_path, name).search for name in ("one", "other"))
    pause(one, 3)
    assert len(one._next.paused()) == 3
    (seen,) = other.ask(1)["trials"]
    assert seen == {**seen, "number": 2, "milestone": 3, "epoch": 1}
    assert other.report(2, 3, 2.0, False) is None  # paused at the second rung
    assert [trial.user_attrs[MILESTONE] for trial in one._next.paused()] == [1, 1, 1], "it has not looked again"
    found = one._lock.alone(lambda held: {trial.number: trial.user_attrs[MILESTONE] for trial in one._next.paused()})
    assert found == {0: 1, 1: 1, 2: 3}


def test_a_promoted_trial_whose_worker_dies_at_once_waits_for_others(tmp_path: Path) -> None:
    study = Bracket()
    one, other = (Trainer(study, STORAGES[1].format(tmp_path), tmp_path, name).search for name in ("one", "other"))
    pause(one, 3)
    assert [trial["number"] for trial in other.ask(1)["trials"]] == [2]
    expire(one, "other")
    assert [trial["number"] for trial in one.ask(1)["trials"]] == [2]


@pytest.mark.parametrize("storage", STORAGES)
def test_paused_trials_that_someone_closes_end_the_search(storage: str, tmp_path: Path) -> None:
    study = Bracket()
    study.trials = 3
    storage = storage.format(tmp_path)
    worker = Trainer(study, storage, tmp_path, "one").search
    pause(worker, 3)
    assert len(worker._next.paused()) == 3
    assert close_study(storage, "s", "enough") == Ended(failed=0, pruned=3)
    answers = [worker.ask(1) for _ in range(2)]
    assert [answer["trials"] for answer in answers] == [[], []] and answers[-1]["over"]
    assert {trial.state for trial in worker._study.get_trials()} == {TrialState.PRUNED}


def test_two_workers_promote_different_trials(tmp_path: Path) -> None:
    study = Bracket()
    one, other = hire(study, tmp_path, "one"), hire(study, tmp_path, "other")
    for trial in one.ask(6)["trials"]:
        one.report(trial["number"], 1, float(trial["number"]), False)
    assert [trial["number"] for trial in one.ask(1)["trials"]] == [5]
    answer = other.ask(2)["trials"]
    assert [(trial["number"], trial["milestone"]) for trial in answer] == [(4, 3), (6, 1)], "the next best, then a new"
    assert not other.ask(1)["over"]


def test_enqueued_trials_come_after_those_to_promote(tmp_path: Path) -> None:
    worker = hire(Bracket(), tmp_path)
    for trial in worker.ask(3)["trials"]:
        worker.report(trial["number"], 1, 0.5, False)
    worker._study.enqueue_trial({"x": 0.25})
    assert [trial["number"] for trial in worker.ask(3)["trials"]] == [0, 3, 4]


class Watching(optuna.samplers.TPESampler):
    """Keeps what it is shown."""

    shown: ClassVar[list[Seen]] = []

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        trials = study.get_trials(deepcopy=False)
        self.shown.append([(t.number, t.state, t.value) for t in trials if t.number != trial.number])
        super().before_trial(study, trial)


def test_samplers_see_paused_trials_as_pruned_with_their_last_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watching, "shown", [])
    study = Bracket()
    study.sampler = lambda: Watching(n_startup_trials=2)  # type: ignore[method-assign]
    worker = hire(study, tmp_path)
    for trial in worker.ask(2)["trials"]:
        worker.report(trial["number"], 1, trial["number"] / 2, False)
    worker.ask(1)
    pruned, running = TrialState.PRUNED, TrialState.RUNNING
    assert Watching.shown[-1] == [(0, pruned, 0.0), (1, pruned, 0.5)]
    assert {trial.state for trial in worker._study.get_trials()[:2]} == {TrialState.WAITING}, "but they are not"
    for trial in worker.ask(1)["trials"]:
        worker.report(trial["number"], 1, 0.75, False)
    worker.ask(2)
    assert Watching.shown[-1][0] == (0, pruned, 0.0) and Watching.shown[-1][2][1] in (running, pruned)


@pytest.mark.parametrize("finite", [optuna.samplers.GridSampler({"x": [0.1, 0.2, 0.3, 0.4]}), None])
def test_grids_are_tried_once_and_end(finite: optuna.samplers.BaseSampler | None, tmp_path: Path) -> None:
    study = Bracket()
    study.trials, study.reduction_factor = 30, 2
    study.sampler = lambda: finite or optuna.samplers.BruteForceSampler()  # type: ignore[method-assign]
    study.suggest = lambda trial: {"x": trial.suggest_float("x", 0.1, 0.4, step=0.1)}  # type: ignore[method-assign]
    trainer = Trainer(study, f"{tmp_path}/study.journal", tmp_path, "me")
    for _ in range(300):
        trainer.step()
        if trainer.is_over and not trainer.trials:
            break
    else:
        pytest.fail("it does not end")
    trials = trainer.search._study.get_trials()
    assert sorted(round(trial.params["x"], 3) for trial in trials) == [0.1, 0.2, 0.3, 0.4]
    assert all(trial.state.is_finished() for trial in trials)
    assert any(trial.state is TrialState.COMPLETE for trial in trials)


def test_the_best_are_left_to_an_exclusive_worker_as_far_as_it_has_room(tmp_path: Path) -> None:
    study, storage = Bracket(), f"{tmp_path}/study.journal"
    bubbles = Trainer(study, storage, tmp_path, "bubbles")
    exclusive = Trainer(study, storage, tmp_path, "exclusive", exclusive_rows=2)
    asked = bubbles.search.ask(9)["trials"]
    for trial in asked:
        bubbles.search.report(trial["number"], 1, float(trial["number"]), False)
    assert [trial["number"] for trial in bubbles.search.ask(2)["trials"]] == [6, 9], "the third best, then a new one"
    assert [trial["number"] for trial in exclusive.search.ask(1)["trials"]] == [8], "the best"
    assert [trial["number"] for trial in bubbles.search.ask(9)["trials"]] == [10, 11, 7], "rather than none"


@pytest.mark.parametrize("gone", ["it has died", "it sees other checkpoints"])
def test_nothing_is_left_to_one_that_cannot_have_it(gone: str, database: str, tmp_path: Path) -> None:
    study, theirs = Bracket(), tmp_path if gone == "it has died" else tmp_path / "elsewhere"
    bubbles = Trainer(study, database, tmp_path, "bubbles")
    Trainer(study, database, theirs, "exclusive", exclusive_rows=2)
    for trial in bubbles.search.ask(9)["trials"]:
        bubbles.search.report(trial["number"], 1, float(trial["number"]), False)
    if gone == "it has died":
        expire(bubbles.search, "exclusive")
    assert [trial["number"] for trial in bubbles.search.ask(2)["trials"]] == [8, 7]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("asked", ["suggest", "sampler"])
def test_trials_that_break_a_constraint_are_promoted_last(asked: str, tmp_path: Path) -> None:
    """A sampler's function is asked when trials pause, with what they have scored."""

    class Limited(Bracket):
        def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
            if asked == "suggest":
                trial.set_constraint("odd", trial.number % 2)
            return super().suggest(trial)

        def sampler(self) -> optuna.samplers.BaseSampler | None:
            def limits(trial: FrozenTrial) -> list[float]:
                return [trial.intermediate_values[1] % 2]

            return optuna.samplers.TPESampler(constraints_func=limits) if asked == "sampler" else None

    worker = hire(Limited(), tmp_path)
    pause(worker, 6)
    assert [trial["number"] for trial in worker.ask(2)["trials"]] == [4, 2], "5 and 3 score more"


def test_constraints_that_only_ended_trials_have_stop_no_promotion(tmp_path: Path) -> None:
    class Late(Bracket):
        def sampler(self) -> optuna.samplers.BaseSampler:
            return optuna.samplers.NSGAIISampler(constraints_func=lambda trial: [trial.intermediate_values[9]])

    worker = hire(Late(), tmp_path)
    pause(worker, 3)
    assert [trial["number"] for trial in worker.ask(1)["trials"]] == [2]
