"""What the tests of real processes share."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sandbox import Sandbox, new_sandbox

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs so; children inherit it
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the same by `nohup`, under which tests of terminals would wait


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    """A private directory for one device's processes."""
    with new_sandbox(tmp_path) as made:
        yield made


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """While this file is there, no trial of `studies/tiny.py` gets past its second epoch."""
    path = tmp_path / "hold"
    path.touch()
    return path
