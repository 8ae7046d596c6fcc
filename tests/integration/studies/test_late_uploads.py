"""Checkpoints that the artifact store did not take come there later, as long as they are their trials' newest."""

from pathlib import Path

import optuna
import pytest

from ds_hooks.shared.trial_attributes import CHECKPOINTS
from tests.support.simulated import EPOCHS
from tests.support.stored_studies import Store, asked, hire, save, saved, stored
from trials.search.files import shared_store
from trials.search.storage.optuna_storage import open_storage
from trials.search.worker import SearchWorker

pytestmark = pytest.mark.integration


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(shared_store, "AGAIN_S", (0.0, 0.0))
    monkeypatch.setattr(shared_store, "PAUSE_S", 0.0)
    return Store(tmp_path / "store")


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    return [tmp_path / "here", tmp_path / "there"]


def known(database: str, number: int) -> list[str]:
    """The checkpoints of a trial in the store, by what the database says."""
    trial = optuna.load_study(study_name="s", storage=open_storage(database)).trials[number]
    return list(trial.user_attrs.get(CHECKPOINTS, []))


def save_what_is_not_taken(worker: SearchWorker, host: Path, store: Store) -> None:
    """Save trial 0 twice. The store is away the second time, and stays so."""
    save(worker, host, 0, 1)
    store.is_away = True
    save(worker, host, 0, 2)


@pytest.mark.parametrize("when", ["at the next save", "at the next ask", "at the release", "at the next start"])
def test_it_comes_to_the_store(when: str, database: str, hosts: list[Path], store: Store) -> None:
    here, there = hosts
    one = hire(database, here, store)
    asked(one, 2)
    save_what_is_not_taken(one, here, store)
    assert stored(store) == ["0-1-1.pt"]
    store.is_away = when == "at the next start"
    if when == "at the next save":
        save(one, here, 1, 1)
        one.ask(0)
    elif when == "at the next ask":
        one.ask(0)
    one.stop()
    if when == "at the next start":
        store.is_away = False
        again = hire(database, here, store, name="another")
        again.ask(0)
        again.stop()
    assert known(database, 0) == ["1-1.pt", "2-1.pt"]
    assert {"0-1-1.pt", "0-2-1.pt"} <= set(stored(store))
    other = hire(database, there, store)
    assert asked(other, 1) == {0: 2}
    assert saved(there, 0)[0] == "trial 0 after 2 epochs on here"


def test_a_paused_trial_can_be_promoted_on_another_host(database: str, hosts: list[Path], store: Store) -> None:
    here, there = hosts
    one = hire(database, here, store, search="asha")
    (number, *_) = asked(one, 1)
    store.is_away = True
    save(one, here, number, 1)
    one.report(number, 1, 0.9, False)
    store.is_away = False
    one.ask(0)
    assert stored(store) == [f"{number}-1-1.pt"] and known(database, number) == ["1-1.pt"]
    other = hire(database, there, store, search="asha")
    for _ in range(4):
        for each in asked(other, 1):
            if each == number:
                assert saved(there, number) == [f"trial {number} after 1 epochs on here"]
                return
            save(other, there, each, 1)
            other.report(each, 1, 0.1, False)
    raise AssertionError("it was not promoted")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_another_host_has_trained_since_is_not_replaced(
    when: str, database: str, hosts: list[Path], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = hosts
    one = hire(database, here, store)
    asked(one, 1)
    save_what_is_not_taken(one, here, store)
    one.stop()
    store.is_away = False
    again = hire(database, here, store, name="another")
    other = hire(database, there, store)

    def overtake() -> None:
        assert asked(other, 1) == {0: 2}, "by the accounts"
        other.began(0, 1)
        save(other, there, 0, 2)

    if when == "before":
        overtake()
    else:
        upload = shared_store.SharedStore.upload

        def late(self: shared_store.SharedStore, *args: object) -> list[str] | None:
            monkeypatch.undo()
            overtake()
            return upload(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(shared_store.SharedStore, "upload", late)
    again.ask(0)
    assert known(database, 0) == ["1-1.pt", "2-2.pt"]
    assert stored(store) == ["0-1-1.pt", "0-2-2.pt"]


def test_nothing_comes_of_trials_that_have_ended(database: str, hosts: list[Path], store: Store) -> None:
    here, _ = hosts
    one = hire(database, here, store)
    asked(one, 2)
    store.is_away = True
    for number in (0, 1):
        save(one, here, number, 1)
    one.report(0, EPOCHS, 0.5, True)
    one.fail(1, "of its own")
    store.is_away = False
    one.ask(0)
    one.stop()
    again = hire(database, here, store)
    again.ask(0)
    assert stored(store) == []


def test_a_store_that_goes_on_failing_is_not_asked_all_the_time(
    database: str, hosts: list[Path], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_store, "PAUSE_S", 600.0)
    here, _ = hosts
    one = hire(database, here, store)
    asked(one, 1)
    store.is_away = True
    save(one, here, 0, 1)
    store.is_away = False
    for _ in range(3):
        one.ask(0)
    assert stored(store) == []
