"""Hooks on DeepSpeed's DualPipeV engine, whose sends and receives only queue and whose commits wait."""

import subprocess
import sys
from pathlib import Path

import pytest

from squeezer.records.layout import events_path
from squeezer.records.reader import read_details, read_events
from tests.support.jobs import environment, run, short_directory, two_ranks
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.alone]
SCRIPT = str(ROOT / "tests" / "support" / "dualpipev_train.py")


def test_commits_are_bubbles_and_losses_are_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed.runtime.pipe.dualpipev", reason="this release of DeepSpeed has no DualPipeV")
    alone, hooked = tmp_path / "alone", tmp_path / "hooked"
    config = tmp_path / "squeezer.toml"
    config.write_text(f'[run]\ndirectory = "{tmp_path}/run"\n')
    with short_directory() as directory:
        plain = run(two_ranks(SCRIPT, "--losses", str(alone)), directory, alone)
        assert plain.status == 0, plain.output
        daemon = [sys.executable, "-m", "squeezer", "daemon", "--config", str(config)]
        with subprocess.Popen(daemon, env=environment(directory), cwd=tmp_path) as observer:
            ended = run(two_ranks("--module", "ds_hooks", SCRIPT, "--losses", str(hooked)), directory, hooked)
            observer.terminate()
    assert (ended.status, ended.losses) == (0, plain.losses), ended.output
    assert len(set(ended.losses)) == 24
    records = [*read_events(events_path(tmp_path / "run", 0)), *read_details(tmp_path / "run", 0)]
    steps = [record for record in records if record["r"] == "step"]
    waits = {record["wait"] for record in records if record["r"] == "bubble"}
    assert len(steps) >= 20 and waits == {"COMMIT_P2P", "OPTIMIZER_STEP"}, "rank 0 holds the loss"
    assert not [record for record in records if record["r"] == "fault"]
