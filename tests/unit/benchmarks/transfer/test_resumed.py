"""The benchmark can be stopped, and goes on with the experiments that its file lacks."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.results import commit
from benchmarks.transfer import __main__ as benchmark
from benchmarks.transfer.oracles import oracles

Runs = list[dict[str, Any]]


def stops(quick: bool) -> Runs:
    raise KeyboardInterrupt


def run(monkeypatch: pytest.MonkeyPatch, file: Path, **experiments: Callable[[bool], Runs]) -> Mapping[str, Any]:
    monkeypatch.setattr(benchmark, "EXPERIMENTS", experiments)
    monkeypatch.setattr(sys, "argv", ["transfer", "--quick", "--json", str(file)])
    try:
        benchmark.main()
    except KeyboardInterrupt:
        pass
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_it_goes_on_where_it_was_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "transfer.json"
    stopped = run(monkeypatch, file, oracles=oracles, more=stops)
    assert {each["scenario"] for each in stopped["runs"]} == {"oracles"}
    whole = run(monkeypatch, file, oracles=stops, more=oracles)
    assert [each["scenario"] for each in whole["runs"]] == ["oracles"] * 6 + ["more"] * 6
    assert whole["runs"][:6] == stopped["runs"]
    assert whole["summary"]["oracle_error"] < 1e-10


def test_what_is_whole_or_of_another_commit_is_measured_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "transfer.json"
    first = run(monkeypatch, file, oracles=oracles)
    again = run(monkeypatch, file, oracles=oracles)
    assert len(again["runs"]) == 6
    assert again["runs"][0]["experiment_s"] != first["runs"][0]["experiment_s"]
    file.write_text(json.dumps({**first, "commit": "0123456789ab"}))
    other = run(monkeypatch, file, oracles=oracles, more=oracles)["runs"]
    assert len(other) == 12 and other[0]["experiment_s"] != first["runs"][0]["experiment_s"]
    assert json.loads(file.read_text())["commit"] == commit()
