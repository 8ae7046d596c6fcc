"""The record of a rank that never ran, written step by step, so that every figure of a report is known beforehand."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_hooks.shared.unit_record import UNIT_RECORD
from squeezer.records.layout import RECORD_VERSION, events_path, units_path
from squeezer.records.writer import Recorder

MS = 1_000_000
BOOT_NS = 10**15
LOST = {"lost_messages": 1, "dropped_messages": 2, "foreign_messages": 3}
Bubble = tuple[float, float]  # begin in the step, length; both in ms
Unit = tuple[float, float, float]  # begin in the step, wall time, CPU time; all in ms


def used(bubbles: Sequence[Bubble], index: int, units: Sequence[Unit]) -> dict[str, int]:
    """The side task's CPU time in a bubble of a step, and from its end to the next one's start."""
    at_ms, length_ms = bubbles[index]
    end_ms = at_ms + length_ms
    next_ms = bubbles[index + 1][0] if index + 1 < len(bubbles) else math.inf
    side_ms = sum(max(0.0, min(a + wall, end_ms) - max(a, at_ms)) for a, wall, _ in units)
    overrun_ms = sum(min(cpu, max(0.0, min(a + wall, next_ms) - max(a, end_ms))) for a, wall, cpu in units)
    return {"side_ns": round(side_ms * MS), "overrun_ns": round(overrun_ms * MS)}


class MadeUpRank:
    """Writes the record of one rank, step after step. Times in ms count from the rank's first step."""

    work = work_per_step = 0
    stopped_epochs: frozenset[int] = frozenset()

    def __init__(
        self,
        run: Path,
        rank: int = 0,
        *,
        wall_s: float = 1.7e9,
        version: int = RECORD_VERSION,
        keep_bytes: int | None = None,
        **place: int,
    ) -> None:
        self.path = events_path(run, rank)
        self._units_path = units_path(run, rank)
        self._recorder = Recorder(run, rank, keep_bytes)
        self._units: list[bytes] = []
        self._slots = 0
        self.job, self.number, self.now_ns = -1, 0, BOOT_NS
        self._rank = rank
        self._place: dict[str, int] = {}
        config = {"side": {"storage": None, "study_name": "digits"}}
        self.add("run", version=version, rank=rank, config=config, wall_s=wall_s, t_ns=BOOT_NS)
        self.attach(**{"world_size": 2, "stage": rank, "stages": 2, "micro_batches": 4, **place})

    def add(self, kind: str, **fields: Any) -> None:
        self._recorder.add(kind, **fields)

    def attach(self, **place: int) -> None:
        """Begin a job, in the same place as the one before but for what `place` says."""
        self.job, self.number = self.job + 1, 0
        self._place = {**self._place, **place}
        self.add("job", job=self.job, pid=7, rank=self._rank, t_ns=self.now_ns, **self._place)

    def step(
        self,
        squeezed: bool | None,
        ms: float,
        bubbles: Sequence[Bubble] = (),
        units: Sequence[Unit] = (),
        opened: bool = True,
        waits: Sequence[str] = (),
    ) -> None:
        """Write a step; `waits` are the kinds of its bubbles, all RECV_GRAD by default."""
        self.number += 1
        self.work += self.work_per_step
        begin_ns = self.now_ns
        where = {"step": self.number}
        for slot, (at_ms, length_ms) in enumerate(bubbles):
            start_ns, end_ns = (begin_ns + round(t * MS) for t in (at_ms, at_ms + length_ms))
            permit = end_ns if squeezed and opened else None
            wait = waits[slot] if waits else "RECV_GRAD"
            what = {"slot": slot, "epoch": self._slots, "wait": wait, "forecast_ns": [5 * MS, 4 * MS, 12 * MS]}
            times = {"start_ns": start_ns, "end_ns": end_ns, "permit_until_ns": permit}
            times |= used(bubbles, slot, units)
            stopped = self._slots in self.stopped_epochs
            self.add("bubble", **where, **what, **times, squeezed=squeezed, stopped=stopped)
            self._slots += 1
        for at_ms, wall_ms, cpu_ms in units:
            self._units.append(
                UNIT_RECORD.pack(begin_ns + round(at_ms * MS), round(wall_ms * MS), round(cpu_ms * MS), 0, 0)
            )
        self.now_ns += round(ms * MS)
        half_ns = begin_ns + round(ms * MS / 2)
        forward = ["FORWARD_PASS", 0, begin_ns, half_ns]
        backward = ["BACKWARD_PASS", 1, half_ns, self.now_ns]
        self.add("instructions", **where, items=[forward, backward])
        self.add(
            "step", job=self.job, **where, start_ns=begin_ns, end_ns=self.now_ns, squeezed=squeezed, work=self.work
        )

    def windows(self, *, squeezed_ms: float = 101.0, **squeezed: Any) -> None:
        """Three alone windows of 100 ms a step, and two squeezed ones of three steps between them."""
        for window in range(5):
            for _ in range(4 if window == 0 else 3):
                if window % 2:
                    self.step(True, squeezed_ms, **squeezed)
                else:
                    self.step(False, 100.0, squeezed.get("bubbles", ()))

    def end(self, work_per_s: float | None = None) -> None:
        dedicated = (
            None
            if work_per_s is None
            else {"trials": 8, "work_per_s": work_per_s, "few_trials": 2, "few_work_per_s": work_per_s / 2}
        )
        self.add("end", t_ns=self.now_ns, **LOST, dedicated=dedicated)

    def flush(self) -> None:
        self._recorder.write()

    def write(self) -> None:
        self._recorder.close()
        self._units_path.write_bytes(b"".join(self._units))
        names = {"group": 0, "trials": 8, "units": ["0.Linear forward"]}
        self._units_path.with_suffix(".jsonl").write_text(f"{json.dumps(names)}\n")
