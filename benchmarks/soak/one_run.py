"""One run of the soak: starts the job, injects the faults, and judges what has become of losses and leftovers."""

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.soak import leftovers
from benchmarks.soak.faults import Plan
from benchmarks.soak.injector import Injector
from benchmarks.soak.job import Paths, SqueezedJob, read_losses
from benchmarks.soak.processes import Process, Processes, by_role, send
from launch.leftovers import remove_buffers_soon

_LOOK_EVERY_S = 0.05
_STARTS_WITHIN_S = 60.0
_STEP_WITHIN_S = 180.0
"""Also the time to the first step, and from the last one to the end."""
_GONE_WITHIN_S = 60.0
"""After the job: the launcher waits half a minute for daemons that somebody has stopped."""
_MAIN_JOB = ("launcher", "deepspeed", "rank")
_DISK_MB = 48
_LOG_TAIL = 6000


def run_once(number: int, plan: Plan, seed: int, alone: Sequence[str]) -> dict[str, Any]:
    """Run it.

    Args:
        number: the run's, for its mark.
        plan: its faults.
        seed: of the training.
        alone: the losses without any of our code.

    Returns:
        The result, as `benchmarks.soak.results` describes it.
    """
    with _paths(plan) as paths:
        run = _Run(number, plan, seed, paths)
        try:
            return run.result(alone)
        finally:
            run.clear()


@contextmanager
def _paths(plan: Plan) -> Iterator[Paths]:
    base = Path(tempfile.mkdtemp(prefix="bsq-soak-", dir="/tmp"))
    disk = base / "disk"
    disk.mkdir()
    is_mounted = False
    try:
        if plan.fills_disk:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m,mode=0700", "none", str(disk)]
            subprocess.run(mount, check=True)
            is_mounted = True
        (base / "tmp").mkdir()
        yield Paths(base, disk / "run")
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
        shutil.rmtree(base)


class _Run:
    def __init__(self, number: int, plan: Plan, seed: int, paths: Paths) -> None:
        self._plan, self._paths = plan, paths
        mark = f"{paths.base.name}.{number}"
        self._processes = Processes(mark)
        self._began_s = time.monotonic()
        self._ports: set[int] = set()
        self._failed: list[str] = []
        self._job = SqueezedJob(plan, paths, seed, mark)
        self._injector = Injector(plan, self._job.terminal, paths.run.parent)

    def result(self, alone: Sequence[str]) -> dict[str, Any]:
        try:
            self._watch()
            self._injector.end()
            left = self._wait_until_gone()
        finally:
            self._kill_all()
            self._job.close()
        self._kill_all()
        losses = read_losses(self._paths.losses)
        self._judge_losses(losses, alone)
        status = self._job.status()
        if self._plan.has_status and status != 0:
            self._failed.append(f"exit status {status}")
        left |= self._left_on_the_machine()
        self._failed += [f"left behind: {kind}" for kind, found in left.items() if found and kind != "for the next run"]
        record: dict[str, Any] = {
            "form": self._plan.form,
            "faults": self._injector.records,
            "steps": len(losses),
            "ended": self._ending(len(losses)),
            "status": status,
            "side_units": sum(path.stat().st_size for path in self._paths.run.glob("rank*.units.bin")),
            "left": left,
            "failed": self._failed,
            "seconds": round(time.monotonic() - self._began_s, 1),
        }
        if self._failed:
            record["log"] = self._paths.log.read_text(errors="replace")[-_LOG_TAIL:] if self._paths.log.exists() else ""
        return record

    def clear(self) -> None:
        """Let nothing stay, though a run failed, or the soak was ended in the middle of one."""
        self._kill_all()
        for port in self._ports:
            remove_buffers_soon(port)

    def _watch(self) -> None:
        """Inject faults until the main job is over: no launcher and no rank lives."""
        has_started, steps, since_s = False, 0, time.monotonic()
        while time.monotonic() - since_s < _STEP_WITHIN_S:
            roles = by_role(self._processes.now())
            has_started = has_started or any((role, 0) in roles for role in _MAIN_JOB)
            if not has_started and time.monotonic() > self._began_s + _STARTS_WITHIN_S:
                self._failed.append("the job did not start")
                return
            if has_started and not any(role in _MAIN_JOB for role, _ in roles):
                return
            self._ports |= leftovers.ports(self._paths)
            done = len(read_losses(self._paths.losses))
            if done > steps:
                steps, since_s = done, time.monotonic()
            self._injector.look(roles, done, self._began_s)
            time.sleep(_LOOK_EVERY_S)
        self._failed.append("the job hangs: " + "; ".join(_describe(self._processes.now())))

    def _wait_until_gone(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + _GONE_WITHIN_S
        while (left := self._without_shell(self._processes.now())) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_EVERY_S)
        return {"processes": _describe(left)}

    def _left_on_the_machine(self) -> dict[str, Any]:
        paths = self._paths
        left: dict[str, Any] = {"for the next run": []}
        if leftovers.ports(paths):
            left["for the next run"] = leftovers.files(paths)
            leftovers.clear_as_the_next_run_does(paths)
            if not self._may_leave_for_the_next():
                left["shared memory of a launcher that was not killed"] = left["for the next run"]
        left["files"] = leftovers.files(paths)
        left["shared memory"] = leftovers.shared_memory(self._ports, self._processes.seen)
        left["locks"] = leftovers.locks(paths)
        whats = {(fault.victim, fault.what) for fault in self._plan.faults}
        if not whats & {("launcher", "SIGKILL"), ("", "full disk")} and "file limit" not in {what for _, what in whats}:
            left["open trials"] = leftovers.open_trials(paths)
        return left

    def _may_leave_for_the_next(self) -> bool:
        """Whether those that would clear up were killed, or the ranks outlived the launcher."""
        killed = {fault.victim for fault in self._plan.faults if fault.what in ("SIGKILL", "SIGHUP")}
        return bool(killed & {"launcher", "deepspeed"})

    def _judge_losses(self, losses: list[str], alone: Sequence[str]) -> None:
        if losses != list(alone[: len(losses)]):
            first = next(i for i, (a, b) in enumerate(zip(losses, alone, strict=False)) if a != b)
            self._failed.append(f"losses differ from step {first + 1} on: {losses[first]} and not {alone[first]}")
        if len(losses) < self._plan.steps and not self._plan.may_end_early:
            self._failed.append(f"the main job ended after {len(losses)} steps, and no fault was aimed at it")

    def _ending(self, steps: int) -> str:
        if steps == self._plan.steps:
            return "completed"
        return "ended by design" if self._plan.may_end_early else "harmed"

    def _without_shell(self, found: list[Process]) -> list[Process]:
        return [process for process in found if process.words[:1] != ("bash",)]

    def _kill_all(self) -> None:
        for process in self._without_shell(self._processes.now()):
            send(process, signal.SIGKILL)


def _describe(processes: list[Process]) -> list[str]:
    return [process.describe() for process in processes]
