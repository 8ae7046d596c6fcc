"""launch/: the rewriting of command lines, shares of cores, and what is left of earlier runs. Starts no process."""

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import ds_squeeze, rank
from launch.ds_squeeze import LaunchError, redirect_to_rank, take_flag
from launch.leftovers import (
    RunInUseError,
    RunLock,
    await_records,
    close_directory,
    end_daemons,
    fresh_directory,
    move_records_aside,
    remove_dead_directories,
    remove_temporary_folders,
)
from squeezer.daemon.run_directory import claim_directory, running_daemons
from squeezer.daemon.side_processes.temporary_folder import make_folder
from squeezer.daemon.side_task_supervisor import END_TIMEOUT_S, MEASURE_TIMEOUT_S
from squeezer.records.in_use import ranks_in_use
from squeezer.records.layout import events_path, study_directory, temporary_folder_path
from squeezer.records.writer import Recorder
from tests.support.logged import logged


def deepspeed_parser(arguments: list[str]) -> argparse.Namespace:
    """The part of DeepSpeed's parser that matters here."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hostfile", default="/none")
    parser.add_argument("--node_rank", type=int, default=-1)
    parser.add_argument("--bind_cores_to_rank", action="store_true")
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1)
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument("--autotuning", default="")
    parser.add_argument("--module", action="store_true")
    parser.add_argument("--no_python", action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    "line",
    [
        "--squeezer s.toml --num_gpus 2 train.py --lr 1",
        "--num_gpus 2 --squeezer s.toml train.py --lr 1",
        "--num_gpus 2 --squeezer=s.toml train.py --lr 1",
    ],
)
def test_the_flag_is_taken_out_wherever_it_stands_before_the_script(line: str) -> None:
    config, options, parsed = take_flag(line.split(), deepspeed_parser)
    assert config == "s.toml"
    assert options == ["--num_gpus", "2"]
    assert (parsed.user_script, parsed.user_args, parsed.num_gpus) == ("train.py", ["--lr", "1"], 2)


def test_the_scripts_own_flag_is_left_to_the_script() -> None:
    _, _, parsed = take_flag(["--squeezer", "s.toml", "train.py", "--squeezer", "theirs"], deepspeed_parser)
    assert parsed.user_args == ["--squeezer", "theirs"]
    with pytest.raises(LaunchError, match=r"must stand before the script train\.py"):
        take_flag(["train.py", "--squeezer", "theirs"], deepspeed_parser)


def test_a_home_is_meant_where_no_shell_has_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert take_flag(["--squeezer=~/s.toml", "train.py"], deepspeed_parser)[0] == f"{tmp_path}/s.toml"
    with pytest.raises(LaunchError, match=r"--squeezer \$HOME/s\.toml: \$HOME is not replaced in a path"):
        take_flag(["--squeezer=$HOME/s.toml", "train.py"], deepspeed_parser)


@pytest.mark.parametrize("line", ["train.py", "--squeezer", "--squeezer= train.py", "--squeezer --num_gpus 2 train.py"])
def test_a_missing_flag_or_value_is_said(line: str) -> None:
    with pytest.raises(LaunchError, match="--squeezer"):
        take_flag(line.split(), deepspeed_parser)


@pytest.mark.parametrize("line", ["--squeezer s.toml --nope train.py", "--squeezer s.toml --num_gpus x train.py"])
def test_a_mistake_in_deepspeeds_options_is_said_in_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=r"^[^\n]*(--nope|'x')[^\n]*; see ds_squeeze --help$"):
        take_flag(line.split(), deepspeed_parser)
    assert capsys.readouterr().err == ""


def test_the_script_becomes_an_argument_of_the_bootstrap() -> None:
    changed = redirect_to_rank(deepspeed_parser(["train.py", "--lr", "1"]))
    assert Path(changed.user_script).samefile(rank.__file__)
    assert changed.user_args == ["train.py", "--lr", "1"]


def test_a_module_stays_a_module() -> None:
    changed = redirect_to_rank(deepspeed_parser(["--module", "pkg.train", "--lr", "1"]))
    assert not changed.module, "the bootstrap itself is a file"
    assert changed.user_args == ["--module", "pkg.train", "--lr", "1"]


@pytest.mark.parametrize("option", ["--no_python", "--autotuning=run"])
def test_what_cannot_be_hooked_is_refused(option: str) -> None:
    with pytest.raises(LaunchError, match=option.partition("=")[0]):
        redirect_to_rank(deepspeed_parser([option, "train.py"]))


@pytest.mark.parametrize(
    ("line", "message"),
    [([], "--squeezer FILE is missing"), (["train.py"], "--squeezer FILE is missing")],
)
def test_a_bad_line_ends_with_one_message_and_code_2(
    line: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ds_squeeze", *line])
    with logged(), pytest.raises(SystemExit) as ended:
        ds_squeeze.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_local_rank_stays_before_the_script_for_the_hooks() -> None:
    option, script = rank.split_arguments(["--local_rank=1", "train.py", "--lr", "1"])
    assert (option, script) == ("--local_rank=1", ["train.py", "--lr", "1"])
    command = rank.training_command("python", script, option)
    assert command == ["python", "-u", "-m", "ds_hooks", "--local_rank=1", "train.py", "--lr", "1"]


def test_without_a_local_rank_none_is_invented() -> None:
    option, script = rank.split_arguments(["--module", "pkg.train", "--local_rank=7"])
    assert option is None
    command = rank.training_command("python", script, option)
    assert command == ["python", "-u", "-m", "ds_hooks", "--module", "pkg.train", "--local_rank=7"]


def test_the_daemon_belongs_to_one_device_and_to_the_job() -> None:
    command = rank.daemon_command("python", "/s.toml", "/runs/a", 3, 4711, Path("/pages/a/daemon3.pid"))
    tail = ["daemon", "--config", "/s.toml", "--run", "/runs/a", "--local-rank", "3", "--job-pid", "4711"]
    assert command == ["python", "-P", "-m", "squeezer", *tail, "--pid-file", "/pages/a/daemon3.pid"]


@pytest.mark.parametrize(
    ("environment", "devices", "cpu"),
    [
        ({}, (), True),
        ({}, ("/dev/nvidia0",), False),
        ({"DS_ACCELERATOR": "cpu"}, ("/dev/nvidia0",), True),
        ({"DS_ACCELERATOR": "xpu"}, (), False),
    ],
)
def test_the_device_is_known_without_torch(environment: dict[str, str], devices: tuple[str, ...], cpu: bool) -> None:
    assert rank.runs_on_cores(environment, exists=devices.__contains__) is cpu


def test_records_of_an_earlier_run_are_moved_and_other_files_stay(tmp_path: Path) -> None:
    assert move_records_aside(tmp_path) == 0
    for generation in ("first", "second"):
        for name in (
            "rank0.events.jsonl",
            "rank0.units.bin",
            "report.json",
            "trace.json",
            f"rank{generation}.units.jsonl",
        ):
            (tmp_path / name).write_text(generation)
        (tmp_path / "notes.txt").write_text("mine")
        study_directory(tmp_path).mkdir(exist_ok=True)
        assert move_records_aside(tmp_path) == 5
    previous = tmp_path / "previous"
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "previous", "study"}
    assert (previous / "trace.json").read_text() == "second"
    assert not (previous / "rankfirst.units.jsonl").exists(), "generations are not mixed"


def test_records_that_another_node_writes_now_stay(tmp_path: Path) -> None:
    def texts(folder: Path) -> dict[str, str]:
        return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}

    previous = tmp_path / "previous"
    previous.mkdir()
    for folder, text in ((previous, "before"), (tmp_path, "earlier")):
        for name in ("rank1.events.jsonl", "rank1.log", "rank10.log", "rank10.events.jsonl"):
            (folder / name).write_text(text)
    assert move_records_aside(tmp_path, 1) == 2  # by the other node
    assert texts(previous) == {
        "rank1.events.jsonl": "earlier",
        "rank1.log": "earlier",
        "rank10.log": "before",
        "rank10.events.jsonl": "before",
    }
    daemon = Recorder(tmp_path, 1)
    (tmp_path / "rank1.log").write_text("now")
    assert ranks_in_use(tmp_path) == {1}
    assert move_records_aside(tmp_path) == 2
    assert set(texts(tmp_path)) == {"rank1.events.jsonl", "rank1.details.jsonl", "rank1.log"}
    assert texts(previous) == dict.fromkeys(
        ("rank1.events.jsonl", "rank1.log", "rank10.log", "rank10.events.jsonl"), "earlier"
    )
    daemon.add("end")
    daemon.close()
    assert ranks_in_use(tmp_path) == set() and move_records_aside(tmp_path) == 3
    assert '"end"' in texts(previous)["rank1.events.jsonl"]


def test_the_launcher_waits_for_the_records_of_others(tmp_path: Path) -> None:
    daemon = Recorder(tmp_path, 1)
    daemon.add("end")
    await_records(tmp_path, timeout_s=0.0)  # not for ever
    assert '"end"' not in events_path(tmp_path, 1).read_text()
    other = threading.Thread(target=daemon.close)
    other.start()
    await_records(tmp_path, timeout_s=60.0)
    assert '"end"' in events_path(tmp_path, 1).read_text()
    other.join()


def test_temporary_folders_of_killed_daemons_are_removed(tmp_path: Path) -> None:
    """Not those of a daemon that still writes, as another launcher's on this machine, nor another machine's record."""
    records = [temporary_folder_path(tmp_path, rank) for rank in range(3)]
    records[0].parent.mkdir()
    (left, held) = (Path(str(make_folder(record))) for record in records[:2])
    records[2].write_text("/tmp/squeezer-side-on-another-machine")
    daemon = Recorder(tmp_path, 1)
    remove_temporary_folders(tmp_path)
    assert not left.exists() and held.exists() and [record.exists() for record in records] == [False, True, True]
    daemon.close()
    remove_temporary_folders(tmp_path)
    assert not held.exists()


def test_one_launcher_has_a_run_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunLock(run, tmp_path), pytest.raises(RunInUseError, match="another ds_squeeze uses"), RunLock(run, tmp_path):
        pass
    with RunLock(run, tmp_path):
        assert (run / ".lock").stat().st_mode & 0o077 == 0


def test_a_dead_or_foreign_process_is_no_daemon(tmp_path: Path) -> None:
    (tmp_path / "daemon0.pid").write_text("999999999")
    (tmp_path / "daemon1.pid").write_text("")
    (tmp_path / "daemon2.pid").write_text(str(os.getpid()))  # a number that was used again
    assert running_daemons(tmp_path) == []
    end_daemons(lambda: running_daemons(tmp_path), 0.0)


def test_a_number_that_is_used_again_is_not_signalled() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        # whenever it is to be signalled, the last look before that says that the number is another process's
        answers = [[other.pid], [other.pid], [], [], []]
        end_daemons(lambda: answers.pop(0) if answers else [], 0.0)
        assert answers == []
    assert other.returncode == 0


def test_the_place_of_all_runs_goes_with_the_last_of_them(tmp_path: Path) -> None:
    place = tmp_path / "place"
    first, second = fresh_directory(place), fresh_directory(place)
    close_directory(first)
    assert [*place.iterdir()] == [second]
    close_directory(second)
    assert not place.exists()


def test_directories_of_killed_launchers_are_removed_and_no_others(tmp_path: Path) -> None:
    for name in ("run-dead", "run-alive", "run-starting", "others"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "device0.page").touch()
    os.close(claim_directory(tmp_path / "run-dead"))
    os.close(claim_directory(tmp_path / "others"))
    held = claim_directory(tmp_path / "run-alive")
    assert remove_dead_directories(tmp_path) == [tmp_path / "run-dead"]
    assert {path.name for path in tmp_path.iterdir()} == {"run-alive", "run-starting", "others"}
    os.close(held)


def test_the_clearing_up_is_not_ended_by_a_second_signal() -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleared = []
    with pytest.raises(SystemExit) as ended, ds_squeeze._ended_once():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cleared.append(True)
    assert (ended.value.code, cleared) == (128 + signal.SIGTERM, [True])
    assert signal.getsignal(signal.SIGTERM) is before


FOUND_THERE: dict[str, Callable[[Path], object]] = {
    "a file": lambda place: place.touch(),
    "a link": lambda place: place.symlink_to("/tmp"),
    "open to others": lambda place: (place.mkdir(), place.chmod(0o777)),
    "in a file": lambda place: place.parent.touch(),
    "another user's": lambda place: (place.mkdir(mode=0o700), os.chown(place, 12345, 12345)),
}


@pytest.mark.parametrize("found", FOUND_THERE)
def test_a_runtime_directory_that_must_not_be_used_does_not_stop_the_training(
    found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if found == "another user's" and os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    place = tmp_path / "made" / "place"
    if found != "in a file":
        place.parent.mkdir()
    FOUND_THERE[found](place)
    assert_trains_unsqueezed(tmp_path, place, tmp_path / "run", monkeypatch)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "nothing is squeezed" in said[0] and str(tmp_path / "made") in said[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("kind", ["directory", "link"])
def test_a_place_for_records_that_another_user_has_made_does_not_stop_the_training(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    run = shared / "run"
    run.mkdir() if kind == "directory" else run.symlink_to(tmp_path)
    os.chown(run, 12345, 12345, follow_symlinks=False)
    assert_trains_unsqueezed(tmp_path, tmp_path / "place", run, monkeypatch)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "nothing is squeezed" in said[0] and f"{run} belongs to user 12345" in said[0]
    assert not (tmp_path / "place").exists() and not (tmp_path / ".lock").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a disk that is small enough to fill")
@pytest.mark.parametrize("free_inodes", [True, False])
def test_a_full_disk_for_records_does_not_stop_the_training(
    free_inodes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without free inodes not even the run's directory can be made; else its lock cannot be written."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=16", "none", disk], check=False).returncode:
        pytest.skip("this root may not mount")
    try:
        if free_inodes:
            (disk / "run").mkdir()
        with (disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        if not free_inodes:
            with suppress(OSError):
                for number in count():
                    (disk / f"file{number}").touch()
        assert_trains_unsqueezed(tmp_path, tmp_path / "place", disk / "run", monkeypatch)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "nothing is squeezed" in said[0] and "No space left" in said[0]


def assert_trains_unsqueezed(tmp_path: Path, place: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ds_squeeze` with these directories for sockets and records launches the user's own script, not ours."""
    (tmp_path / "train.py").touch()
    (tmp_path / "s.toml").write_text(f'[run]\ndirectory = "{run}"\n')
    for name, value in {"SQUEEZER_DIR": str(place), "DS_ACCELERATOR": "cpu", "PATH": os.environ["PATH"]}.items():
        monkeypatch.setenv(name, value)  # and undo what the launcher sets
    launched: list[argparse.Namespace] = []
    runner = SimpleNamespace(parse_args=deepspeed_parser, EXPORT_ENVS=[])
    runner.main = lambda: launched.append(runner.parse_args())
    monkeypatch.setitem(sys.modules, "deepspeed.launcher", SimpleNamespace(runner=runner))
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(launcher=None))
    with logged():
        code = ds_squeeze.squeeze(["--squeezer", str(tmp_path / "s.toml"), str(tmp_path / "train.py"), "--lr", "1"])
    assert code == 0
    assert [(job.user_script, job.user_args) for job in launched] == [(str(tmp_path / "train.py"), ["--lr", "1"])]


def test_a_launcher_outwaits_all_that_a_daemon_may_wait_for_at_its_end() -> None:
    side_task_and_release_s = 2 * END_TIMEOUT_S
    assert side_task_and_release_s + MEASURE_TIMEOUT_S < ds_squeeze.WAIT_FOR_DAEMONS_S
