"""A side task ends in the middle of an epoch, and another goes on there: as if nothing had happened."""

import errno
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_hooks.shared import statuses
from tests.support.fused_and_solo import AtOnce, Batch
from tests.support.interrupted import (
    BATCHES,
    SAMPLES,
    Asked,
    Killed,
    Killing,
    Long,
    Result,
    assert_all_accounted,
    assert_same,
    batches_of,
    make_study,
    result,
    saved,
    trained,
    work,
)
from tests.support.side_task_runs import Direct
from tests.support.slow_cases import others_slow
from trials.gate.base import OpenGate, StopRequested
from trials.search.files import checkpoint_files
from trials.search.storage.claims import Claim, Claims
from trials.search.storage.directory_identity import identity
from trials.search.worker import SearchWorker, WorkerConfig
from trials.side_task import checkpoint_format, checkpoints
from trials.side_task.checkpoint_format import load
from trials.side_task.scheduler import Scheduler
from trials.training.group import TrialGroup
from trials.training.trial_state import TrialState

KINDS = {
    "fused": {},
    "alone": {"fused": 1},
    "accumulated": {"accumulate": 2},
    "own batches": {"own": True},
    "by the epoch": {"every": "epoch"},
}


@cache
def uninterrupted(kind: str, folder: Path) -> tuple[Result, int, int]:
    """What comes out, how often the gate is asked, and how much is trained."""
    directory = folder / kind
    directory.mkdir()
    gate = Asked()
    worker, reported, _ = work(make_study(**KINDS[kind]), directory, gate)  # type: ignore[arg-type]
    return result(worker, directory), gate.asked, trained(reported)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted")


@pytest.mark.parametrize("kind", others_slow(KINDS, ["fused", "own batches"]))
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.02, 0.9))
def test_one_that_is_asked_to_end_loses_nothing(
    kind: str, share: float, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted, asked, all_work = uninterrupted(kind, folder)
    directory = tmp_path_factory.mktemp("released")
    _, first, ended = work(make_study(**KINDS[kind]), directory, Asked(max(4, round(share * asked))))  # type: ignore[arg-type]
    last = [each for each in first if isinstance(each, statuses.Progress)][-1]
    assert isinstance(ended, StopRequested) and not last.lost
    worker, second, _ = work(make_study(**KINDS[kind]), directory, name="in the next job")  # type: ignore[arg-type]
    assert last.work + trained(second) == all_work, "nothing is trained twice"
    assert_same(result(worker, directory), wanted)
    assert_all_accounted(worker)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are saved after every step."""
    monkeypatch.setattr(checkpoints, "PERIOD_S", 0.0)
    monkeypatch.setattr(checkpoints, "MOST_COST", float("inf"))
    monkeypatch.setattr(checkpoints, "MOST_COST_WITHIN", float("inf"))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", others_slow(["alone", "fused"], ["fused"]))
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.02, 0.999))
def test_one_that_is_killed_loses_what_was_not_saved(
    kind: str, share: float, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted, asked, all_work = uninterrupted(kind, folder)
    directory = tmp_path_factory.mktemp("killed")
    _, first, ended = work(make_study(**KINDS[kind]), directory, Killing(max(4, round(share * asked))))  # type: ignore[arg-type]
    assert isinstance(ended, Killed)
    worker, second, _ = work(make_study(**KINDS[kind]), directory)  # type: ignore[arg-type]
    assert trained(second) <= all_work - (trained(first) - SAMPLES * Long.trials), "at most a step"
    assert_same(result(worker, directory), wanted)
    assert_all_accounted(worker)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("mixes", "at", "is_committed"),
    others_slow(
        [(mixes, *kill) for mixes in (True, False) for kill in ((2, True), (14, False), (29, True))],
        [(True, 2, True), (False, 14, False), (True, 29, True)],
    ),
)
def test_one_that_is_killed_while_its_files_are_taken(
    mixes: bool, at: int, is_committed: bool, folder: Path, tmp_path: Path
) -> None:
    """Then some of its trials are a step behind the others, and train apart from them to the end of the epoch."""
    sent = 0
    study = make_study()
    study.mix_epochs = mixes

    class Dying(Direct):
        def send(self, **request: Any) -> None:
            nonlocal sent
            sent += "checkpoint" in request
            if "checkpoint" in request and sent == at:
                if is_committed:
                    super().send(**request)
                raise Killed
            super().send(**request)

    wanted, _, all_work = uninterrupted("fused", folder)
    _, first, ended = work(study, tmp_path, line=Dying)
    assert isinstance(ended, Killed)
    sizes = []

    class Noting(Asked):
        def use(self, units: Any, trials: int) -> None:
            sizes.append(trials)

    worker, second, _ = work(study, tmp_path, Noting())
    assert sizes[0] < Long.trials and sizes[-1] == Long.trials, "they join each other when that epoch ends"
    assert trained(second) <= all_work - (trained(first) - SAMPLES * Long.trials)
    found, weights = result(worker, tmp_path)
    for (scores, history), (other_scores, other_history) in zip(found, wanted[0], strict=True):
        assert scores == pytest.approx(other_scores, rel=1e-4) and scores.keys() == other_scores.keys()
        assert history["loss"] == pytest.approx(other_history["loss"], rel=1e-4)
    for name, own in wanted[1].items():
        for key, value in own.items():
            torch.testing.assert_close(weights[name][key], value, rtol=1e-3, atol=1e-5)
    assert_all_accounted(worker)


@pytest.mark.parametrize("give", ["other numbers", "another order", "fewer"])
def test_an_epoch_whose_batches_are_others_begins_anew(
    give: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "MOST_COST_AT_RUNGS", float("inf"))  # epoch 2 is a rung
    work(make_study(), tmp_path, Asked(320))
    assert all(names[0].startswith("2_") and int(names[0][2]) > 2 for names in saved(tmp_path).values())
    original, again = make_study(), make_study()

    def changed(epoch: int) -> Iterable[Batch]:
        found = list(original.batches(epoch))
        others = {"other numbers": [(x + 1, y) for x, y in found], "another order": [found[1], found[0], *found[2:]]}
        return (others | {"fewer": found[:1]})[give]

    worker, second, _ = work(batches_of(again, changed), tmp_path)
    assert "were in the middle of epoch 3, and its batches are others now" in caplog.text
    length = 1 if give == "fewer" else BATCHES
    assert trained(second) == length * SAMPLES * Long.trials, "all of that epoch, and of no other"
    assert_all_accounted(worker)


def test_an_epoch_that_has_become_longer_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    work(make_study(), tmp_path, Asked(300))
    again = make_study()
    again.length = lambda epoch: BATCHES + 2
    worker, second, _ = work(again, tmp_path)
    assert "are others now" not in caplog.text and trained(second) <= (BATCHES + 1) * SAMPLES * Long.trials
    assert_all_accounted(worker)


@pytest.mark.parametrize("length", others_slow([1, 2], [2]))
def test_batches_of_unknown_number(length: int, tmp_path: Path) -> None:
    def make() -> Long:
        study, given = make_study(), make_study()
        given.length = lambda epoch: length
        return batches_of(study, lambda epoch: (batch for batch in given.batches(epoch)))

    directories = [tmp_path / name for name in ("whole", "parts")]
    for directory in directories:
        directory.mkdir()
    gate = Asked()
    worker, _, _ = work(make(), directories[0], gate)
    wanted = result(worker, directories[0])
    ended: BaseException | None = StopRequested()
    parts = 0
    while ended is not None and parts < 20:
        parts += 1
        worker, _, ended = work(make(), directories[1], Asked(gate.asked // 4))
    assert parts > 3
    assert_same(result(worker, directories[1]), wanted)
    assert_all_accounted(worker)


def test_the_end_is_asked_for_while_batches_are_skipped(folder: Path, tmp_path: Path) -> None:
    """Whoever comes next has as much to do as the one before."""
    wanted, asked, all_work = uninterrupted("by the epoch", folder)
    _, first, _ = work(make_study(every="epoch"), tmp_path, Asked(asked // 3 - 10))
    place = {name for names in saved(tmp_path).values() for name in names}
    read = 0

    class Waiting(Asked):
        def enter(self, unit: int) -> None:
            if read:
                raise StopRequested
            super().enter(unit)

    slow, given = make_study(every="epoch"), make_study(every="epoch")

    def noted(epoch: int) -> Iterable[Batch]:
        nonlocal read
        for batch in given.batches(epoch):
            read += 1
            yield batch

    _, second, ended = work(batches_of(slow, noted), tmp_path, Waiting())
    assert isinstance(ended, StopRequested) and read == 1 and not trained(second)
    assert {name for names in saved(tmp_path).values() for name in names} == place
    worker, third, _ = work(make_study(every="epoch"), tmp_path)
    assert trained(first) + trained(third) == all_work
    assert_same(result(worker, tmp_path), wanted)


def test_one_that_was_saved_before_there_were_places_goes_on(tmp_path: Path) -> None:
    state = load_one(tmp_path, Asked(300))
    plain = state.plain()
    del plain["history"]["mark"]
    assert TrialState.from_plain(plain).place == state.place
    old = TrialState.from_plain({**plain, "history": {**plain["history"], "steps": 0, "total": 0.0}})
    assert old.member(make_study()).place == 0
    assert TrialGroup(make_study(), [old], OpenGate()).readers()[0][2:] == (2, 0, "")


def load_one(directory: Path, gate: OpenGate) -> TrialState:
    work(make_study(), directory, gate)
    return load(next(directory.glob("checkpoints/0/*_*.pt")))


def test_what_is_saved_and_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a step takes 7 s, and a file 10 ms."""
    now_s, epoch_s = 0.0, {0: 35.0, 1: 35.0, 2: 350.0}
    at_s: dict[str, float] = {}
    save, step = checkpoint_format.save, TrialGroup.train_step

    def slow(state: TrialState, path: Path) -> None:
        nonlocal now_s
        now_s += 0.01
        if state.number == 0:
            at_s[path.name.partition(".")[0]] = now_s
        save(state, path)

    def timed(group: TrialGroup, *batch: Any) -> None:
        nonlocal now_s
        now_s += 7.0
        step(group, *batch)

    monkeypatch.setattr(checkpoints, "save", slow)
    monkeypatch.setattr(TrialGroup, "train_step", timed)
    study = make_study()
    study.rungs, study.length = (), lambda epoch: int(epoch_s[epoch] / 7)
    config = WorkerConfig(storage=str(tmp_path / "study.journal"), study_name="s", worker="w", directory=tmp_path)
    scheduler = Scheduler(study, OpenGate(), Direct(SearchWorker(study, config, AtOnce())), print, directory=tmp_path)
    scheduler._checkpoints._clock_s = lambda: now_s
    scheduler.run()
    names, times_s = list(at_s), list(at_s.values())
    assert names[0] == "2", "two short epochs, and nothing in their middle"
    assert len(names) >= 5 and all(name.startswith("2_") for name in names[1:])
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert all(checkpoints.PERIOD_S <= gap_s <= checkpoints.PERIOD_S + 10 for gap_s in gaps_s)


@pytest.mark.usefixtures("eager")
def test_the_last_checkpoint_from_an_epochs_end_is_kept(tmp_path: Path) -> None:
    work(make_study(), tmp_path, Asked(320))
    found = saved(tmp_path)
    assert len(found) == Long.trials
    for names in found.values():
        assert len(names) == 3 and names[0] > names[1] and [name.partition("-")[0] for name in names][2] == "2"


def test_a_part_of_the_first_epoch_waits_for_who_can_read_it(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for directory in (here, elsewhere):
        directory.mkdir()
    config = WorkerConfig(storage=str(here / "study.journal"), study_name="s", worker="w", directory=here)
    first = SearchWorker(make_study(), config, AtOnce())
    with pytest.raises(StopRequested):
        Scheduler(make_study(), Asked(60), Direct(first), print, directory=here).run()
    assert {names[0][:2] for names in saved(here).values()} == {"0_"}
    first.stop()
    claimed: list[Claim | None] = []
    for directory in (elsewhere, here):
        other = Claims(first._claims._engine, "s", "other", directory=identity(directory))
        with other.alone() as held:
            claimed.append(held.claim(0))
            assert bool(held.elsewhere) == (directory is elsewhere)
    assert claimed[0] is None and claimed[1] is not None and claimed[1].is_saved


def test_an_error_while_it_saves_is_no_error_of_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(TrialGroup, "export", full)
    _, reported, ended = work(make_study(), tmp_path, Asked(60))
    assert isinstance(ended, StopRequested) and "trials are not saved at the end: MemoryError: no room" in caplog.text
    last = [each for each in reported if isinstance(each, statuses.Progress)][-1]
    assert last.lost == last.work > 0


def test_what_the_search_worker_could_not_take_is_lost(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager: None
) -> None:
    """On a disk that is full from the third file on, what is trained again is what the accounts call lost."""
    _, asked, all_work = uninterrupted("fused", folder)
    left, publish = 3, checkpoint_files.publish

    def filling(*files: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        publish(*files)

    with monkeypatch.context() as full:
        full.setattr(checkpoint_files, "publish", filling)
        _, first, ended = work(make_study(), tmp_path, Asked(asked // 2))
    assert isinstance(ended, StopRequested) and left < 0
    last = [each for each in first if isinstance(each, statuses.Progress)][-1]
    _, second, _ = work(make_study(), tmp_path, name="in the next job")
    assert last.lost > 0 and last.work - last.lost + trained(second) == all_work
