"""When the end of a side task is collected."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_hooks.shared.page.layout import PAGE_BYTES
from squeezer.config import DeviceTable, SideTable
from squeezer.daemon.side_processes import spawner
from squeezer.device import CpuDevice, SideProcess, has_ended
from tests.support.sandbox import stat


@pytest.mark.parametrize(("own_session", "states"), [(True, ["Z"]), (False, [])])
def test_beside_a_job_of_another_session_its_threads_have_the_core_first(
    own_session: bool, states: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the kernel spins in `wait`, at the main job's cost."""
    device = CpuDevice(memoryview(bytearray(PAGE_BYTES)).cast("q"), DeviceTable(), 0)
    device.own_session = own_session
    files = spawner.SideFiles(page=tmp_path, run=tmp_path, rank=0, storage="", studies=tmp_path, units_bytes=0)
    made = spawner.Spawner(SideTable(study=tmp_path), device, files)
    process = made._process = subprocess.Popen([sys.executable, "-c", ""], process_group=0)
    made.side = SideProcess(pid=process.pid, pidfd=os.pidfd_open(process.pid))
    made.status_fd = os.open(os.devnull, os.O_RDONLY)
    assert has_ended(made.side.pidfd, 60)
    seen: list[str] = []
    monkeypatch.setattr(spawner, "end_orphans", lambda spare: 0)  # this process's children are not its
    monkeypatch.setattr(spawner, "let_clear_up", lambda spare: None)
    monkeypatch.setattr(
        "squeezer.daemon.side_processes.spawner.time.sleep", lambda s: seen.extend(stat(process.pid)[:1])
    )
    assert made.reap() == 0
    assert seen == states
