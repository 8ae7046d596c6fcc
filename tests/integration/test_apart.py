"""A daemon and a main job that the machine keeps apart, in control groups of their own: real ones."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.sandbox import Child, Job, Sandbox, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.alone]

IN = "import os, sys; open(sys.argv[1], 'w').write('0'); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
"""A program that enters a control group and becomes another."""
METRONOME = "-m", "tests.support.metronome", "--bubble-ms", "10"


@pytest.fixture
def apart(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    """The `cgroup.procs` of two groups of this controller."""
    top = Path("/sys/fs/cgroup", request.param)
    groups = [top / f"squeezer-test-{os.getpid()}-{name}" for name in "ab"]
    try:
        for core, group in zip(sorted(os.sched_getaffinity(0)), groups, strict=False):
            group.mkdir()
            if request.param == "cpuset":
                (group / "cpuset.mems").write_text((top / "cpuset.mems").read_text())
                (group / "cpuset.cpus").write_text(str(core))
        if not groups[-1].exists():
            pytest.skip("needs two cores, so it is NOT shown")
    except OSError as error:
        pytest.skip(f"no groups of the controller {request.param} (v1) here, so it is NOT shown: {error}")
    yield [str(group / "cgroup.procs") for group in groups]
    for group in groups:
        with suppress(OSError):
            group.rmdir()


def daemon_in(group: tuple[str, ...], sandbox: Sandbox) -> Child:
    config = str(sandbox.config("tiny.py"))
    daemon: Child = sandbox.start(Child, *group, "-m", "tests.support.eager_daemon", "daemon", "--config", config)
    wait_for(lambda: "serves device" in daemon.said() or daemon.process.poll() is not None, "the daemon")
    return daemon


@pytest.mark.parametrize("apart", ["cpuset"], indirect=True)
def test_a_daemon_that_may_not_use_the_jobs_cores_says_so_and_serves_the_next_job(
    sandbox: Sandbox, apart: list[str]
) -> None:
    in_one, in_other = (("-c", IN, procs) for procs in apart)
    daemon = daemon_in(in_one, sandbox)
    job: Job = sandbox.start(Job, *in_other, *METRONOME)
    job.beats(20)
    assert job.finish() == 0
    says = "no side task runs beside the main job: this daemon may not use the main job's cores"
    assert daemon.said().count(says) == 1, daemon.said()
    assert "Traceback" not in daemon.said() and not sandbox.side("started")
    job = sandbox.start(Job, *in_one, *METRONOME)
    wait_for(lambda: sandbox.side("ready"), "a side task beside a job on the daemon's own core")
    assert job.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0


@pytest.mark.parametrize("apart", ["cpu"], indirect=True)
def test_where_control_groups_share_the_cores_daemon_and_doctor_say_what_to_do(
    sandbox: Sandbox, apart: list[str]
) -> None:
    in_one, in_other = (("-c", IN, procs) for procs in apart)
    daemon = daemon_in(in_one, sandbox)
    for where, warnings in ((in_one, 0), (in_other, 1)):
        job: Job = sandbox.start(Job, *where, *METRONOME)
        job.beats(20)
        assert job.finish() == 0
        assert daemon.said().count("start the daemon in the job's group") == warnings, daemon.said()
    assert daemon.kill(signal.SIGTERM) == 0
    assert "must be started in its job's group" in sandbox.run_to_end(*in_one, "-m", "squeezer", "doctor")[1]
