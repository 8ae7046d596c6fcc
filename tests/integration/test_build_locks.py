"""Build locks that a job leaves are removed; those of others are left alone, wherever these run."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch.build_locks import BuildLockWatch, unheld_build_locks

pytestmark = pytest.mark.integration

BUILD = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('building', flush=True); sys.stdin.read()"


def build(lock: Path) -> "subprocess.Popen[str]":
    """A process that holds `lock` as torch's builder does, and leaves it if it is killed."""
    lock.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, str(lock)]
    made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None and made.stdout.readline() == "building\n"
    return made


def end(builder: "subprocess.Popen[str]") -> None:
    builder.kill()
    builder.communicate()


def test_only_a_lock_whose_builder_was_this_jobs_and_died_is_removed(tmp_path: Path) -> None:
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    others = tmp_path / "from_another_machine" / "lock"
    with BuildLockWatch(environment) as watch:
        others.parent.mkdir()
        others.touch()
        dead, alive = build(tmp_path / "dead" / "lock"), build(tmp_path / "alive" / "lock")
        watch.look()
        end(dead)
        assert set(unheld_build_locks(environment)) == {others, tmp_path / "dead" / "lock"}
    assert sorted(path.parent.name for path in tmp_path.glob("*/lock")) == ["alive", "from_another_machine"]
    end(alive)
    assert (tmp_path / "alive" / "lock").exists()


def test_a_lock_that_another_machine_made_anew_is_not_ours(tmp_path: Path) -> None:
    lock = tmp_path / "op" / "lock"
    watch = BuildLockWatch({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    ours = build(lock)
    watch.look()
    end(ours)
    lock.unlink()
    lock.touch()
    assert watch.remove_orphans() == [] and lock.exists()


def test_it_looks_where_torch_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for cache, environment in ((".cache", {}), ("elsewhere", {"XDG_CACHE_HOME": str(tmp_path / "elsewhere")})):
        lock = tmp_path / cache / "torch_extensions" / "py311_cpu" / "op" / "lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        assert unheld_build_locks(environment) == [lock]


def test_a_home_that_cannot_be_searched_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/" + 300 * "x")  # for root all others can be
    with BuildLockWatch({}) as watch:
        assert watch.remove_orphans() == unheld_build_locks({}) == []
