"""What a benchmark writes: as a whole or not at all, on whatever machine."""

import argparse
import json
import resource
from pathlib import Path

import pytest

from benchmarks.shared.results import commit, nvidia_smi, stopped_runs, write


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Of a benchmark on a machine without git, or any other tool."""
    monkeypatch.setenv("PATH", "/nowhere")
    return argparse.Namespace(quick=True, json=tmp_path / "results.json")


def test_runs_can_be_written_where_no_tool_is_installed(options: argparse.Namespace) -> None:
    write("some", options, [{"ms": [1.5, 2.5]}], {})
    written = json.loads(options.json.read_text())
    assert written["runs"] == [{"ms": [1.5, 2.5]}] and written["commit"] == "unknown"


def test_what_was_written_stays_where_more_has_no_room(options: argparse.Namespace) -> None:
    write("some", options, [1], {})
    before = options.json.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write("some", options, [2], {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert options.json.read_bytes() == before
    assert [*options.json.parent.iterdir()] == [options.json]


@pytest.mark.parametrize(("visible", "asked"), [(None, "0"), ("", "0"), ("3,1", "3"), (" GPU-12ab , 1", "GPU-12ab")])
def test_the_tool_is_asked_of_the_device_that_is_measured(
    visible: str | None, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert f"--id={asked}" in nvidia_smi("name")


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({}, ["one", "two"]),
        ({"commit": f"{commit().removesuffix('-dirty')}-dirty"}, ["one", "two"]),
        ({"commit": "0123456789ab"}, []),
        ({"machine": {"cpu": "another"}}, []),
        ({"quick": False}, []),
    ],
)
def test_a_stopped_command_goes_on_with_runs_of_its_own_alone(
    changed: dict[str, object], kept: list[str], tmp_path: Path
) -> None:
    options = argparse.Namespace(quick=True, json=tmp_path / "results.json", only=None)
    assert stopped_runs(options) == []
    write("some", options, [{"scenario": "one"}, {"scenario": "two"}], {})
    options.json.write_text(json.dumps({**json.loads(options.json.read_text()), **changed}))
    assert [run["scenario"] for run in stopped_runs(options)] == kept
    options.only = "one"
    assert [run["scenario"] for run in stopped_runs(options)] == ["two"], "that one anew, whatever made the others"
