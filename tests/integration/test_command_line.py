"""The command lines as processes: what they load, what moved, what a shell completes, and `squeezer observe`."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hooks.shared.renamed_commands import MOVED
from squeezer.config import load_config
from squeezer.records.reader import load_run
from tests.support.jobs import NARROW, PRETRAIN, environment, pretrain, run, short_directory
from tests.support.paths import ROOT
from tests.support.sandbox import Child, Sandbox, new_sandbox, wait_for

pytestmark = pytest.mark.integration

HEAVY = ("torch", "optuna", "deepspeed", "numpy", "zmq")
SQUEEZING = ("squeez", "guard", "harvest", "fill", "trials", "slowdown")
STEPS = 12


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("package", ["squeezer", "trials"])
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_nothing_heavy(package: str, option: str) -> None:
    code = (
        f"import runpy, sys; sys.argv = [{package!r}, {option!r}]\n"
        f"try: runpy.run_module({package!r}, run_name='__main__')\n"
        f"except SystemExit as ended: print(ended.code, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


@pytest.mark.parametrize("lines", [1, 100_000])
def test_output_that_nobody_reads_to_its_end_is_no_error(lines: int) -> None:
    code = (
        "import argparse\nfrom ds_hooks.shared.command_line import run_command\n"
        f"def run(parsed):\n    for line in range({lines}): print(line)\n    return 0\n"
        "raise SystemExit(run_command(argparse.Namespace(run=run)))"
    )
    read_fd, write_fd = os.pipe()
    os.close(read_fd)  # as `head` does once it has enough
    with open(write_fd, "w") as output:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=output, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_launcher_keeps_the_jobs_exit_code_though_its_own_output_has_no_room() -> None:
    code = "from launch import ds_squeeze\nds_squeeze.squeeze = lambda _: print('Gained') or 7\nds_squeeze.main()"
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # so that Python itself writes the rest at its end
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, env=buffered, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert (done.returncode, done.stderr) == (7, b"")


def test_what_an_encoding_lacks_is_printed_as_escapes() -> None:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "squeezer", "observe", "--help"],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONIOENCODING": "ascii:strict"},
        capture_output=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"") and b"[ARGUMENT \\u2026]" in done.stdout


@pytest.mark.parametrize("old", [old for old in MOVED if old.startswith("python -m ")])
def test_a_module_that_moved_says_where(old: str, tmp_path: Path) -> None:
    done = python("-m", old.removeprefix("python -m "), "an", "--argument", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{old}: this command has moved; use: {MOVED[old]}\n"


@pytest.mark.parametrize("old", [old for old in MOVED if old.startswith("ds_squeeze ")])
def test_a_word_of_the_new_launcher_says_where_it_went(old: str, tmp_path: Path) -> None:
    word = old.removeprefix("ds_squeeze ")
    done = python("-m", "launch.ds_squeeze", word, "runs/demo", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"ds_squeeze: no training script {word!r}; use: {MOVED[old]}\n"


def test_the_launcher_has_a_version() -> None:
    done = python("-m", "launch.ds_squeeze", "--version")
    assert done.returncode == 0 and re.fullmatch(r"ds_squeeze \d.*\n", done.stdout)


def test_the_launchers_help_shows_its_own_usage_and_then_that_of_deepspeed() -> None:
    done = python("-m", "launch.ds_squeeze", "--help")
    own, _, deepspeeds = done.stdout.partition("those of the deepspeed command:")
    assert done.returncode == 0 and own.startswith("usage: ds_squeeze --squeezer FILE")
    assert "usage: deepspeed " in deepspeeds and "--num_gpus" in deepspeeds


@pytest.mark.parametrize(
    ("package", "words", "offered"),
    [
        ("squeezer", ["re"], {"report", "replay"}),
        ("squeezer", ["o"], {"observe"}),
        ("squeezer", ["report", "--j"], {"--json"}),
        ("squeezer", ["report", "run"], {"runs_here"}),
        ("trials", [""], {"check", "explain", "measure", "close"}),
        ("trials", ["check", "my_"], {"my_study.py"}),
    ],
)
def test_bash_completes(package: str, words: list[str], offered: set[str], tmp_path: Path) -> None:
    (tmp_path / "runs_here").mkdir()
    (tmp_path / "my_study.py").touch()
    script = tmp_path / "completion"
    script.write_text(python("-m", package, "--print-completion", "bash").stdout)
    quoted = " ".join(f"'{word}'" for word in (package, *words))
    asked = (
        f"source {script}; complete -p {package} >&2; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; "
        f'_shtab_{package}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        [shutil.which("bash") or "bash", "--norc", "-c", asked],
        cwd=tmp_path,
        env={"PATH": ""},  # pressing TAB starts no Python, nor anything else
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"-F _shtab_{package} {package}" in done.stderr, done.stderr
    assert offered <= set(done.stdout.split()), done.stdout + done.stderr
    assert all(word.startswith(words[-1]) for word in done.stdout.split())


@pytest.mark.parametrize("package", ["squeezer", "trials"])
@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_script_too(package: str, shell: str) -> None:
    done = python("-m", package, "--print-completion", shell)
    assert done.returncode == 0 and package in done.stdout and done.stderr == ""


# squeezer observe


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as made:
        yield made


def observe(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "squeezer", "observe", *arguments]


@pytest.mark.alone
def test_observe_shows_the_idle_time_of_an_ordinary_job(tmp_path: Path, directory: Path) -> None:
    script = pretrain(tmp_path / "losses", STEPS, NARROW)
    ended = run(observe("--run", "seen", "--num_accelerators", "2", *script), directory, tmp_path / "losses")
    assert ended.status == 0, ended.output
    assert len(ended.losses) == STEPS
    seen = tmp_path / "seen"
    table = ended.output[ended.output.index("2 stages × 1 device") :]
    assert f"4 micro-batches: {STEPS - 2} steps of" in table
    shares = [float(share) for share in re.findall(r"^ +[01] +1 +([\d.]+)% +[\d.]+", table, re.M)]
    assert len(shares) == 2 and all(0 < share < 100 for share in shares)
    hours = [float(of) for of in re.findall(r"^(?: +[01] +1|total +2) +[\d.]+% +([\d.]+)", table, re.M)]
    assert hours[2] == pytest.approx(hours[0] + hours[1], abs=0.11)
    assert hours[0] == pytest.approx(24 * shares[0] / 100, abs=0.06)
    assert "ACTIVATION" in table and "GRAD" in table and f"are in {seen}" in table
    for line in table.splitlines():
        assert not any(word in line.lower() for word in SQUEEZING), line
    assert "of it used" not in ended.output and "Cost" not in ended.output
    assert load_config(seen / "observe.toml").side is None
    for rank in load_run(seen):
        assert not rank.records["side"] and len(rank.records["step"]) == STEPS
        assert all(bubble["permit_until_ns"] is None for bubble in rank.records["bubble"]), "nothing was opened"


def test_observe_of_a_job_without_a_pipeline_keeps_its_status(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit(7)")
    ended = run(observe("--num_accelerators", "2", "train.py"), directory, tmp_path / "losses")
    assert ended.status == 7, ended.output
    assert "The main job failed with exit code 7." in ended.output and "No pipeline engine was seen" in ended.output
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.startswith("observe-") and f"are in {made}" in ended.output


@pytest.mark.slow
def test_observe_of_a_job_without_a_pipeline_that_ends_well_says_so(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "train.py").write_text("print('no pipeline')")
    ended = run(observe("--num_accelerators", "2", "train.py"), directory, tmp_path / "losses")
    assert ended.status == 0 and "No pipeline engine was seen" in ended.output, ended.output


def test_observe_of_no_script_ends_before_anything_starts(tmp_path: Path, directory: Path) -> None:
    ended = run(observe("--num_accelerators", "2", "gone.py"), directory, tmp_path / "losses")
    assert ended.status == 2 and "there is no training script gone.py" in ended.output


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    with new_sandbox(tmp_path) as made:
        yield made


@pytest.mark.slow
@pytest.mark.alone
def test_an_interrupted_observe_ends_the_job_and_still_shows_the_table(sandbox: Sandbox, tmp_path: Path) -> None:
    job = sandbox.start(
        Child,
        *("-m", "squeezer", "observe", "--run", str(tmp_path / "seen"), "--num_accelerators", "2"),
        *(str(PRETRAIN), "--steps", "100000", "--width", "64"),
        **{name: environment(sandbox.directory)[name] for name in ("DS_ACCELERATOR", "PATH", "OMP_NUM_THREADS")},
    )
    events = tmp_path / "seen" / "rank0.events.jsonl"
    wait_for(lambda: events.exists() and events.read_text().count('"r":"step"') > 30, "thirty steps", 300.0)
    os.killpg(job.pid, signal.SIGINT)  # as a terminal does for Ctrl-C
    assert job.ended() == 128 + signal.SIGINT, job.said()
    output = job.said()
    assert "The main job was stopped by SIGINT." in output
    assert re.search(r"^total +2 +[\d.]+%", output, re.M), output
