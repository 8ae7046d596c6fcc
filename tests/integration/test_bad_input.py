"""What people and other processes can get wrong: the message is clear, nothing is left, no main job is hurt."""

import fcntl
import os
import random
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
from optuna.trial import TrialState

from ds_hooks.shared import wire
from ds_hooks.shared.page.file import page_path, socket_path
from ds_hooks.shared.page.layout import PAGE_BYTES, PAGE_MAGIC, Field
from ds_hooks.shared.processes.endings import USER_ERROR_STATUS
from tests.support.paths import STUDIES
from tests.support.sandbox import Sandbox, is_alive, new_sandbox, wait_for
from tests.support.slow_cases import others_slow

pytestmark = pytest.mark.integration

UNSQUEEZED = "switched off; training continues without squeezing"
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with new_sandbox(tmp_path_factory.mktemp("shared")) as made:
        yield made


def refused(sandbox: Sandbox, *says: str, **environment: str) -> None:
    """A daemon of a good configuration must not start, and must say why in one line."""
    status, output = sandbox.run_to_end(*daemon(sandbox.config()), **environment)
    assert status == 2, output
    assert output.startswith("squeezer daemon: ") and output.count("\n") == 1, output
    for words in says:
        assert words in output


def daemon(config: Path) -> tuple[str, ...]:
    return "-m", "squeezer", "daemon", "--config", str(config)


def goes_on_alone(sandbox: Sandbox, *says: str, **environment: str) -> None:
    """A main job runs to its end, and says once why nothing is squeezed."""
    job = sandbox.job("--steps", "5", "--bubble-ms", "2", **environment)
    assert job.ended() == 0
    assert job.step == 5
    output = job.said()
    assert output.count(UNSQUEEZED) == 1, output
    for words in says:
        assert words in output


# Configurations


@dataclass(frozen=True)
class Mistake:
    name: str
    toml: str | None
    says: tuple[str, ...]


RUN = '[run]\ndirectory = "run"\n'
MISTAKES = [
    Mistake("no-table", "run = 3\n", ("run = 3 is not allowed", "a table")),
    Mistake("missing-key", RUN + "[side]\n", ("side.study is missing", "an existing Python file")),
    Mistake("misspelt", "[squeeze]\nmargin_mss = 1.0\n" + RUN, ("squeeze.margin_mss = 1.0", "did you mean margin_ms?")),
    Mistake("type", '[squeeze]\nmargin_ms = "little"\n' + RUN, ('squeeze.margin_ms = "little"', "a number, 0 or more")),
    Mistake("no-study", '[side]\nstudy = "gone.py"\n' + RUN, ("side.study", "there is no file", "gone.py")),
    Mistake("no-toml", "[run\n", ("not a TOML file", "line 1")),
    Mistake("no-file", None, ("cannot read the configuration", "No such file")),
]


COMMANDS = [(mistake, command) for command in ("daemon", "ds_squeeze") for mistake in MISTAKES]
BY_DS_SQUEEZE = (MISTAKES[0], "ds_squeeze")  # both read configurations by the same code, but it imports DeepSpeed first


@pytest.mark.parametrize(("mistake", "command"), others_slow(COMMANDS, [COMMANDS[3], COMMANDS[6], BY_DS_SQUEEZE]))
def test_a_mistake_in_the_configuration_is_said_before_anything_starts(
    shared: Sandbox, mistake: Mistake, command: str
) -> None:
    config, script = shared.files / f"{mistake.name}.toml", shared.files / "train.py"
    script.write_text("import pathlib; pathlib.Path('started').touch()")
    if mistake.toml is not None:
        config.write_text(mistake.toml)
    ds_squeeze = ("-m", "launch.ds_squeeze", "--squeezer", str(config), "--num_accelerators", "1", str(script))
    words = daemon(config) if command == "daemon" else ds_squeeze
    status, output = shared.run_to_end(*words, DS_ACCELERATOR="cpu")
    assert status == 2, output
    prefix = "squeezer daemon: " if command == "daemon" else "ds_squeeze: "
    (line,) = [line for line in output.splitlines() if line.startswith(prefix)]
    assert line.startswith(f"{prefix}{config}: ")
    for said in mistake.says:
        assert said in line
    assert "Traceback" not in output
    assert not (shared.files / "run").exists() and not (shared.files / "started").exists(), "nothing started"
    assert list(shared.directory.iterdir()) == []


# Studies


@dataclass(frozen=True)
class BadStudy:
    file: str
    status: int
    says: tuple[str, ...]


BAD_STUDIES = [
    BadStudy("broken.py", 2, ("cannot be imported: line 2: SyntaxError",)),
    BadStudy("no_module.py", 2, ("line 3: ModuleNotFoundError", "a_module_that_nobody_has")),
    BadStudy("no_loss.py", 2, ("class NoLoss lacks the methods batches, loss, optimizer, score, suggest, validation",)),
    BadStudy("crashes.py", 3, ("side task ended with status 3; restarting",)),
    BadStudy("quits.py", 1, ("side task ended with status 1; restarting",)),
]


@pytest.mark.parametrize("study", others_slow(BAD_STUDIES, [BAD_STUDIES[3]]), ids=lambda study: study.file)
def test_a_side_task_that_cannot_start_is_given_up_and_the_job_goes_on(
    sandbox: Sandbox, tmp_path: Path, study: BadStudy
) -> None:
    if study.file == "broken.py":  # a file that no tool can read does not belong among the sources
        broken = tmp_path / study.file
        broken.write_text('"""Not Python."""\nclass:\n')
        config = sandbox.config("tiny.py")
        config.write_text(config.read_text().replace(str(STUDIES / "tiny.py"), str(broken)))
    else:
        config = sandbox.config(study.file)
    daemon = sandbox.daemon(config)
    job = sandbox.job("--bubble-ms", "100")
    wait_for(lambda: "is given up; the main job continues alone" in daemon.said(), "giving up")
    job.beats(3)
    assert job.finish() == 0
    assert "[ds_hooks]" not in job.said()
    assert daemon.kill(signal.SIGTERM) == 0
    output = daemon.said()
    for words in study.says:
        assert words in output
    if study.status == 2:
        assert study.file in output
    tries = 1 if study.status == 2 else 2
    exits = [(end["status"], end["restarted"]) for end in sandbox.side("exited")]
    assert exits == [(study.status, index + 1 < tries) for index in range(tries)]
    assert "Traceback" not in output


def test_trials_whose_model_or_loss_raises_fail_with_the_reason_and_the_others_complete(sandbox: Sandbox) -> None:
    served = sandbox.daemon(sandbox.config("raises.py"))
    job = sandbox.job()
    wait_for(lambda: sandbox.side("exited"), "the end of the study")
    assert job.finish() == 0
    assert served.kill(signal.SIGTERM) == 0
    assert sandbox.side("exited")[0]["status"] == 0
    trials = sandbox.trials("raises")
    reasons = [trial.user_attrs.get("squeezer_reason", "") for trial in trials]
    assert [trial.state for trial in trials] == [TrialState.COMPLETE, TrialState.FAIL, TrialState.FAIL] * 2
    assert all(reason == "ValueError: no such model (raises.py, line 19)" for reason in reasons[1::3])
    assert all("no such loss" in reason for reason in reasons[2::3])


# Pages, directories, sockets


def test_a_page_of_another_version_in_use(sandbox: Sandbox) -> None:
    path = page_path(sandbox.directory, 0)
    content = bytearray(PAGE_BYTES)
    words = memoryview(content).cast("q")
    words[Field.MAGIC], words[Field.VERSION] = PAGE_MAGIC, 999
    path.write_bytes(content)
    path.chmod(0o600)
    says = (str(path), "has version 999 and is in use", "run the same release on both sides")
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        refused(sandbox, *says)
        goes_on_alone(sandbox, *says)
    path.unlink()


@AS_ROOT
def test_a_page_of_another_user(sandbox: Sandbox) -> None:
    path = page_path(sandbox.directory, 0)
    path.write_bytes(bytes(PAGE_BYTES))
    path.chmod(0o600)
    os.chown(path, 12345, 12345)
    says = (str(path), "belongs to user 12345, not to 0")
    refused(sandbox, *says)
    goes_on_alone(sandbox, *says)
    path.unlink()


@AS_ROOT
def test_a_directory_of_another_user(sandbox: Sandbox) -> None:
    os.chown(sandbox.directory, 12345, 12345)
    says = (str(sandbox.directory), "belongs to user 12345, not to 0; name another directory")
    refused(sandbox, *says)
    goes_on_alone(sandbox, *says)


def test_a_directory_that_others_can_read(sandbox: Sandbox) -> None:
    sandbox.directory.chmod(0o755)
    says = ("has mode 0755; allowed: 0700", f"chmod 700 {sandbox.directory}")
    refused(sandbox, *says)
    goes_on_alone(sandbox, *says)


def test_a_file_in_place_of_the_directory(sandbox: Sandbox) -> None:
    path = sandbox.directory / "file"
    path.touch()
    refused(sandbox, f"{path} is not a directory", SQUEEZER_DIR=str(path))
    goes_on_alone(sandbox, f"{path} is not a directory", SQUEEZER_DIR=str(path))
    path.unlink()


def test_a_directory_too_long_for_a_socket(sandbox: Sandbox, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    refused(sandbox, "the socket path", "allowed: 107", "set $SQUEEZER_DIR", SQUEEZER_DIR=str(long))
    goes_on_alone(sandbox, "socket", SQUEEZER_DIR=str(long))
    assert list(long.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_socket_path_that_is_taken(sandbox: Sandbox, kind: str) -> None:
    path = socket_path(sandbox.directory, 0)
    path.touch() if kind == "file" else path.mkdir()
    refused(sandbox, f"{path} is taken by something that is not a socket", "set $SQUEEZER_DIR")
    assert path.is_file() if kind == "file" else path.is_dir()
    path.unlink() if kind == "file" else path.rmdir()


def test_a_run_directory_that_is_a_file(sandbox: Sandbox) -> None:
    config = sandbox.config()
    sandbox.run.touch()
    refused(sandbox, str(sandbox.run), "run.directory")
    assert config.exists()
    sandbox.run.unlink()


def test_a_second_daemon_on_the_same_device(sandbox: Sandbox) -> None:
    first = sandbox.daemon(sandbox.config())
    job = sandbox.job()
    refused(sandbox, f"process {first.pid} is already the daemon of {page_path(sandbox.directory, 0)}")
    wait_for(lambda: sandbox.events("step"), "a step that the first one hears")
    assert job.finish() == 0
    assert first.kill(signal.SIGTERM) == 0


def test_a_second_job_on_the_same_device(sandbox: Sandbox) -> None:
    served = sandbox.daemon(sandbox.config())
    first = sandbox.job()
    wait_for(lambda: sandbox.events("step"), "a step")
    goes_on_alone(sandbox, f"process {first.pid} is already the main of {page_path(sandbox.directory, 0)}")
    first.beats(5)
    assert first.finish() == 0
    assert served.kill(signal.SIGTERM) == 0
    assert [job["pid"] for job in sandbox.events("job")] == [first.pid]


def test_garbage_on_the_status_pipe_is_a_fault_and_the_side_task_is_served_on(sandbox: Sandbox) -> None:
    served = sandbox.daemon(sandbox.config("garbled.py"))
    job = sandbox.job()
    wait_for(lambda: sandbox.side("exited"), "the end of the study")
    assert is_alive(served.pid), served.said()
    assert job.finish() == 0
    assert served.kill(signal.SIGTERM) == 0
    faults = [fault["what"] for fault in sandbox.events("fault")]
    assert len(faults) == 7 and all(fault.startswith("the side task sent no status: ") for fault in faults)
    for words in ("b'Traceback", "unknown status 'sleeping'", "overrun_ns is inf", "allowed: ['message']"):
        assert any(words in fault for fault in faults), (words, faults)
    assert [len(sandbox.side(event)) for event in ("ready", "finished", "exited")] == [1, 1, 1]
    trials = sandbox.trials("garbled")
    assert trials and all(trial.state.is_finished() for trial in trials)


def test_garbage_on_the_socket_is_counted_and_the_job_is_served_on(sandbox: Sandbox) -> None:
    served = sandbox.daemon(sandbox.config())
    job = sandbox.job("--bubble-ms", "10")
    wait_for(lambda: sandbox.events("step"), "a step")
    path = socket_path(sandbox.directory, 0)
    noise = random.Random(0)
    hello = wire.Hello(os.getpid(), 0, 1, 0, 1, 1, 0)
    other_version = bytearray(wire.encode(1, 0, hello))
    other_version[len(wire.MAGIC)] = 77
    garbage = [
        b"",
        noise.randbytes(300),
        bytes(other_version),
        wire.encode(1, 0, hello),
        wire.encode(1, 0, wire.BubbleStart(1, 1, 0, 99, 0, 0)),
        wire.encode(1, 0, wire.BubbleEnd(1, 1, 0, -1, 0, 0, 0)),
        wire.encode(1, 0, wire.Instructions(1, 0, ((200, 0, 0, 0),))),
    ]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pusher = context.socket(zmq.PUSH)
    pusher.setsockopt(zmq.SNDTIMEO, 60_000)
    pusher.connect(f"ipc://{path}")
    for message in garbage:
        pusher.send(message)
    for _ in range(5000):
        pusher.send(noise.randbytes(40))
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(path))
            stranger.sendall(noise.randbytes(1000))
    intruder = context.socket(zmq.PUSH)  # of its own, for it loses its connection
    intruder.connect(f"ipc://{path}")
    for _ in range(3):
        intruder.send(bytes(50_000_000))
    heard = job.step
    wait_for(lambda: sandbox.events("step")[-1]["step"] > heard + 50, "more steps")
    context.destroy(linger=0)

    assert is_alive(served.pid), served.said()
    assert job.finish() == 0
    assert "[ds_hooks]" not in job.said()
    assert served.kill(signal.SIGTERM) == 0
    (end,) = sandbox.events("end")
    faults = [fault["what"] for fault in sandbox.events("fault")]
    for words in ("protocol version 77", "which is not the page's main job", "99 is no WaitKind"):
        assert any(words in fault for fault in faults), faults
    assert len([fault for fault in faults if "foreign" in fault]) <= 10, "a flood of records is none"
    assert end["foreign_messages"] >= 5000 + len(garbage), "and some of the noise, which may look like a message"
    assert len(sandbox.events("job")) == 1


# python -m ds_hooks


@pytest.mark.parametrize(
    ("script", "status", "says"),
    [
        ("print('trained')", 0, "trained"),
        ("raise ValueError('my own fault')", 1, "ValueError: my own fault"),
        ("import sys; sys.exit(7)", 7, ""),
    ],
)
def test_a_script_without_a_pipeline_engine_keeps_its_exit_status(
    sandbox: Sandbox, tmp_path: Path, script: str, status: int, says: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    ended, output = sandbox.run_to_end("-m", "ds_hooks", str(path))
    assert ended == status
    assert says in output
    assert f"{path} built no pipeline engine in this process, so no bubble was seen here; call deepspeed" in output
    assert "PipelineModule or a DualPipeVModule" in output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--modul", "train"], "unknown option '--modul'; allowed before the script is --module"),
        ([], "no training script named"),
        (["gone.py"], "no such training script: gone.py"),
        (["--module"], "no training script named"),
    ],
)
def test_a_command_line_that_runs_no_script(sandbox: Sandbox, options: list[str], says: str) -> None:
    status, output = sandbox.run_to_end("-m", "ds_hooks", *options)
    assert status == USER_ERROR_STATUS
    assert output.startswith("ds_hooks: ") and says in output
    assert "Traceback" not in output
