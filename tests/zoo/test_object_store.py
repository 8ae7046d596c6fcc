"""Hosts that share a database and a bucket of S3, by its real client and an HTTP server that speaks its language."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.artifacts import Boto3ArtifactStore

from tests.support.simulated import EPOCHS
from tests.support.stored_studies import asked, hire, save, saved
from trials.search.files import checkpoint_files, shared_store
from trials.search.files.artifacts import ARTIFACTS

BUCKET = "studies"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    boto3 = pytest.importorskip("boto3", reason="there is no boto3: make test-zoo installs it")
    server = pytest.importorskip("moto.server", reason="there is no moto: make test-zoo installs it")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-no-matter")
    monkeypatch.setattr(shared_store, "AGAIN_S", (0.0, 0.0))
    served = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    served.start()
    host, port = served.get_host_and_port()
    found = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    found.create_bucket(Bucket=BUCKET)
    yield found
    served.stop()


def names(client: Any) -> list[str]:
    return sorted(each["Key"] for each in client.list_objects_v2(Bucket=BUCKET).get("Contents", []))


def test_a_trial_goes_on_where_another_host_has_saved_it(database: str, tmp_path: Path, client: Any) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    store = Boto3ArtifactStore(BUCKET, client=client)
    one = hire(database, here, store)
    assert asked(one, 2) == {0: 0, 1: 0}
    for epoch in (1, 2, 3):
        save(one, here, 0, epoch)
    assert len(names(client)) == 3, "two checkpoints, as in the directory, and the store's own name"
    one.stop()
    other = hire(database, there, store)
    assert asked(other, 2) == {0: 3, 1: 0}
    assert saved(there, 0)[0] == "trial 0 after 3 epochs on here"
    weights = checkpoint_files.temporary_weights_path(there, 0)
    weights.write_bytes(b"of trial 0")
    assert other.report(0, EPOCHS, 0.5, final=True, weights=str(weights)) is None
    assert not [name for name in names(client) if "checkpoint" in name or name.endswith("-1.pt")], "the trial has ended"
    other.stop()


def test_the_best_weights_are_in_the_bucket_once_the_study_is_over(database: str, tmp_path: Path, client: Any) -> None:
    worker = hire(database, tmp_path / "here", Boto3ArtifactStore(BUCKET, client=client), trials=1)
    assert asked(worker, 1) == {0: 0}
    weights = checkpoint_files.temporary_weights_path(tmp_path / "here", 0)
    weights.write_bytes(b"of trial 0")
    worker.report(0, EPOCHS, 0.5, final=True, weights=str(weights))
    assert worker.ask(1)["over"]
    study = worker._study
    worker.stop()
    uploaded = study.user_attrs[ARTIFACTS]["files"]
    contents = {name: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for name, key in uploaded.items()}
    assert contents.pop("trial-0.pt") == b"of trial 0"
    assert [entry["number"] for entry in json.loads(contents.pop("best.json"))] == [0] and not contents
