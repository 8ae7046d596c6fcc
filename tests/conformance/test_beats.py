"""Signs of life that wait for no lock: a worker that is held up keeps its trials."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from trials.search.storage import claim_tables
from trials.search.storage.claims import Claims, Sign
from trials.search.storage.database import connect


def test_a_lock_holds_no_sign_of_life_up(storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(claim_tables, "now_s", lambda connection: now[0])
    one, other = (Claims(connect(storage, tmp_path), "s", name) for name in ("one", "other"))
    for each in (one, other):
        each.renew(Sign({}))
    with one.alone() as held:
        claim = held.claim(3)
        assert claim is not None
    for locked in (other.alone, lambda: one.owned(claim)):
        with locked():
            now[0] += 50
            one.beat()
    now[0] += 50
    with other.alone() as held:
        assert held.release_expired() == []
        assert held.fleet().directories.keys() == {"one", "other"}
    now[0] += 50
    with other.alone() as held:
        assert held.release_expired() == [3]
    one.close()
    other.close()


def test_signs_from_before_the_machine_was_started_again_are_none(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hire(stack: ExitStack, name: str) -> Claims:
        claims = Claims(connect(storage, tmp_path), "s", name)
        stack.callback(claims.close)
        claims.renew(Sign({}))
        return claims

    with ExitStack() as stack:
        monkeypatch.setattr(claim_tables, "now_s", lambda connection: 10_000.0)
        hire(stack, "one").beat()
        monkeypatch.setattr(claim_tables, "now_s", lambda connection: 100.0)
        one, other = hire(stack, "one"), hire(stack, "other")
        with one.alone() as held:
            assert held.claim(3) is not None
        with other.alone() as held:
            assert held.release_expired() == []
