"""Claims: a trial has one owner at a time, and who is not the owner writes nothing."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import sqlalchemy as sa

from trials.search.storage import claim_tables
from trials.search.storage.claims import MOST_DEATHS, Claim, Claims, Sign, Span
from trials.search.storage.database import connect


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The database's time."""
    now = [1000.0]
    monkeypatch.setattr(claim_tables, "now_s", lambda connection: now[0])
    return now


Hire = Callable[..., Claims]


@pytest.fixture
def hire(storage: str, tmp_path: Path) -> Iterator[Hire]:
    """The worker of that name."""
    made: list[Claims] = []

    def worker(name: str, study: str = "s") -> Claims:
        made.append(Claims(connect(storage, tmp_path), study, name))
        return made[-1]

    yield worker
    for each in made:
        each.close()


def claimed(claims: Claims, trial: int) -> Claim | None:
    with claims.alone() as held:
        return held.claim(trial)


def sure(claims: Claims, trial: int) -> Claim:
    found = claimed(claims, trial)
    assert found is not None
    return found


def is_mine(claims: Claims, claim: Claim) -> bool:
    with claims.owned(claim) as owned:
        return owned is not None


def test_a_sign_of_life_says_again_only_what_has_changed(hire: Hire) -> None:
    one = hire("one")
    claims = [sure(one, trial) for trial in range(3)]
    written: list[int] = []

    def note(_c: object, _cursor: object, statement: str, values: list[object], _context: object, many: bool) -> None:
        if "UPDATE squeezer_claim" in statement:
            written.append(len(values) if many else 1)

    sa.event.listen(one._engine, "before_cursor_execute", note)

    def count(trained: dict[int, int]) -> int:
        written.clear()
        one.renew(Sign(trained))
        assert len(written) <= 1, "in one go"
        return sum(written)

    assert [count({0: 2, 1: 2, 2: 1}), count({0: 2, 1: 2, 2: 1}), count({0: 2, 1: 3, 2: 1})] == [3, 0, 1]
    with one.owned(claims[0]) as owned:
        assert owned is not None
        owned.keep(1)
    assert count({0: 2, 1: 3, 2: 1}) == 1, "what a checkpoint has set back"
    sure(one, 3)
    assert count({0: 2, 1: 3, 2: 1, 3: 0}) == 4, "any may have been lost and claimed anew"


def test_a_server_waits_for_its_disk_where_something_was_written(hire: Hire) -> None:
    one = hire("one")
    claim = sure(one, 0)
    if one._engine.dialect.name != "postgresql":
        pytest.skip("only a server has a setting for this")
    sa.event.listen(one._engine, "begin", lambda c: c.exec_driver_sql("SET LOCAL synchronous_commit = on"))
    found = {}
    for writes in (False, True, False):
        with one.owned(claim, writes=writes) as mine:
            assert mine is not None
            found[writes] = mine._c.execute(sa.text("SHOW synchronous_commit")).scalar_one()
    with one.alone() as held:
        assert held._c.execute(sa.text("SHOW synchronous_commit")).scalar_one() == found[True] != found[False] == "off"


def test_a_trial_has_one_owner(hire: Hire) -> None:
    one, other = hire("one"), hire("other")
    claim = claimed(one, 7)
    assert claim == Claim(7, fence=1, epoch=0, deaths=0)
    assert claimed(other, 7) is None and claimed(one, 7) is None
    assert is_mine(one, claim) and not is_mine(other, claim)


def test_studies_of_one_directory_do_not_meet(hire: Hire) -> None:
    one, other = (hire("w", study) for study in "ab")
    assert claimed(one, 0) and claimed(other, 0)


def test_what_is_released_is_claimed_again_under_a_higher_fence(hire: Hire) -> None:
    one, other = hire("one"), hire("other")
    first = sure(one, 0)
    with one.owned(first) as owned:
        assert owned is not None
        owned.keep(4)
    one.renew(Sign({0: 6}))
    with other.alone() as held:
        assert held.release("one", died=True) == [0]
    second = claimed(other, 0)
    assert second == Claim(0, fence=2, epoch=4, deaths=1, is_saved=True)
    assert not is_mine(one, first) and is_mine(other, second)
    assert other.spans() == [Span(0, 0, 4, True), Span(0, 4, 6, False)]
    with other.owned(second) as owned:
        assert owned is not None
        owned.end(9)
    assert [span for span in other.spans() if span.kept] == [Span(0, 0, 4, True), Span(0, 4, 9, True)]


def test_a_new_trial_costs_one_statement_and_another_is_claimed_as_ever(hire: Hire) -> None:
    one, other = hire("one"), hire("other")
    sure(other, 5)
    sent: list[str] = []
    with one.alone() as held:
        held.fences(since=0)
        sa.event.listen(one._engine, "before_cursor_execute", lambda c, cursor, statement, *_: sent.append(statement))
        assert held.begin(6) == Claim(6, fence=2, epoch=0, deaths=0) and not held.has_last_try()
        assert len(sent) == 1
        assert held.begin(5) is None and held.begin(6) is None, "some worker has it"
        seven = held.begin(7)
        assert seven is not None and seven.fence > 2
    assert claimed(other, 6) is None and sure(other, 8).fence > 3


def test_a_worker_that_came_back_under_its_old_name_does_not_pass_for_its_successor(hire: Hire) -> None:
    one = hire("one")
    before = sure(one, 0)
    with one.alone() as held:
        held.release("one", died=True)
    assert is_mine(one, sure(one, 0)) and not is_mine(one, before)


def test_what_was_written_is_known_again_even_if_the_trial_has_ended_with_it(hire: Hire) -> None:
    one = hire("one")
    claim = sure(one, 0)
    for epoch, operation in ((2, "keeps"), (4, "ends")):
        for again in (False, True):
            with one.owned(claim, operation) as owned:
                assert owned is not None and owned.is_done is again
                if not again:
                    owned.end(epoch) if operation == "ends" else owned.keep(epoch)
    with one.owned(claim, "another") as owned:
        assert owned is None


def test_what_is_trained_of_a_trial_after_its_end_is_counted_once(hire: Hire) -> None:
    one, other = hire("one"), hire("one", "of another study")
    claim = sure(one, 0)
    with one.owned(claim) as owned:
        assert owned is not None
        owned.end(2, trained=3)
    for claims in (one, one, other):
        claims.add_lost(claim, 3, 5)
    assert one.spans() == [Span(0, 0, 2, True), Span(0, 2, 3, False), Span(0, 3, 5, False)]
    assert other.spans() == [Span(0, 3, 5, False)]


def test_deaths_count_until_a_checkpoint(hire: Hire) -> None:
    one = hire("one")
    for deaths in range(3):
        assert sure(one, 0).deaths == deaths
        with one.alone() as held:
            held.release("one", died=True)
    claim = sure(one, 0)
    with one.owned(claim) as owned:
        assert owned is not None
        owned.keep(1)
    with one.alone() as held:
        held.release("one", died=False)
    assert sure(one, 0).deaths == 0


def test_a_trial_on_its_last_try_is_its_workers_only_one(hire: Hire) -> None:
    one, other = hire("one"), hire("other")
    for _ in range(MOST_DEATHS - 1):
        with one.alone() as held:
            assert all(held.claim(trial) for trial in range(3))
            held.release("one", died=True)
    first = sure(one, 0)
    with one.alone() as held:
        assert held.has_last_try() and held.claim(1) is None and held.left == {1}
    busy = sure(other, 3)
    with other.alone() as held:
        assert not held.has_last_try() and held.claim(1) is None and held.left == {1}, "others may be the culprits"
    with other.owned(busy) as owned:
        assert owned is not None
        owned.end(1)
    assert claimed(other, 1) is not None
    with one.owned(first) as owned:
        assert owned is not None
        owned.keep(1)
    assert claimed(one, 2) is None, "it has another, of which nobody knows"
    assert claimed(one, 4) is not None


def test_a_worker_without_a_sign_of_life_loses_its_trials(hire: Hire, now_s: list[float]) -> None:
    one, other = hire("one"), hire("other")
    for each in (one, other):
        each.renew(Sign({}))
    claim = sure(one, 3)
    now_s[0] += 59
    other.renew(Sign({}))
    with other.alone() as held:
        assert held.release_expired() == []
    now_s[0] += 2
    with other.alone() as held:
        assert held.release_expired() == [3]
        assert held.others() == []
    assert not is_mine(one, claim)


@pytest.mark.parametrize("by_s", [3600, -3600])
def test_a_database_whose_clock_is_set_costs_checkpoints_at_most(by_s: int, hire: Hire, now_s: list[float]) -> None:
    now_s[0] = 10_000.0
    one, other = hire("one"), hire("other")
    for worker in (one, other):
        worker.renew(Sign({}))
    claim = sure(one, 0)
    now_s[0] += by_s
    other.renew(Sign({}))
    with other.alone() as held:
        assert held.release_expired() == [0], "its lease has another time, and nobody can say whether it lives"
    assert not is_mine(one, claim), "it lives, and writes nothing"
    one.renew(Sign({}))
    again = sure(one, 0)
    assert again.fence > claim.fence and is_mine(one, again)
    with other.alone() as held:
        assert held.release_expired() == [], "now both have the new time"


def test_a_database_whose_clock_is_set_back_a_little_finds_the_dead_later(hire: Hire, now_s: list[float]) -> None:
    now_s[0] = 10_000.0
    dead, other = hire("dead"), hire("other")
    dead.renew(Sign({}))
    sure(dead, 0)
    now_s[0] -= 300
    for later_s, found in ((300 + 59, []), (2, [0])):
        now_s[0] += later_s
        other.renew(Sign({}))
        with other.alone() as held:
            assert held.release_expired() == found


def test_a_worker_never_takes_its_own_trials_for_lost(hire: Hire, now_s: list[float]) -> None:
    one = hire("one")
    one.renew(Sign({}))
    claim = sure(one, 3)
    now_s[0] += 1000  # it was stopped, and looks before it has given a sign of life
    with one.alone() as held:
        assert held.release_expired() == []
    assert is_mine(one, claim)


def test_an_error_under_the_lock_undoes_what_was_claimed(hire: Hire) -> None:
    one, other = hire("one"), hire("other")
    with pytest.raises(RuntimeError, match="in the middle"), one.alone() as held:
        held.claim(1)
        raise RuntimeError("in the middle")
    assert claimed(other, 1) == Claim(1, fence=1, epoch=0, deaths=0)


def test_many_at_once_each_claim_their_own(hire: Hire) -> None:
    found: list[int] = []

    def claim_all(name: str) -> None:
        mine = hire(name)
        found.extend(trial for trial in range(20) if claimed(mine, trial) is not None)

    threads = [threading.Thread(target=claim_all, args=(name,), daemon=True) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(20))


def test_what_a_worker_keeps_while_it_is_declared_dead_is_not_lost_as_well(hire: Hire) -> None:
    one, other = hire("one"), hire("other")
    claim = sure(one, 0)
    one.renew(Sign({0: 3}))
    with ThreadPoolExecutor(1) as pool:
        with one.owned(claim) as owned:
            assert owned is not None
            releasing = pool.submit(released, other, "one")
            wait([releasing], timeout=0.3)  # on SQLite it waits for the file, elsewhere for the row
            owned.keep(3)
        assert releasing.result() == [0]
    assert other.spans() == [Span(0, 0, 3, True)]


def released(claims: Claims, name: str) -> list[int]:
    with claims.alone() as held:
        return held.release(name, died=True)


def test_a_sign_of_life_in_the_middle_of_being_declared_dead_blocks_neither(hire: Hire) -> None:
    one, other = hire("one"), hire("other")
    for attempt in range(5):
        trials = range(40 * attempt, 40 * (attempt + 1))
        with one.alone() as held:
            for trial in trials:
                held.claim(trial)
        one.renew(Sign({}))
        with ThreadPoolExecutor(2) as pool:
            sign = pool.submit(one.renew, Sign({trial: attempt for trial in reversed(trials)}))
            assert sorted(pool.submit(released, other, "one").result()) == list(trials)
            sign.result()


def test_of_workers_that_are_idle_one_at_a_time_loses_its_trials_and_none_of_them_has_died(hire: Hire) -> None:
    idle, also, busy = (hire(name) for name in ("idle", "also idle", "busy"))
    for number, each in enumerate((idle, also, busy)):
        each.renew(Sign({}, is_idle=each is not busy))
        sure(each, number)
    taken = []
    for _ in range(3):
        with busy.alone() as held:
            taken += held.release_idle(lambda trial: None)
    assert taken == [1, 0], "in the order of their names"
    assert sure(busy, 0).deaths == 0
    also.renew(Sign({}))
    sure(also, 1)
    with busy.alone() as held:
        assert held.release_idle(lambda trial: None) == [], "it trains again"


def test_trials_of_a_worker_that_has_never_given_a_sign_of_life_are_not_lost_for_ever(hire: Hire) -> None:
    back, other = hire("back from the dead"), hire("other")
    other.renew(Sign({}))
    back.renew(Sign({}))
    released(other, "back from the dead")
    sure(back, 0)  # and now it dies for good
    with other.alone() as held:
        assert held.release_expired() == [0]


@pytest.mark.parametrize("back_to", [0, 1, 2, 3])
def test_going_back_into_the_middle_of_what_was_kept_loses_what_comes_after(back_to: int, hire: Hire) -> None:
    one = hire("one")
    claim = sure(one, 0)
    for epoch in (2, 4):
        with one.owned(claim) as owned:
            assert owned is not None
            owned.keep(epoch)
    with one.owned(claim) as owned:
        assert owned is not None
        owned.go_back(back_to)
    with one.owned(claim) as owned:
        assert owned is not None
        owned.end(5)
    assert covered(one.spans()) == list(range(5))
    assert sum(span.to_epoch - span.from_epoch for span in one.spans()) == 4 + 5 - back_to, "all that was trained"


def covered(spans: list[Span]) -> list[int]:
    """The epochs that are kept."""
    return sorted(epoch for span in spans if span.kept for epoch in range(span.from_epoch, span.to_epoch))


def test_workers_are_found_by_what_their_names_begin_with(hire: Hire) -> None:
    names = ["host:/run_1:rank0", "host:/run_1:rank1", "host:/runs1:rank0"]
    for number, name in enumerate(names):
        claimed(hire(name), number)
    with hire("").alone() as held:
        assert sorted(held.workers("host:/run_1:rank")) == names[:2], "an underscore is not any letter"


def test_the_file_is_for_its_user_alone(tmp_path: Path) -> None:
    Claims(connect("study.journal", tmp_path / "study"), "s", "one").close()
    assert (tmp_path / "study").stat().st_mode & 0o77 == 0
    assert (tmp_path / "study" / "claims.db").stat().st_mode & 0o77 == 0


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "claims.db").write_bytes(b"no database at all, but long enough to look like one" * 100)
    with pytest.raises(Exception, match="file is not a database"):
        Claims(connect("study.journal", tmp_path), "s", "one")
