"""A side task that cannot be started as it must be does not run at all."""

import errno
import os
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from ds_hooks.shared.page.layout import PAGE_BYTES
from squeezer.config import DeviceTable, SideTable
from squeezer.daemon.side_processes import spawner
from squeezer.device import CpuDevice
from tests.support.sandbox import children


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> spawner.Spawner:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    device = CpuDevice(memoryview(bytearray(PAGE_BYTES)).cast("q"), DeviceTable(), 0)
    files = spawner.SideFiles(page=tmp_path, run=tmp_path, rank=0, storage="", studies=tmp_path, units_bytes=0)
    return spawner.Spawner(SideTable(study=tmp_path), device, files)


def none_is_left(made: spawner.Spawner, before: list[int], tmp_path: Path) -> None:
    assert children(os.getpid()) == before
    assert (made.side, made.group, made.status_fd) == (None, None, -1)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("squeezer-side-")]


def test_one_without_a_pidfd_would_run_outside_bubbles(
    made: spawner.Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children(os.getpid())

    def no_file(_pid: int) -> NoReturn:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    with monkeypatch.context() as full, pytest.raises(OSError, match="Too many open files in system"):
        full.setattr(os, "pidfd_open", no_file)
        made.start()
    none_is_left(made, before, tmp_path)


def test_one_that_cannot_give_way_would_take_the_main_jobs_core(
    made: spawner.Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children(os.getpid())

    def refused() -> NoReturn:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(spawner, "yield_the_core", refused)
    with pytest.raises(OSError, match="does not let it give way to the main job") as caught:
        made.start()
    assert isinstance(caught.value.__cause__, subprocess.SubprocessError)
    none_is_left(made, before, tmp_path)
