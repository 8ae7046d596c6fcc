"""A side task ends anywhere, and another goes on: every trial ends once, with the scores that it would have had."""

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared import statuses
from tests.support.accounts import assert_accounts
from tests.support.fused_and_solo import AtOnce, close
from tests.support.rich_study import RichSolo
from tests.support.side_task_runs import Direct, Seven, assert_as_alone, make_study
from tests.support.slow_cases import others_slow
from trials.gate.base import OpenGate, StopRequested
from trials.search.files import checkpoint_files
from trials.search.storage.claims import Span
from trials.search.worker import SearchWorker, WorkerConfig
from trials.side_task import checkpoint_format, checkpoints
from trials.side_task.checkpoint_format import MAGIC, CheckpointError, load
from trials.side_task.scheduler import Scheduler
from trials.study import Study
from trials.training.group import TrialGroup

ENDED = {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are saved after every step, and a worker looks again at once."""
    monkeypatch.setattr(checkpoints, "PERIOD_S", 0.0)
    monkeypatch.setattr(checkpoints, "MOST_COST", float("inf"))
    monkeypatch.setattr(checkpoints, "MOST_COST_WITHIN", float("inf"))


class Ending(OpenGate):
    """Raises when it is asked for the given time, counted from 1."""

    def __init__(self, at: int, error: BaseException | None = None) -> None:
        self.asked, self._at, self._error = 0, at, error or StopRequested()

    def enter(self, unit: int) -> None:
        self.asked += 1
        if self.asked == self._at:
            raise self._error


def hire(study: Study, directory: Path, name: str = "w") -> SearchWorker:
    config = WorkerConfig(storage=str(directory / "study.journal"), study_name="s", worker=name, directory=directory)
    return SearchWorker(study, config, AtOnce())


def work(study: Study, worker: SearchWorker, directory: Path, gate: OpenGate | None = None) -> list[statuses.Status]:
    """Run a side task to its end."""
    reported: list[statuses.Status] = []
    Scheduler(study, gate or OpenGate(), Direct(worker), reported.append, directory=directory).run()
    return reported


def assert_all_ended(worker: SearchWorker, study: Seven) -> list[FrozenTrial]:
    trials = worker._study.get_trials()
    assert len(trials) == study.trials and {trial.state for trial in trials} == ENDED
    assert_as_alone([trial for trial in trials if trial.number != 1], study)  # that one diverges
    assert not list((worker._config.directory or Path()).glob("checkpoints/*")), "of trials that have ended"
    return trials


@pytest.mark.parametrize(
    ("own", "at"),
    others_slow(
        [(own, at) for own in (False, True) for at in (40, 200, 430, 600)],
        [(True, 200), (False, 430)],
    ),
)
def test_a_side_task_that_is_asked_to_end_loses_no_trial(own: bool, at: int, tmp_path: Path) -> None:
    study = make_study(own)
    first = hire(study, tmp_path)
    with pytest.raises(StopRequested):
        work(study, first, tmp_path, Ending(at))
    first.stop()
    left = first._study.get_trials()
    assert all(trial.state in ENDED | {TrialState.WAITING} for trial in left), "none is failed or still runs"
    again = make_study(own)
    other = hire(again, tmp_path, "another, in the next job")
    assert isinstance(work(again, other, tmp_path)[-1], statuses.Finished)
    assert_accounts(other._claims.spans(), assert_all_ended(other, again))


@pytest.mark.parametrize("at", others_slow([60, 333, 555], [60, 555]))
def test_one_that_is_killed_is_taken_up_by_its_successor(at: int, tmp_path: Path) -> None:
    study = make_study(False)
    with pytest.raises(StopRequested):
        work(study, hire(study, tmp_path), tmp_path, Ending(at))  # and nothing is released
    again = make_study(False)
    successor = hire(again, tmp_path)
    work(again, successor, tmp_path)
    assert_accounts(successor._claims.spans(), assert_all_ended(successor, again))


def test_a_score_that_a_side_task_was_about_to_report_is_reported_by_the_next(tmp_path: Path) -> None:
    class Dies(Direct):
        def send(self, **request: Any) -> None:
            if request.get("report") == 3 and request["epoch"] == 1:  # it has saved that epoch
                raise StopRequested
            super().send(**request)

    study = make_study(False)
    with pytest.raises(StopRequested):
        Scheduler(study, OpenGate(), Dies(hire(study, tmp_path)), lambda _: None, directory=tmp_path).run()
    again = make_study(False)
    successor = hire(again, tmp_path)
    work(again, successor, tmp_path)
    assert set(assert_all_ended(successor, again)[3].intermediate_values) == {1, 2, 3}
    assert "3" in successor._study.get_trials()[3].user_attrs["squeezer_history"]["score"]


def test_many_ends_in_a_row(tmp_path: Path) -> None:
    at = 300  # about an epoch, and what comes before it
    for _ in range(40):
        study = make_study(True)
        worker = hire(study, tmp_path)
        try:
            work(study, worker, tmp_path, Ending(at))
            break
        except StopRequested:
            worker.stop()
    else:
        pytest.fail("it does not get on")
    assert_accounts(worker._claims.spans(), assert_all_ended(worker, study))


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_a_trial_goes_on_from_its_checkpoint(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Seven, "suggest", lambda study, trial: {"n": trial.number, "value": value})
    study = make_study(False)
    worker = hire(study, tmp_path)
    with pytest.raises(StopRequested):
        work(study, worker, tmp_path, Ending(500))
    reached = {int(folder.name): checkpoint_files.found(folder) for folder in tmp_path.glob("checkpoints/*")}
    assert any(reached.values())
    again = make_study(False)
    read: list[int] = []
    batches = again.batches
    again.batches = lambda epoch: read.append(epoch) or batches(epoch)  # type: ignore[method-assign]
    work(again, hire(again, tmp_path), tmp_path)
    begun = make_study(False)
    assert len(read) < begun.epochs * begun.trials, "epochs that are kept are not trained again"
    assert "no newer checkpoint can be used" not in caplog.text


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "a flipped bit": lambda content: content[:-200] + bytes([content[-200] ^ 4]) + content[-199:],
    "of another version": lambda content: content.replace(MAGIC, b"squeezer trial 0\n"),
}


@pytest.mark.parametrize(
    ("what", "all_of_them"),
    others_slow(
        product(DAMAGE, [False, True]), [("torn", True), ("a flipped bit", False), ("of another version", True)]
    ),
)
def test_damaged_checkpoints_cost_only_epochs(what: str, all_of_them: bool, tmp_path: Path) -> None:
    study = make_study(False)
    with pytest.raises(StopRequested):
        work(study, hire(study, tmp_path), tmp_path, Ending(600))
    folders = [folder for folder in tmp_path.glob("checkpoints/*") if checkpoint_files.found(folder)]
    assert folders
    for folder in folders:
        for file in checkpoint_files.found(folder)[: None if all_of_them else 1]:
            file.write_bytes(DAMAGE[what](file.read_bytes()))
            with pytest.raises(CheckpointError, match=r"torn or damaged|no checkpoint of this version"):
                load(file)
    again = make_study(False)
    successor = hire(again, tmp_path)
    work(again, successor, tmp_path)
    assert_accounts(successor._claims.spans(), assert_all_ended(successor, again))


def test_a_checkpoint_of_another_structure_is_named_and_its_trial_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = make_study(False)
    with pytest.raises(StopRequested):
        work(study, hire(study, tmp_path), tmp_path, Ending(600))
    again = make_study(False)
    model = again.make
    again.make = lambda n: torch.nn.Sequential(model(n), torch.nn.Linear(2, 2).double())
    successor = hire(again, tmp_path)
    work(again, successor, tmp_path)
    assert {trial.state for trial in successor._study.get_trials()} <= ENDED
    assert "is of another structure" in caplog.text


@pytest.mark.parametrize("epochs", others_slow([1, 2], [1]))
def test_a_trial_that_was_trained_for_longer_than_trials_now_are_goes_back(epochs: int, tmp_path: Path) -> None:
    study = make_study(False)
    with pytest.raises(StopRequested):
        work(study, hire(study, tmp_path), tmp_path, Ending(600))
    folders = [folder for folder in tmp_path.glob("checkpoints/*") if checkpoint_files.found(folder)]
    saved = {int(folder.name): checkpoint_files.epoch_of(checkpoint_files.found(folder)[0]) for folder in folders}
    number = max(saved, key=saved.__getitem__)
    assert saved[number] >= epochs
    again = make_study(False)
    again.epochs, again.rungs = epochs, (1,)
    successor = hire(again, tmp_path)
    work(again, successor, tmp_path, Ending(3000))
    trials = assert_all_ended(successor, again)
    solo = RichSolo(again, number)
    for _ in range(epochs):
        solo.epoch()
    close(trials[number].value, solo.score(), "after so many epochs, and not after those before")


def test_a_trial_in_which_one_worker_after_another_dies_is_given_up(tmp_path: Path) -> None:
    study = make_study(False)
    for _ in range(4):
        with pytest.raises(StopRequested):
            work(study, hire(study, tmp_path), tmp_path, Ending(5))
    last = hire(study, tmp_path)
    last.ask(99)
    trials = last._study.get_trials()
    failed = [trial for trial in trials if trial.state is TrialState.FAIL]
    assert failed
    assert "workers died in it, one after another" in failed[0].user_attrs["squeezer_reason"]


def test_who_has_lost_a_trial_writes_nothing_of_it_any_more(tmp_path: Path) -> None:
    study = make_study(False)
    zombie = hire(study, tmp_path, "zombie")
    mine = [trial["number"] for trial in zombie.ask(2)["trials"]]
    other = hire(study, tmp_path, "other")
    other._lock.alone(lambda held: other._released(held, held.release("zombie", died=True)))  # its lease has run out
    assert [trial["number"] for trial in other.ask(2)["trials"]] == mine
    other.report(mine[0], 1, 0.25, False)
    assert zombie.report(mine[0], 1, 9.0, False) == {"lost": mine[0]}
    assert zombie.report(mine[1], 3, 9.0, True) == {"lost": mine[1]}
    assert zombie.fail(mine[1], "late") is None, "it knows by now"
    zombie.stop()
    trials = other._study.get_trials()
    assert trials[mine[0]].intermediate_values == {1: 0.25} and trials[mine[1]].intermediate_values == {}
    assert {trials[number].state for number in mine} == {TrialState.RUNNING}


def test_a_trial_that_went_back_goes_on_from_its_new_checkpoints(tmp_path: Path) -> None:
    study = make_study(False)
    worker = hire(study, tmp_path)
    number = worker.ask(1)["trials"][0]["number"]
    folder = checkpoint_files.trial_directory(tmp_path, number)

    def save(by: SearchWorker, epoch: int) -> dict[str, Any] | None:
        written = checkpoint_files.temporary_path(tmp_path, number, epoch)
        written.write_bytes(b"of no matter")
        return by.checkpoint(number, written)

    for epoch in (1, 2, 3):
        save(worker, epoch)
    assert [file.name for file in checkpoint_files.found(folder)] == ["3-1.pt", "2-1.pt"]
    successor = hire(study, tmp_path)
    assert successor.ask(1)["trials"][0]["epoch"] == 3
    assert save(worker, 4) == {"lost": number}, "it is another's now"
    assert [file.name for file in checkpoint_files.found(folder)] == ["3-1.pt", "2-1.pt"]
    successor.began(number, 0)  # none can be used
    save(successor, 1)
    assert [file.name for file in checkpoint_files.found(folder)] == ["1-2.pt"]
    third = hire(study, tmp_path)
    assert third.ask(1)["trials"][0]["epoch"] == 1
    assert [span for span in third._claims.spans() if span.kept] == [Span(number, 0, 1, True)]
    assert sum(span.to_epoch - span.from_epoch for span in third._claims.spans()) == 4, "all that was trained"


def test_a_trial_that_someone_has_closed_is_dropped(tmp_path: Path) -> None:
    study = make_study(False)
    worker = hire(study, tmp_path)
    number = worker.ask(1)["trials"][0]["number"]
    trial_id = worker._study.get_trials()[number]._trial_id
    worker._storage.set_trial_state_values(trial_id, state=TrialState.FAIL)
    assert worker.report(number, 1, 0.5, False) == {"lost": number}


@pytest.mark.parametrize(
    ("direction", "keep"),
    others_slow(product(["maximize", "minimize"], [0, 1, 3]), [("maximize", 0), ("minimize", 1), ("maximize", 3)]),
)
def test_the_best_weights_go_into_the_users_own_module(keep: int, direction: str, tmp_path: Path) -> None:
    study = make_study(True)
    study.keep_best, study.direction = keep, direction
    worker = hire(study, tmp_path)
    work(study, worker, tmp_path)
    completed = [trial for trial in worker._study.get_trials() if trial.state is TrialState.COMPLETE]
    ranked = sorted(completed, key=lambda trial: trial.value or 0.0, reverse=direction == "maximize")
    files = {file.name for file in tmp_path.glob("best/*.pt")}
    assert files == {f"trial-{trial.number}.pt" for trial in ranked[:keep]}
    if not keep:
        return
    index = json.loads((tmp_path / "best" / "best.json").read_text())
    assert [entry["number"] for entry in index] == [trial.number for trial in ranked[:keep]]
    assert not list(tmp_path.glob("best/*.tmp"))
    for entry, trial in zip(index, ranked, strict=False):
        model = study.model({"n": trial.number})
        model.load_state_dict(torch.load(tmp_path / "best" / entry["weights"], weights_only=True))
        model.eval()
        assert entry["score"] == pytest.approx(score(study, model), rel=1e-9)


def score(study: Seven, model: torch.nn.Module) -> float:
    with torch.no_grad():
        pairs = [(float(study.score(model(x), y)), len(x)) for x, y in study.validation()]
    return sum(value * count for value, count in pairs) / sum(count for _, count in pairs)


@pytest.mark.parametrize("keep", others_slow([1, 2], [2]))
def test_a_best_trial_that_cannot_be_written_leaves_what_was_the_best_before(
    keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst trial is the first, the best the last."""
    study, save = make_study(True), checkpoint_format.save_weights
    study.keep_best, study.direction = keep, "minimize"
    worker = hire(study, tmp_path / "whole")
    work(study, worker, tmp_path / "whole")
    best = worker._study.best_trial.number

    def full(weights: Mapping[str, torch.Tensor], path: Path) -> None:
        if path.name.startswith(f"trial-{best}."):
            raise OSError(28, "No space left on device")
        save(weights, path)

    monkeypatch.setattr(checkpoints, "save_weights", full)
    worker = hire(study, tmp_path / "full")
    work(study, worker, tmp_path / "full")
    assert worker._study.best_trial.number == best
    hire(study, tmp_path / "full")  # the next worker looks at what is there
    index = json.loads((tmp_path / "full" / "best" / "best.json").read_text())
    assert len(index) == keep and best not in [entry["number"] for entry in index]
    for entry in index:
        model = study.model({"n": entry["number"]})
        model.load_state_dict(torch.load(tmp_path / "full" / "best" / entry["weights"], weights_only=True))
        assert entry["score"] == pytest.approx(score(study, model.eval()), rel=1e-9)


def test_a_full_disk_costs_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Iterator[None]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save", full)
    monkeypatch.setattr(checkpoints, "save_weights", full)
    study = make_study(False)
    worker = hire(study, tmp_path)
    work(study, worker, tmp_path)
    assert_all_ended(worker, study)


class Slow(Direct):
    """To a search worker that needs 300 ms of a core to take a file."""

    def answers(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        return [{**each, "cost_s": 0.3} if "taken" in each else each for each in super().answers(wait_s)]


@pytest.mark.parametrize(
    ("rungs", "search", "taking_s"), [((1, 2), Direct, 0.0), ((), Direct, 0.0), ((1, 2), Slow, 0.3)]
)
def test_saving_all_trials_takes_at_most_a_share_of_the_time(
    rungs: tuple[int, ...], search: type[Direct], taking_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a training step takes 7 s, and a file 300 ms."""
    now_s, files, file_s = 0.0, 0, 0.3
    monkeypatch.undo()
    save, step = checkpoint_format.save, TrialGroup.train_step

    def slow(*given: Any) -> None:
        nonlocal now_s, files
        now_s, files = now_s + file_s, files + 1
        save(*given)

    def timed(group: TrialGroup, *batch: Any) -> None:
        nonlocal now_s
        now_s += 7.0
        step(group, *batch)

    monkeypatch.setattr(checkpoints, "save", slow)
    monkeypatch.setattr(TrialGroup, "train_step", timed)
    study = make_study(False)
    study.epochs, study.trials = 15, 4
    study.rungs = rungs
    worker = hire(study, tmp_path)
    scheduler = Scheduler(study, OpenGate(), search(worker), lambda status: None, directory=tmp_path)
    scheduler._checkpoints._clock_s = lambda: now_s
    scheduler.run()
    assert 0 < files * (file_s + taking_s) <= checkpoints.MOST_COST * now_s
