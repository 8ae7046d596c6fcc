"""Hosts that share a database and an artifact store, and no directory."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState

from ds_hooks.shared.trial_attributes import CHECKPOINTS
from tests.support.fused_and_solo import AtOnce
from tests.support.sandbox import wait_for
from tests.support.simulated import EPOCHS
from tests.support.slow_cases import others_slow
from tests.support.stored_studies import Store, Stored, asked, hire, save, saved, stored
from trials.search.files import checkpoint_files, shared_store
from trials.search.files.artifacts import ARTIFACTS
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage
from trials.search.worker import SearchWorker, WorkerConfig

pytestmark = pytest.mark.integration


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(shared_store, "AGAIN_S", (0.0, 0.0))
    return Store(tmp_path / "store")


def test_a_trial_goes_on_where_another_host_has_saved_it(
    database: str, tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    one = hire(database, here, store)
    assert asked(one, 2) == {0: 0, 1: 0}
    for epoch in (1, 2, 3):
        save(one, here, 0, epoch)
    assert stored(store) == ["0-2-1.pt", "0-3-1.pt"], "two, as in the directory"
    one.stop()
    other = hire(database, there, store)
    assert asked(other, 2) == {0: 3, 1: 0}
    assert saved(there, 0) == [f"trial 0 after {epoch} epochs on here" for epoch in (3, 2)], "it may be damaged"
    other.began(0, 3)
    assert save(other, there, 0, 4) == {"taken": 0, "epoch": 4, "place": 0}
    assert [name.partition("-")[2][:1] for name in stored(store)] == ["3", "4"]
    other.report(0, 4, 0.5, True)
    other.fail(1, "it failed")
    assert stored(store) == [], "it has ended"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_what_does_not_come_to_the_store_is_kept_where_it_was_saved(
    database: str, tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    one = hire(database, here, store)
    asked(one, 1)
    save(one, here, 0, 1)
    store.is_away = True
    save(one, here, 0, 2)
    save(one, here, 0, 3)
    assert caplog.text.count("are on this host alone while the artifact store fails: ConnectionError: no route to") == 1
    store.is_away = False
    one.stop()
    again = hire(database, here, store)
    store.is_away = True
    assert asked(again, 1) == {0: 3} and saved(here, 0)[0] == "trial 0 after 3 epochs on here", "it needs no store"
    store.is_away = False
    again.stop()
    other = hire(database, there, store)
    assert asked(other, 1) == {0: 3} and saved(there, 0) == ["trial 0 after 1 epochs on here"]
    other.began(0, 1)  # as the side task finds
    assert "taken" in (save(other, there, 0, 2) or {}) and [name[:3] for name in stored(store)] == ["0-1", "0-2"]
    spans = [(span.from_epoch, span.to_epoch, span.kept) for span in other._claims.spans()]
    assert sorted(spans) == [(0, 1, True), (1, 2, False), (1, 2, True), (2, 3, False)]


def test_a_trial_waits_while_the_store_is_away(
    database: str, tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    one = hire(database, here, store, trials=1)
    asked(one)
    save(one, here, 0, 2)
    one.stop()
    other = hire(database, there, store, trials=1)
    store.is_away = True
    for _ in range(2):
        answer = other.ask(9)
        assert answer["trials"] == [] and answer["exhausted"] and not answer["over"]
    assert caplog.text.count("trials wait for their checkpoints while the artifact store fails") == 1
    store.is_away = False
    assert asked(other) == {}, "not at once"
    monkeypatch.setattr(shared_store, "PAUSE_S", 0.0)
    assert asked(other) == {0: 2}
    assert saved(there, 0) == ["trial 0 after 2 epochs on here"]


def test_a_checkpoint_that_is_gone_is_named_and_the_one_before_is_used(
    database: str, tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    one = hire(database, here, store)
    asked(one, 1)
    save(one, here, 0, 1)
    save(one, here, 0, 2)
    one.stop()
    (newest,) = Path(store._base_path).glob("*-0-2-1.pt")
    newest.unlink()
    assert asked(hire(database, there, store), 1) == {0: 2}, "the side task finds that it is not there"
    assert saved(there, 0) == ["trial 0 after 1 epochs on here"]
    assert "trial 0: its checkpoint 2-1.pt is no longer in the artifact store" in caplog.text


def test_trials_that_end_paused_leave_nothing_in_the_store(database: str, tmp_path: Path, store: Store) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    one = hire(database, here, store, trials=3, search="asha")
    for number in asked(one):
        save(one, here, number, 1)
        one.report(number, 1, 0.1 * number, False)
    one.stop()
    other = hire(database, there, store, trials=3, search="asha")
    assert len(stored(store)) == 3
    while not (answer := other.ask(1))["over"]:
        for trial in answer["trials"]:
            other.report(trial["number"], trial["milestone"], 0.5, trial["milestone"] == EPOCHS)
    states = [trial.state for trial in other._study.trials]
    assert states == [TrialState.PRUNED, TrialState.PRUNED, TrialState.COMPLETE] and stored(store) == []


def test_a_worker_that_comes_back_leaves_what_its_successor_has_stored(
    database: str, tmp_path: Path, store: Store
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    late = hire(database, here, store)
    asked(late, 1)
    save(late, here, 0, 1)
    other = hire(database, there, store)
    other._lock.alone(lambda held: other._released(held, held.release("here", died=True)))
    assert asked(other, 1) == {0: 1}
    save(other, there, 0, 2)
    before = stored(store)
    assert save(late, here, 0, 2) == {"lost": 0}
    assert stored(store) == before and len(before) == 2


@pytest.mark.parametrize("has_store", [True, False])
def test_a_worker_that_does_not_see_the_store_says_so(
    has_store: bool, database: str, tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    one = hire(database, here, store)
    asked(one, 1)
    save(one, here, 0, 1)
    one.stop()
    other = hire(database, there, Store(tmp_path / "another") if has_store else None)
    assert has_store == ("other workers of the study have another one" in caplog.text)
    assert asked(other) == {1: 0, 2: 0, 3: 0}
    assert f":{here} cannot be seen from" in caplog.text and "or an artifact_store() of the study" in caplog.text
    assert asked(hire(database, here, None, "again"), 1) == {0: 1}, "it is in the directory, too"


@pytest.mark.parametrize("way", others_slow(["write", "read", "make"], ["make", "write"]))
def test_a_store_that_fails_at_the_start_leaves_the_directory(
    way: str, database: str, tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    here = tmp_path / "here"
    if way == "read":
        hire(database, here, store).stop()
    store.is_away = True

    class Unmade(Stored):
        def artifact_store(self) -> Any:
            raise ModuleNotFoundError("no module boto3")

    study = Unmade(store) if way == "make" else Stored(store)
    worker = SearchWorker(study, WorkerConfig(storage=database, study_name="s", worker="w", directory=here), AtOnce())
    said = "there is no artifact store: ModuleNotFoundError" if way == "make" else "not in the artifact store: Connecti"
    assert said in caplog.text
    asked(worker, 1)
    save(worker, here, 0, 1)
    worker.stop()
    assert asked(hire(database, here, None), 1) == {0: 1}


def test_names_that_others_wrote_lead_to_no_other_file(database: str, tmp_path: Path, store: Store) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    one = hire(database, here, store)
    asked(one, 1)
    save(one, here, 0, 1)
    one._trials.note_checkpoints(one._held[0].trial_id, ["../../1-1.pt", "/1-1.pt", "1-1.pt"])
    one.stop()
    asked(hire(database, there, store), 1)
    assert [file.name for file in there.rglob("*.pt")] == ["1-1.pt"]


def write_weights(host: Path, number: int) -> str:
    weights = checkpoint_files.temporary_weights_path(host, number)
    torch.save({"of": torch.full((9,), float(number))}, weights)
    return str(weights)


def best_of(host: Path) -> dict[str, float]:
    """The weights there, by their files' names."""
    return {file.name: torch.load(file, weights_only=True)["of"][0].item() for file in (host / "best").glob("*.pt")}


def end_all(workers: Sequence[SearchWorker], hosts: Sequence[Path], scores: Sequence[float]) -> None:
    """Let each worker end half of the trials."""
    for worker in workers:
        asked(worker, 2)
    for number, score in enumerate(scores):
        worker, host = workers[number // 2], hosts[number // 2]
        worker.report(number, 4, score, True, weights=write_weights(host, number))
    for worker in workers:
        assert worker.ask(1)["over"]


def test_the_best_weights_of_all_hosts_come_together(database: str, tmp_path: Path, store: Store) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    workers = [hire(database, host, store) for host in hosts]
    end_all(workers, hosts, [0.3, 0.1, 0.2, 0.4])
    assert stored(store) == ["best-0.pt", "best-3.pt"]
    workers[1].stop()
    assert best_of(hosts[1]) == {"trial-3.pt": 3.0, "trial-0.pt": 0.0}


@pytest.mark.parametrize("way", ["torn", "flipped"])
def test_damaged_weights_are_named_and_not_taken(
    way: str, database: str, tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    workers = [hire(database, host, store) for host in hosts]
    end_all(workers, hosts, [0.3, 0.1, 0.2, 0.4])
    (file,) = Path(store._base_path).glob("*-best-0.pt")
    whole = file.read_bytes()
    at = whole.index(torch.zeros(9).numpy().tobytes())
    file.write_bytes(whole[: len(whole) // 2] if way == "torn" else whole[:at] + b"x" + whole[at + 1 :])
    workers[1].stop()
    assert best_of(hosts[1]) == {"trial-2.pt": 2.0, "trial-3.pt": 3.0}, "the next in its place"
    assert "the weights of trial 0 did not come from the artifact store: BadZipFile" in caplog.text
    workers[0].stop()
    study = optuna.load_study(study_name="s", storage=open_storage(database))
    assert study.user_attrs[ARTIFACTS]["files"].keys() == {"best.json", "trial-0.pt", "trial-3.pt"}, "it is whole there"


@pytest.mark.parametrize("is_away", others_slow(["at the start", "when trials end"], ["when trials end"]))
def test_what_is_uploaded_of_the_best_is_never_replaced_by_less(
    is_away: str, database: str, tmp_path: Path, store: Store
) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    one = hire(database, hosts[0], store)
    store.is_away = is_away == "at the start"
    workers = [one, hire(database, hosts[1], store)]
    store.is_away = is_away == "when trials end"
    end_all(workers, hosts, [0.4, 0.3, 0.2, 0.1])
    store.is_away = False
    for worker in workers:
        worker.stop()
    study = optuna.load_study(study_name="s", storage=open_storage(database))
    assert study.user_attrs[ARTIFACTS]["files"].keys() == {"best.json", "trial-0.pt", "trial-1.pt"}


STUDY = """
import time
import torch
from optuna.artifacts import FileSystemArtifactStore
from torch import nn
from trials import Study

class Stored(Study):
    trials, epochs, fused, rungs = 6, 12, 3, tuple(range(1, 12))
    slow_s = {slow_s}

    def suggest(self, trial): return {{"lr": 0.01 * (1 + trial.number)}}
    def model(self, params): return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    def optimizer(self, params, model): return torch.optim.SGD(model.parameters(), params["lr"], momentum=0.9)
    def loss(self, outputs, targets): return (outputs - targets).square().mean()
    def score(self, outputs, targets): return -self.loss(outputs, targets)
    def pruner(self):
        import optuna
        return optuna.pruners.NopPruner()
    def artifact_store(self): return FileSystemArtifactStore("store")
    def batches(self, epoch):
        time.sleep(self.slow_s)
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(epoch))
        return [(inputs, inputs.sum(1, keepdim=True))]
    def validation(self): return self.batches(99)
"""


@pytest.mark.slow
def test_a_study_goes_on_on_another_host(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHERE", database)
    Path("store").mkdir()

    def trials() -> list[optuna.trial.FrozenTrial]:
        try:
            return list(optuna.load_study(study_name="stored", storage=open_storage(database)).trials)
        except KeyError:
            return []

    def command(host: str, slow_s: float) -> list[str]:
        Path("stored.py").write_text(STUDY.format(slow_s=slow_s))
        words = ["run", "stored.py", "--storage", "env:WHERE", "--directory", host]
        return [sys.executable, "-m", "trials", *words]

    with subprocess.Popen(command("a", 0.3), stdout=subprocess.DEVNULL) as first:
        wait_for(lambda: any(trial.user_attrs.get(CHECKPOINTS) for trial in trials()), "a checkpoint")
        first.send_signal(signal.SIGINT)
        first.wait(timeout=60)
    saved = {trial.number for trial in trials() if trial.user_attrs.get(CHECKPOINTS)}
    subprocess.run(command("b", 0.0), check=True, stdout=subprocess.DEVNULL)
    assert [trial.state for trial in trials()] == [TrialState.COMPLETE] * 6
    claims = Claims(connect(database, None), "stored", "")
    spans = claims.spans()
    claims.close()
    begun_anew = {span.trial for span in spans if not span.kept and span.from_epoch == 0}
    assert saved and not saved & begun_anew
    assert len(list(Path("b/stored/best").glob("trial-*.pt"))) == 1, "the best, wherever it ended"
