"""When the end of a bubble is left to the kernel's idle class."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_hooks.shared.page.layout import Preemption
from squeezer.config import Config, SideTable, SqueezeTable
from squeezer.daemon import preemption
from squeezer.daemon.preemption import preemption_of
from squeezer.device import SideProcess
from trials.gate.process import run_when_idle

SIDE = SideProcess(pid=os.getpid(), pidfd=-1)


def config(preemptive: Any, priority: Any = "idle") -> Config:
    side = SideTable.model_construct(study=Path("study.py"), priority=priority)
    return Config.model_construct(squeeze=SqueezeTable(preemptive=preemptive), side=side)


def device(*, own_session: bool = False) -> Any:
    return SimpleNamespace(own_session=own_session)


def test_it_is_where_it_is_asked_for_and_holds() -> None:
    assert preemption_of(config("idle"), device(), os.getppid(), SIDE) == Preemption.IDLE_CLASS
    assert preemption_of(config(True), device(), os.getppid(), SIDE) == Preemption.STOP
    assert preemption_of(config(False), device(), os.getppid(), SIDE) == Preemption.NONE


@pytest.mark.parametrize(
    ("of", "where", "main_pid", "side"),
    [
        (config("idle", "nice"), device(), os.getppid(), SIDE),
        (config("idle"), device(own_session=True), os.getppid(), SIDE),
        (config("idle"), device(), 0, SIDE),
        (config("idle"), device(), os.getppid(), None),
        (config("idle").model_copy(update={"side": None}), device(), os.getppid(), SIDE),
    ],
)
def test_else_it_is_stopped(of: Config, where: Any, main_pid: int, side: SideProcess | None) -> None:
    assert preemption_of(of, where, main_pid, side) == Preemption.STOP


def test_in_another_control_group_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    main_pid, other = os.getppid(), SideProcess(pid=os.getpid() + 1, pidfd=-1)
    monkeypatch.setattr(preemption, "cpu_group", {main_pid: "/a", SIDE.pid: "/a", other.pid: "/b"}.get)
    assert preemption_of(config("idle"), device(), main_pid, other) == Preemption.STOP
    assert preemption_of(config("idle"), device(), main_pid, SIDE) == Preemption.IDLE_CLASS


def test_beside_a_job_of_the_idle_class_or_one_that_has_ended_it_is_stopped() -> None:
    with subprocess.Popen(["sleep", "60"], preexec_fn=run_when_idle) as main:
        assert preemption_of(config("idle"), device(), main.pid, SIDE) == Preemption.STOP
        main.kill()
    assert preemption_of(config("idle"), device(), main.pid, SIDE) == Preemption.STOP
