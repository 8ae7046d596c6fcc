"""The side task's main program: trains a study's trials, fused, whenever the gate lets it.

Trials that start together form a *cohort*: one `TrialGroup`, all at the same epoch, so each sees the batches in the
order that it would see alone. Rows that pruning frees are given to a new cohort, which takes turns with the old one.
A group whose units are longer than every bubble is split in halves.
"""

import argparse
import json
import os
import signal
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_hooks.page import Doing, Field, Page, Role
from trials.clerk_line import ClerkLine
from trials.gate import HOST_UNIT, STOP_SIGNAL, PageGate, StopRequested, block_signals
from trials.process import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Hashable

    from trials.cohort import Cohort, Fit
    from trials.group import TrialGroup
    from trials.member import Member
    from trials.study import Study

USER_ERROR_STATUS = 2
"""Exit status for what a restart cannot mend, such as a study that does not import."""


class Runner:
    """Keeps the bubbles supplied with fused work until the study is done."""

    def __init__(self, study: "Study", gate: PageGate, clerk: ClerkLine, status_fd: int) -> None:
        self._study = study
        self._gate = gate
        self._clerk = clerk
        self._status_fd = status_fd
        self._cohorts: list[Cohort] = []
        self._fits: dict[Hashable, Fit] = {}
        self._in_use: TrialGroup | None = None  # whose units the gate numbers
        self._ready: deque[dict[str, Any]] = deque()
        self._pruned: set[int] = set()
        self._asked = False
        self._exhausted = False
        self._work = 0
        self._epochs = 0

    def run(self) -> None:
        """Train until no trial is left.

        Raises:
            StopRequested: the daemon asked.
        """
        self.tell(event="ready")
        while True:
            self._listen()
            self._start_cohort()
            if not self._cohorts:
                if self._exhausted and not self._ready and not self._asked:
                    break
                self._wait_for_clerk()
                continue
            cohort = self._cohorts.pop(0)
            self._train_epoch(cohort)
            if cohort.groups:
                self._cohorts.append(cohort)
            self.tell(event="progress", work=self._work, trials_running=self._rows(), epochs=self._epochs)
        self._gate.rest()
        self.tell(event="finished", work=self._work)

    def tell(self, **status: Any) -> None:
        """One line to the daemon."""
        os.write(self._status_fd, json.dumps(status).encode() + b"\n")

    def _rows(self) -> int:
        return sum(len(cohort.numbers) for cohort in self._cohorts)

    def _listen(self) -> None:
        for answer in self._clerk.answers():
            self._take(answer)
        free = self._study.fused - self._rows() - len(self._ready)
        # ask while a cohort still trains: the answer takes the clerk a while
        if not self._asked and not self._exhausted and (free > 0 or not self._ready):
            self._clerk.send(ask=free if free > 0 else self._study.fused)
            self._asked = True

    def _take(self, answer: dict[str, Any]) -> None:
        if "pruned" in answer:
            self._pruned.add(answer["pruned"])
        if "trials" in answer:
            self._ready.extend(answer["trials"])
            self._exhausted = answer["exhausted"]
            self._asked = False

    def _wait_for_clerk(self) -> None:
        self._gate.rest()
        for answer in self._clerk.answers(wait_s=0.2):
            self._take(answer)
        if STOP_SIGNAL in signal.sigpending():
            raise StopRequested

    def _start_cohort(self) -> None:
        """Fuse ready trials once they would fill half of the rows, or the device has nothing else."""
        from trials.cohort import Cohort, Fit
        from trials.member import group_key

        room = self._study.fused - self._rows()
        if not self._ready or room <= 0 or (self._cohorts and min(room, len(self._ready)) < self._study.fused // 2):
            return
        members: list[Member] = []
        while self._ready and len(members) < room:
            member = self._build(self._ready[0])
            if member is not None and members and group_key(member) != group_key(members[0]):
                self._ready.rotate(-1)  # another structure: in a cohort of its own
                break
            self._ready.popleft()
            if member is not None:
                members.append(member)
        if members:
            self._gate.enter(HOST_UNIT)
            self._in_use = None
            fit = self._fits.setdefault(group_key(members[0]), Fit(most=self._study.fused))
            try:
                self._cohorts.append(Cohort(self._study, members, self._gate, fit))
            except Exception as error:
                self._fail([member.number for member in members], error)

    def _build(self, asked: dict[str, Any]) -> "Member | None":
        from trials.member import build_member

        self._gate.enter(HOST_UNIT)
        try:
            return build_member(self._study, asked["number"], asked["params"])
        except Exception as error:
            self._fail([asked["number"]], error)
            return None

    def _train_epoch(self, cohort: "Cohort") -> None:
        study, gate = self._study, self._gate
        gate.enter(HOST_UNIT)
        try:
            for group, inputs, targets, per_trial in cohort.batches():
                self._use(group)
                group.train_step(inputs, targets, per_trial)
                gate.enter(HOST_UNIT)
                trial_samples = targets.shape[0] * targets.shape[1] if per_trial else group.size * len(targets)
                self._work += trial_samples
                gate.add_work(trial_samples)
                self._relieve(cohort, group)
            cohort.epoch += 1
            self._epochs += len(cohort.numbers)
            for group in cohort.groups:
                self._drop_lost_rows(group, cohort.epoch)
            cohort.drop_empty()
            for group in tuple(cohort.groups):
                self._use(group)
                scores = group.end_epoch()
                gate.enter(HOST_UNIT)
                if cohort.epoch == study.epochs or cohort.epoch in study.rungs:
                    self._report(group, cohort.epoch, scores or group.evaluate())
                self._relieve(cohort, group)
            cohort.drop_empty()
        except Exception as error:
            self._fail(cohort.numbers, error)
            cohort.groups.clear()

    def _use(self, group: "TrialGroup") -> None:
        """Let the gate number the units of `group`."""
        if group is not self._in_use:
            self._gate.trials = group.size
            group.use_units()
            self._in_use = group

    def _relieve(self, cohort: "Cohort", group: "TrialGroup") -> None:
        """Split `group` if its last units were too long for every bubble, and tell the daemon what can be done."""
        starved = self._gate.take_starved()
        if not starved or not group.size:
            return
        longest = max(starved, key=lambda found: found.needs_ns)
        did = "split" if cohort.fit.may_halve(longest) else "nothing"
        if did == "split":
            cohort.halve(group, self._gate)
            self._in_use = None
        elif not cohort.fit.is_news(longest.unit):
            return
        self.tell(
            event="starved",
            unit=longest.unit,
            trials=longest.trials,
            needs_ms=round(longest.needs_ns / 1e6, 3),
            longest_bubble_ms=round(longest.longest_ns / 1e6, 3),
            did=did,
        )

    def _drop_lost_rows(self, group: "TrialGroup", epoch: int) -> None:
        finite = group.finite_K().tolist()
        for number, is_finite in zip(group.numbers, finite, strict=True):
            if not is_finite:
                self._clerk.send(fail=number, reason=f"the loss is not finite in epoch {epoch}")
        rows = [row for row, number in enumerate(group.numbers) if finite[row] and number not in self._pruned]
        self._keep(group, rows)

    def _report(self, group: "TrialGroup", epoch: int, scores: list[float]) -> None:
        final = epoch == self._study.epochs
        self._gate.enter(HOST_UNIT)
        for number, score in zip(group.numbers, scores, strict=True):
            self._clerk.send(report=number, epoch=epoch, value=score, final=final)
        if final:
            self._keep(group, [])

    def _keep(self, group: "TrialGroup", rows: list[int]) -> None:
        if len(rows) < group.size:
            self._gate.trials = len(rows)
            group.keep(rows)
            self._in_use = group

    def _fail(self, numbers: list[int], error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        print(f"[trials] trials {numbers} failed: {reason}", file=sys.stderr)
        for number in numbers:
            self._clerk.send(fail=number, reason=reason)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trials.runner")
    parser.add_argument("--study", type=Path, required=True, metavar="FILE")
    parser.add_argument("--study-name", default="study")
    parser.add_argument("--storage", default="", metavar="URL")
    parser.add_argument("--worker", default="")
    parser.add_argument("--lock", type=Path, default=Path(os.devnull))
    parser.add_argument("--page", type=Path)
    parser.add_argument("--units", type=Path)
    parser.add_argument("--status-fd", type=int, default=-1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--measure", type=float, metavar="SECONDS", help="print the ungated rate, and leave")
    parser.add_argument("--trials", type=int, default=0, help="with --measure: how many are fused")
    return parser.parse_args()


def main() -> int:
    """Serve one page until the study is done or the daemon asks to stop."""
    arguments = _parse()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the daemon ends us
    block_signals()
    import torch

    torch.set_num_threads(arguments.threads)
    from trials.study import StudyError, load_study
    from trials.ungated import measure_dedicated

    try:
        study = load_study(arguments.study)
    except StudyError as error:
        if arguments.status_fd >= 0:
            os.write(arguments.status_fd, json.dumps({"event": "error", "message": str(error)}).encode() + b"\n")
        return USER_ERROR_STATUS
    if arguments.measure is not None:
        trials = arguments.trials or min(study.fused, study.trials)
        print(json.dumps(measure_dedicated(study, trials, arguments.measure)))
        return 0
    return _serve(study, arguments)


def _serve(study: "Study", arguments: argparse.Namespace) -> int:
    from trials.clerk import ClerkPlace, serve
    from trials.ungated import rehearse

    place = ClerkPlace(
        storage_url=arguments.storage,
        study_name=arguments.study_name,
        worker=arguments.worker,
        lock_file=arguments.lock,
    )
    # forked before the page is opened, so that the page's locks stay this process's own
    clerk = ClerkLine(partial(serve, study, place, attached=partial(_job_attached, arguments.page)))
    page = Page.open(arguments.page, create=False)
    page.claim(Role.SIDE)
    page.words[Field.SIDE_DOING] = Doing.HOST
    rehearse(study)
    gate = PageGate(page, arguments.units, arguments.units.with_suffix(".json") if arguments.units else None)
    # not before: until the job's first step there is nobody to be nice to
    os.nice(max(0, arguments.nice - os.nice(0)))
    runner = Runner(study, gate, clerk, arguments.status_fd)
    reason = "the side task ended"
    try:
        runner.run()
    except StopRequested:
        reason = "the main job or its daemon ended before the trial did"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        runner.tell(event="error", message=reason)
        raise
    finally:
        gate.close()
        closed = clerk.close(reason)
        page.close()
    return 0 if closed else 1


def _job_attached(path: Path) -> bool:
    page = Page.open(path, create=False)
    attached = page.words[Field.MAIN_PID] != 0
    page.close()
    return attached


if __name__ == "__main__":
    raise SystemExit(main())
