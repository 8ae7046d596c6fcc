"""What workers measure, in the database of claims: who trains how fast, what does not fit, and epochs per minute."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from trials.search.storage import claim_tables
from trials.search.storage.claim_tables import CLAIM, PACE, SPEED, STUDY
from trials.search.storage.claims import Claims, Sign
from trials.search.storage.database import connect
from trials.search.storage.measured import KEPT_MINUTES, Fleet, Minute

Hire = Callable[..., Claims]
NOW_S = 1.7e9
NOW = int(NOW_S // 60)


@pytest.fixture(autouse=True)
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The database's time."""
    now = [NOW_S]
    monkeypatch.setattr(claim_tables, "now_s", lambda c: now[0])
    monkeypatch.setattr("time.time", lambda: now[0])
    return now


@pytest.fixture
def hire(storage: str, tmp_path: Path) -> Iterator[Hire]:
    """The worker of that name."""
    made: list[Claims] = []

    def worker(name: str, study: str = "s", directory: str | None = None, rows: int = 0) -> Claims:
        made.append(Claims(connect(storage, tmp_path), study, name, 60.0, directory, rows))
        return made[-1]

    yield worker
    for each in made:
        each.close()


def fleet(claims: Claims) -> Fleet:
    with claims.alone() as held:
        return held.fleet()


def rows(claims: Claims, table: sa.Table) -> int:
    with claims._engine.connect() as c:
        return len(c.execute(sa.select(table)).all())


def test_each_worker_sees_how_fast_the_others_are(hire: Hire) -> None:
    one, other, stranger = hire("one", rows=4), hire("other"), hire("one", study="another")
    one.renew(Sign({}, speeds={"x": 10.0, "y": 0.0}))
    other.renew(Sign({}, speeds={"x": 2.5}))
    stranger.renew(Sign({}, speeds={"x": 99.0}))
    seen = fleet(other)
    assert seen.speeds == {("x", "one"): 10.0, ("y", "one"): 0.0, ("x", "other"): 2.5}
    assert seen.exclusive_rows == {"one": 4, "other": 0}
    assert not seen.fits("one", ["y", "trial 3"]) and seen.fits("one", ["x", None]) and seen.fits("other", ["y"])


def test_speeds_are_told_again_only_once_they_have_changed(hire: Hire) -> None:
    one = hire("one")
    written: list[str] = []
    sa.event.listen(one._engine, "before_cursor_execute", lambda c, _, statement, *rest: written.append(statement))

    def statements(speed: float) -> int:
        written.clear()
        one.renew(Sign({}, speeds={"x": speed}))
        return len([each for each in written if "squeezer_speed" in each])

    assert [statements(10.0), statements(10.0), statements(10.4), statements(11.0)] == [2, 0, 0, 1]
    assert fleet(one).speeds == {("x", "one"): 11.0}


def test_speeds_vanish_with_the_lease_and_come_back_with_the_worker(hire: Hire, now_s: list[float]) -> None:
    one, other = hire("one"), hire("other")
    one.renew(Sign({}, speeds={"x": 10.0}))
    now_s[0] += 61
    other.renew(Sign({}))
    assert fleet(other).speeds == {} and fleet(other).exclusive_rows.keys() == {"other"}
    assert rows(other, SPEED) == 1, "nobody has looked yet"
    with other.alone() as held:
        held.release_expired()
    assert rows(other, SPEED) == 0
    one.renew(Sign({}, speeds={"x": 10.0}))
    assert fleet(other).speeds == {("x", "one"): 10.0}


def test_what_does_not_fit_is_seen_under_the_same_lock(hire: Hire) -> None:
    one, other = hire("one"), hire("other")
    for each in (one, other):
        each.renew(Sign({}))
    with one.alone() as held:
        held.note_unfit(["x"])
        assert held.may_fit(["x"], is_saved=False)
    with other.alone() as held:
        held.note_unfit(["x"])
        assert not held.may_fit(["x"], is_saved=False) and held.may_fit(["y"], is_saved=False)


def test_who_cannot_read_a_checkpoint_cannot_take_its_trial(hire: Hire) -> None:
    one, other = hire("one", directory="a here"), hire("other", directory="b there")
    for each in (one, other):
        each.renew(Sign({}))
    with one.alone() as held:
        held.note_unfit(["x"])
        assert held.may_fit(["x"], is_saved=False) and not held.may_fit(["x"], is_saved=True)


@pytest.mark.parametrize("how", ["a sign of life", "a checkpoint", "its pause", "its release"])
def test_a_claim_knows_its_trials_structure_once_that_was_built(how: str, hire: Hire) -> None:
    one = hire("one")
    with one.alone() as held:
        claim = held.claim(7)
        assert held.known([7, 8]) == {7: (None, False)}
    assert claim is not None
    if how == "a sign of life":
        one.renew(Sign({7: 0}, {7: "x"}))
    else:
        with one.owned(claim, structure="x") as mine:
            assert mine is not None
            {"a checkpoint": lambda: mine.keep(1), "its pause": lambda: mine.end(1)}.get(how, lambda: mine.release(1))()
    with one.alone() as held:
        assert held.known([7]) == {7: ("x", how in ("a checkpoint", "its pause"))}
        held.release("one", died=True)
        assert held.known([7])[7][0] == "x", "the next worker need not build it"


def test_a_structure_that_changes_replaces_the_old_one(hire: Hire) -> None:
    one = hire("one")
    with one.alone() as held:
        held.claim(7)
    for name in "xy":
        one.renew(Sign({7: 0}, {7: name}))
        with one.alone() as held:
            assert held.known([7]) == {7: (name, False)}


def test_a_trial_that_is_let_go_loses_what_has_no_checkpoint(hire: Hire) -> None:
    one, other = hire("one"), hire("other")
    with one.alone() as held:
        claim = held.claim(0)
    assert claim is not None
    with one.owned(claim) as mine:
        assert mine is not None
        mine.keep(2)
    with one.owned(claim) as mine:
        assert mine is not None
        mine.release(5)
    assert [(span.from_epoch, span.to_epoch, span.kept) for span in one.spans()] == [(0, 2, True), (2, 5, False)]
    assert one.account().trained == {0: 2} and one.account().kept_share == 2 / 5
    with other.alone() as held:
        again = held.claim(0)
    assert again is not None and (again.epoch, again.deaths) == (2, 0)


def test_the_order_that_stands_is_the_studys(hire: Hire) -> None:
    one, other, stranger = hire("one"), hire("other"), hire("one", study="another")
    with one.alone() as held:
        assert held.placement == {}
        held.placement = {"one": "x", "other": "y"}
    with other.alone() as held:
        assert held.placement == {"one": "x", "other": "y"}
    with stranger.alone() as held:
        assert held.placement == {}


def test_a_workers_minutes_are_rows_of_its_own(hire: Hire) -> None:
    one, other = hire("one"), hire("other")
    one.renew(Sign({}, minutes=[Minute(NOW - 1, 60.0, 3.5), Minute(NOW, 10.0, 1.0)]))
    other.renew(Sign({}, minutes=[Minute(NOW, 20.0, 2.0)]))
    one.renew(Sign({}, minutes=[Minute(NOW, 40.0, 4.0)]))
    assert rows(other, PACE) == 3
    assert other.account().minutes == [Minute(NOW - 1, 60.0, 3.5), Minute(NOW, 40.0, 6.0)]


def test_minutes_count_until_the_last_that_all_have_told_who_train(hire: Hire) -> None:
    quick, slow, idle = hire("quick"), hire("slow"), hire("idle")
    for trial, (claims, last) in enumerate(((quick, NOW), (slow, NOW - 7), (idle, NOW - 100))):
        claims.renew(Sign({}, minutes=[Minute(last, 60.0, 1.0)]))
        with claims.alone() as held:
            assert trial == 2 or held.claim(trial)
    assert quick.account().until == NOW - 7
    released = hire("of no matter")
    with released.alone() as held:
        held.release("slow", died=True)
    assert quick.account().until == NOW


def test_minutes_older_than_a_day_are_deleted_and_those_ahead_do_not_count(hire: Hire) -> None:
    one, other = hire("one"), hire("other")
    told = [NOW - KEPT_MINUTES - 1, NOW - KEPT_MINUTES, NOW, NOW + 60, NOW + 525600]
    one.renew(Sign({}, minutes=[Minute(minute, 60.0, 1.0) for minute in told]))
    assert [each.minute for each in other.account().minutes] == [NOW - KEPT_MINUTES, NOW]
    with other.alone() as held:
        held.release("one", died=True)
        held.release_expired()
    assert rows(other, PACE) == 3, "also of the dead"


def test_the_account_knows_how_far_trials_are(hire: Hire) -> None:
    one, other = hire("one"), hire("other")
    with one.alone() as held:
        for trial in (0, 1):
            held.claim(trial)
    one.renew(Sign({0: 4, 1: 2}))
    assert other.account().trained == {0: 4, 1: 2}
    with other.alone() as held:
        held.release("one", died=True)
    assert other.account().trained == {0: 0, 1: 0}, "and that is lost"


def test_tables_of_an_earlier_version_get_what_they_lack(hire: Hire) -> None:
    one = hire("one")
    with one.alone() as held:
        held.claim(3)
    with one._engine.begin() as c:
        for table in (SPEED, PACE):
            c.execute(sa.text(f"DROP TABLE {table.name}"))
        for column in (STUDY.c.placement, CLAIM.c.structure):
            c.execute(sa.text(f"ALTER TABLE {column.table.name} DROP COLUMN {column.name}"))
    again = hire("again")
    again.renew(Sign({}, speeds={"x": 1.0}))
    with again.alone() as held:
        assert held.known([3]) == {3: (None, False)} and held.fleet().speeds == {("x", "again"): 1.0}
        held.placement = {"again": "x"}
    hire("a third")
