"""A rank whose launcher sets no RANK: daemon and hooks have its device, and its records a name of their own."""

import pytest

from ds_hooks.shared.page.layout import Field
from launch.rank import CONFIG, RUN
from tests.support.paths import ROOT
from tests.support.sandbox import Job, Sandbox, wait_for

pytestmark = pytest.mark.integration

SRUN = {"RANK": "", "LOCAL_RANK": "", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}


def test_two_nodes_that_both_have_a_local_rank_1_never_write_one_file(sandbox: Sandbox) -> None:
    named = {CONFIG: str(sandbox.config()), RUN: str(sandbox.run)}
    script = [str(ROOT / "launch" / "rank.py"), str(ROOT / "tests" / "support" / "metronome.py"), "--local-rank", "1"]
    script += ["--bubble-ms", "2", "--compute-ms", "1"]  # its daemon writes records of many steps at once
    job: Job = sandbox.start(Job, *script, **named, **SRUN)
    wait_for(lambda: list(sandbox.run.glob("*.events.jsonl")), "records")
    assert [path.name for path in sandbox.run.glob("*.events.jsonl")] == ["rank5.events.jsonl"]
    (hello,) = wait_for(lambda: sandbox.events("job", 5), "the hooks' hello", patience_s=30)
    assert hello["pid"] == job.pid
    assert not sandbox.word(Field.SERVES_ANY_JOB, 1), "another job must not take this page for a spare one"
    assert job.finish() == 0
