"""What the daemon writes down: for its user alone, and without passwords, whoever has let one through."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from squeezer.records.layout import details_path, events_path
from squeezer.records.writer import Recorder

URL = "postgresql://me:s3cr3t@host/studies?sslpassword=s3cr3t"


@pytest.fixture
def careless() -> Iterator[None]:
    """A umask that lets all users do all."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("careless")
def test_records_are_private_and_hide_passwords(tmp_path: Path) -> None:
    run = tmp_path / "run"
    recorder = Recorder(run, 0)
    recorder.add("fault", what=f"the storage {URL} is away")
    recorder.add("progress", event=URL)
    recorder.close()
    paths = events_path(run, 0), details_path(run, 0)
    for path in paths:
        text = path.read_text()
        assert "postgresql://me:***@host" in text and "s3cr3t" not in text
    assert [path.stat().st_mode & 0o777 for path in (run, *paths)] == [0o700, 0o600, 0o600]
