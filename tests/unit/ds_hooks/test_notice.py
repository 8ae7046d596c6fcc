"""A notice never hurts the main job."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_hooks import attach
from ds_hooks.notice import notice
from tests.support.hooked_engine import Engine


class Broken(io.StringIO):
    """A script's own stderr, whose target is gone."""

    def write(self, text: str) -> int:
        raise RuntimeError("the console's thread has ended")


@pytest.mark.parametrize("stderr", [None, Broken(), open("/dev/full", "w", buffering=1)])  # noqa: SIM115
def test_a_dead_stderr_stops_nothing(stderr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    notice("the page belongs to user 0")
    handle = attach(object())
    handle.switch_off(ValueError("once more"))
    assert handle.fault is not None and "once more" not in handle.fault


def test_it_says_where_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    notice("rank 3: switched off")
    assert capsys.readouterr() == ("", "[ds_hooks] rank 3: switched off\n")


def test_of_many_engines_that_a_script_builds_each_kind_of_notice_is_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = [Engine(tmp_path / "none") for _ in range(12)]
    for engine in engines:  # DeepSpeed keeps the former ones alive
        attach(engine, directory=tmp_path / "run", local_rank=0)
        engine.train_batch()
        attach(engine, directory=tmp_path / "run", local_rank=0)
        attach(SimpleNamespace(), directory=tmp_path / "run", local_rank=0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(set(lines)) == 4, lines
