"""What is recorded of the main job: one dataclass per kind of record, its fields those of the record on disk.

`squeezer.records.layout` explains them. Times are in ns of CLOCK_MONOTONIC.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A main job has attached its hooks. `job` is its index in the file."""

    job: int
    t_ns: int
    pid: int
    rank: int
    world_size: int
    stage: int
    stages: int
    micro_batches: int
    master_port: int
    least_bubble_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step of the main job has ended."""

    job: int
    step: int
    start_ns: int
    end_ns: int
    squeezed: bool | None
    work: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bubble:
    """A bubble has ended, and so has the time after it in which the side task may have overrun it."""

    step: int
    epoch: int
    slot: int
    wait: str
    start_ns: int
    forecast_ns: tuple[int, int, int] | None
    permit_until_ns: int | None
    end_ns: int
    squeezed: bool | None
    side_ns: int | None
    main_ns: int | None
    stopped: bool
    overrun_ns: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Instructions:
    """When a part of a step's instructions ran: (kind, slot, start, end) each."""

    step: int
    items: tuple[tuple[str, int, int, int], ...]


Fact = Job | Step | Bubble | Instructions
KINDS: dict[type[Fact], str] = {Job: "job", Step: "step", Bubble: "bubble", Instructions: "instructions"}
