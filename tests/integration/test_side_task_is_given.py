"""What a side task's process is given: an environment, a storage, files, and memory."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from optuna.trial import TrialState

from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.secrets import STORAGE_VARIABLE
from tests.support.sandbox import Sandbox, is_alive, wait_for

pytestmark = pytest.mark.integration

PASSWORD = "s3cr3t"
OF_THE_JOB = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "0"}


def with_side(sandbox: Sandbox, study: str, **keys: str | float) -> Path:
    """A configuration with more keys for the side task."""
    path = sandbox.config(study)
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    path.write_text(path.read_text().replace("[side]\n", "\n".join(["[side]", *lines, ""])))
    return path


def test_it_is_not_given_the_jobs_identity_and_dies_before_the_job_does(sandbox: Sandbox, tmp_path: Path) -> None:
    spied = tmp_path / "spied"
    config = with_side(sandbox, "spies.py", memory_mb=16384.0)
    daemon = sandbox.daemon_of(sandbox.job(), config, SPIES=str(spied), **OF_THE_JOB)
    wait_for(lambda: spied.exists() and spied.read_text().endswith("}"), "the study")
    found = json.loads(spied.read_text())
    assert not {*OF_THE_JOB, STORAGE_VARIABLE} & found["environment"].keys()
    assert found["environment"]["PATH"] == os.environ["PATH"]
    for cache in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
        assert Path(found["environment"][cache]).is_relative_to(sandbox.run)
    assert (found["oom_score_adj"], found["data"]) == (1000, 16384 << 20)
    side = sandbox.word(Field.SIDE_PROCESS)
    assert os.getpgid(side) == side and os.getsid(side) == os.getsid(daemon.pid), "a group of its own, not a session"
    search = wait_for(lambda: sandbox.word(Field.SEARCH_PROCESS), "the search worker")
    assert Path(f"/proc/{search}/oom_score_adj").read_text() == "1000\n"
    main = sandbox.word(Field.MAIN_PID)
    assert Path(f"/proc/{main}/oom_score_adj").read_text() == Path("/proc/self/oom_score_adj").read_text()
    temporary = Path(found["environment"]["TMPDIR"])
    assert temporary.is_dir()
    os.kill(main, signal.SIGTERM)
    assert daemon.ended() == 0
    assert not temporary.exists()


def test_a_storages_password_is_shown_nowhere(sandbox: Sandbox) -> None:
    url = f"postgresql+nodriver://me:{PASSWORD}@127.0.0.1:1/studies?sslpassword={PASSWORD}"
    config = with_side(sandbox, "tiny.py", storage=url)
    job = sandbox.job()
    daemon = sandbox.daemon_of(job, config)
    seen: set[int] = set()
    while "is given up" not in daemon.said():
        time.sleep(0.05)
        for pid in sandbox.living():
            try:
                assert PASSWORD.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            except FileNotFoundError:
                continue
            seen.add(pid)
        assert is_alive(daemon.pid)
    assert len(seen) > 3, "its processes were looked at"
    assert job.finish() == 0
    assert daemon.ended() == 0
    said = [daemon.said()]
    for command in (["report"], ["report", "--json"], ["why"]):
        status, printed = sandbox.run_to_end("-m", "squeezer", *command, str(sandbox.run))
        assert status == 0, printed
        said.append(printed)
    status, printed = sandbox.run_to_end("-m", "trials", "close", "--study-name", "tiny", SQUEEZER_STORAGE=url)
    assert status == 2 and "nodriver" in printed
    records = [path for path in sandbox.run.rglob("*") if path.suffix != ".bin" and path.is_file()]
    said += [printed, *(path.read_text() for path in records)]
    assert any("nodriver" in each for each in said[4:]), "the error is recorded"
    assert [each for each in said if PASSWORD in each] == []
    assert [path for path in (sandbox.run, *sandbox.run.glob("*.*")) if path.stat().st_mode & 0o077] == []


@pytest.mark.slow
def test_trials_that_do_not_fit_into_memory_mb_train_one_after_another(sandbox: Sandbox, tmp_path: Path) -> None:
    config = with_side(sandbox, "spies.py", memory_mb=700.0)
    job = sandbox.job()
    daemon = sandbox.daemon_of(job, config, SPIES=str(tmp_path / "spied"), SPIES_MB="150")
    wait_for(lambda: sandbox.side("finished"), "the end of the study")
    assert job.finish() == 0
    assert daemon.ended() == 0
    assert json.loads((tmp_path / "spied").read_text())["data"] == 700 << 20
    assert sandbox.side("out_of_memory")[0]["most"] == 1
    assert "3 trials did not fit into the side task's memory; at most 1 train" in daemon.said()
    assert TrialState.COMPLETE in {trial.state for trial in sandbox.trials("spies")}
