"""A script whose steps, evaluations and checkpoints fail, and which goes on: so do its hooks, and no gate is open."""

import json
from pathlib import Path

import pytest

from squeezer.records.layout import events_path
from squeezer.records.reader import read_details, read_events
from tests.support.jobs import PATIENT, deepspeed, ds_squeeze, run, short_directory, units_outside_bubbles
from tests.support.paths import ROOT
from tests.support.raising_train import FAILURES, PATIENT_STEPS, STEPS_BETWEEN

pytestmark = [pytest.mark.integration, pytest.mark.alone]
SCRIPT = str(ROOT / "tests" / "support" / "raising_train.py")
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


@pytest.mark.slow
def test_hooks_go_on_behind_whatever_a_script_catches(tmp_path: Path) -> None:
    config, found, alone, losses = (tmp_path / name for name in ("squeezer.toml", "found", "alone", "losses"))
    config.write_text(CONFIG)
    with short_directory() as directory:
        plain = run(deepspeed(SCRIPT, "--losses", str(alone)), directory, alone)
        assert plain.status == 0, plain.output
        options = ("--losses", str(losses), "--found", str(found), "--exits")
        ended = run(ds_squeeze(config, PATIENT, SCRIPT, *options), directory, losses)
    assert (ended.status, ended.losses) == (0, plain.losses), ended.output
    assert len(set(ended.losses)) == PATIENT_STEPS + FAILURES * STEPS_BETWEEN
    assert "switched off" not in ended.output, ended.output
    for rank in (0, 1):
        says = json.loads(found.with_suffix(f".{rank}").read_text())
        assert says["looks"] > 500 and says["in_bubbles"] == 0, "no bubble is open while a layer or the script computes"
        records = [*read_events(events_path(tmp_path / "run", rank)), *read_details(tmp_path / "run", rank)]
        assert [record for record in records if record["r"] == "fault"] == []
        steps = [record["step"] for record in records if record["r"] == "step"]
        assert steps == list(range(steps[0], steps[-1] + 1)) and steps[-1] > len(plain.losses), "failed ones, too"
        ends = {record["step"]: record["end_ns"] for record in records if record["r"] == "step"}
        bubbles = [record for record in records if record["r"] == "bubble" and record["step"] in ends]
        assert all(record["end_ns"] <= ends[record["step"]] for record in bubbles), "none outlives its step"
        squeezed = {record["step"] for record in bubbles if record["permit_until_ns"] and record["side_ns"]}
        assert max(squeezed) > len(plain.losses), "the last ones, behind all failures"
        assert units_outside_bubbles(tmp_path / "run", rank) == []
