"""What a benchmark writes: as a whole or not at all, on whatever machine."""

import argparse
import json
import resource
from pathlib import Path

import pytest

from benchmarks.shared.results import nvidia_smi, write


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
