"""Spinners keep their own rank's core awake, in their windows alone."""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.windows.modes import Windows
from benchmarks.windows.spinners import spinners
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import Field
from tests.support.sandbox import children, cpu_ticks, stat, wait_for

WINDOWS = Windows(observe=1, warm_up=0, cycle=(("alone", 1), ("awake", 1)))


def test_each_spins_on_its_ranks_core(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("with one core, no spinner can be on the wrong one")
    ranks = [subprocess.Popen(["taskset", "-c", str(core), "sleep", "600"]) for core in cores[-2:]]
    pages = [Page.open(page_path(tmp_path / "pages", rank)) for rank in range(2)]
    try:
        for rank in ranks:
            wait_for(lambda rank=rank: len(os.sched_getaffinity(rank.pid)) == 1, "its core")
        before = {*children(os.getpid())}
        with spinners(tmp_path / "pages", 2, WINDOWS):
            spinning = sorted({*children(os.getpid())} - before)
            for page, rank in zip(pages, ranks, strict=True):
                page.words[Field.STEP] = 2
                page.words[Field.MAIN_PID] = rank.pid
            for pid, core in zip(spinning, cores[-2:], strict=True):
                wait_for(lambda pid=pid, core=core: os.sched_getaffinity(pid) == {core}, "its binding")
                assert stat(pid)[0] == "T"
            pages[0].words[Field.STEP] = 3
            used = [cpu_ticks(pid) for pid in spinning]
            for pid, ticks, core in zip(spinning, used, cores[-2:], strict=True):
                wait_for(lambda pid=pid, ticks=ticks: cpu_ticks(pid) > ticks + 20, "its turn")
                assert os.sched_getaffinity(pid) == {core}
            pages[0].words[Field.STEP] = 4
            for pid in spinning:
                wait_for(lambda pid=pid: stat(pid)[0] == "T", "its rest")
    finally:
        for page, rank in zip(pages, ranks, strict=True):
            page.close()
            rank.kill()
            rank.wait()
