"""The whole of `ds_squeeze`, with a made-up launcher in place of DeepSpeed's: what it survives, and what it leaves."""

import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_hooks.shared.page.file import DIRECTORY_VARIABLE
from ds_hooks.shared.secrets import STORAGE_VARIABLE
from launch import build_locks, ds_squeeze, rank
from launch.build_locks import BuildLockWatch
from tests.support.logged import logged
from tests.support.sandbox import wait_for

Squeeze = Callable[[Callable[[], None]], int]


def parse(arguments: list[str]) -> Namespace:
    of_one_node = {"hostfile": "/none", "node_rank": -1, "master_port": 29500, "bind_cores_to_rank": False}
    kinds = {"module": False, "no_python": False, "autotuning": ""}
    return Namespace(**of_one_node, **kinds, user_script=arguments[0], user_args=arguments[1:])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Of all runs' pages and sockets."""
    return tmp_path / "place"


@pytest.fixture
def squeeze(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Squeeze:
    """Runs `ds_squeeze`, whose launcher does what it is given; returns the exit code."""
    (tmp_path / "train.py").touch()
    (tmp_path / "s.toml").write_text(f'[run]\ndirectory = "{tmp_path / "run"}"\n')
    # also those that it sets, so that they are undone
    for name in (rank.CONFIG, rank.RUN, rank.PIN_CORES, STORAGE_VARIABLE):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(place))

    def run(main: Callable[[], None]) -> int:
        runner = SimpleNamespace(parse_args=parse, EXPORT_ENVS=[], main=main)
        monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(launcher=None))
        monkeypatch.setitem(sys.modules, "deepspeed.launcher", SimpleNamespace(runner=runner))
        with logged():
            return ds_squeeze.squeeze(["--squeezer", str(tmp_path / "s.toml"), str(tmp_path / "train.py")])

    return run


@pytest.mark.parametrize("code", [0, 3])
def test_it_leaves_no_runtime_directory(squeeze: Squeeze, place: Path, code: int) -> None:
    def trains() -> None:
        run = Path(os.environ[DIRECTORY_VARIABLE])
        assert run.parent == place and run.is_dir()
        sys.exit(code)

    assert squeeze(trains) == code
    assert not place.exists()


def test_a_signal_to_the_whole_job_is_for_the_training_alone(squeeze: Squeeze) -> None:
    def trains() -> None:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            # what is ignored would be ignored by the training, too
            assert signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN)
            os.kill(os.getpid(), number)

    assert squeeze(trains) == 0


BUILDS = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); sys.stdin.read()"


def test_of_build_locks_only_those_of_its_own_dead_builders_go(
    squeeze: Squeeze, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = BuildLockWatch.look

    def looked(watch: BuildLockWatch) -> None:
        look(watch)
        looks.append(1)

    monkeypatch.setattr(build_locks, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(BuildLockWatch, "look", looked)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    others, own = (tmp_path / name / "lock" for name in ("from_another_machine", "own"))
    for lock in (others, own):
        lock.parent.mkdir()
    others.touch()

    def trains() -> None:
        command = [sys.executable, "-c", BUILDS, str(own)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as builder:
            assert builder.stdout is not None and builder.stdout.readline() == b"\n"
            before = len(looks)
            wait_for(lambda: len(looks) > before + 1, "a look at it", patience_s=20)
            builder.kill()

    assert squeeze(trains) == 0
    assert (others.exists(), own.exists()) == (True, False)
