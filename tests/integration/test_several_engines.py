"""Scripts with several engines: the one that trains is squeezed, the same on all ranks."""

import json
from pathlib import Path

import pytest

from squeezer.records.layout import events_path
from squeezer.records.reader import read_details, read_events
from tests.support.jobs import run_squeezed, short_directory, units_outside_bubbles
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.alone]
SCRIPT = str(ROOT / "tests" / "support" / "several_engines_train.py")
CONFIG = f"""
[squeeze]
alone_share = 0.0
min_bubble_ms = 0.1
[guard]
enabled = false
[side]
study = "{ROOT}/benchmarks/studies/endless_digits.py"
[run]
directory = "run"
calibrate_s = 0.0
"""


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        pytest.param((), 1, id="built anew beside a teacher", marks=pytest.mark.slow),
        pytest.param(("--warm-up",), 9, id="after a warm-up"),
    ],
)
def test_the_engine_that_trains_is_squeezed_in_its_bubbles_only(
    tmp_path: Path, options: tuple[str, ...], waits: int
) -> None:
    """It is built anew, and the former one may live on; or it was built first, but another one has trained before."""
    config, found = tmp_path / "squeezer.toml", tmp_path / "found"
    config.write_text(CONFIG)
    with short_directory() as directory:
        ended = run_squeezed(config, tmp_path / "run", directory, found, SCRIPT, "--found", str(found), *options)
    assert ended.status == 0, ended.output
    assert "Traceback" not in ended.output and "switched off" not in ended.output, ended.output
    numbers = []
    for rank in (0, 1):
        says = json.loads(found.with_suffix(f".{rank}").read_text())
        assert says["looks"] > 1000 and says["in_bubbles"] == 0, "no bubble is open while a layer computes"
        events = [*read_events(events_path(tmp_path / "run", rank)), *read_details(tmp_path / "run", rank)]
        jobs = {event["job"]: event["micro_batches"] for event in events if event["r"] == "job"}
        steps = [(jobs[event["job"]], event["step"]) for event in events if event["r"] == "step"]
        assert steps == sorted(set(steps)), "each step once, first those of the engine that trains first"
        assert {4, 8} == {micro_batches for micro_batches, _ in steps}
        first = [min(step for each, step in steps if each == micro_batches) for micro_batches in (4, 8)]
        assert first == [2, waits + 1], "the teacher has not trained, nor an engine twice"
        numbers.append([max(step for each, step in steps if each == micro_batches) for micro_batches in (4, 8)])
        assert numbers[-1] == says["steps"], "the numbers are the engine's own"
        assert units_outside_bubbles(tmp_path / "run", rank) == []
    assert numbers[0] == numbers[1]
