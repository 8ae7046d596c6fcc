"""`squeezer observe`'s table: how long devices are idle, per stage and by kind of wait, and in device-hours per day."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ds_hooks.shared.wire import NOT_IDLE, WaitKind
from squeezer.records.reader import RankRun, load_run
from squeezer.reports.metrics import WARM_UP_STEPS

HOURS_A_DAY = 24
FEW_STEPS = 20
"""Below this many steps the text warns: one slow step moves every share."""
_NO_ENGINE = (
    "No pipeline engine was seen, so there is nothing to show: the script must call deepspeed.initialize(model=...) "
    "with a PipelineModule or a DualPipeVModule."
)


class Layout(NamedTuple):
    """How a job is spread over devices. Jobs of one layout share a table."""

    stages: int
    world_size: int
    micro_batches: int

    @property
    def devices(self) -> int:
        """How many devices hold the same stage."""
        return self.world_size // self.stages


@dataclass(frozen=True, kw_only=True, slots=True)
class StageIdle:
    """The idle time of one stage, averaged over its recorded ranks.

    Attributes:
        devices: how many devices hold this stage, recorded or not.
        ranks: whose records were found.
        by_kind: kind of wait -> its share of the step time; empty if no step is on record.
    """

    stage: int
    devices: int
    ranks: tuple[int, ...]
    by_kind: Mapping[str, float]
    steps: int
    step_ms: float | None

    @property
    def share(self) -> float | None:
        """The share of the step in which a device of this stage waits; None if no step is on record."""
        idle = (share for kind, share in self.by_kind.items() if kind != NOT_IDLE.name)
        return sum(idle) if self.steps else None

    @property
    def device_hours_per_day(self) -> float | None:
        """What that is in device-hours per day of training, over all devices of the stage."""
        return None if self.share is None else self.share * HOURS_A_DAY * self.devices


@dataclass(frozen=True, kw_only=True, slots=True)
class JobIdle:
    """The idle time of all jobs of one layout.

    Attributes:
        jobs: how many there were, one after another.
        missing: the ranks without records.
    """

    layout: Layout
    jobs: int
    stages: Sequence[StageIdle]
    missing: tuple[int, ...]

    @property
    def device_hours_per_day(self) -> float | None:
        """Of all stages; None unless every stage is known."""
        known = [hours for stage in self.stages if (hours := stage.device_hours_per_day) is not None]
        return sum(known) if len(known) == len(self.stages) else None


class _Sums:
    """What is added up for one stage of one layout."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.step_ns = 0
        self.steps = 0
        self.wait_ns: Counter[str] = Counter()


def idle_of_run(run: Path) -> list[JobIdle]:
    """The idle time of each layout in `run`, in the order in which they came.

    The first steps of a job are warm-up, as in the report, and left out. So are steps that a fault cut short.

    Raises:
        ReportError: no records, or of another version.
    """
    return idle_of_ranks(load_run(run))


def idle_of_ranks(ranks: Sequence[RankRun]) -> list[JobIdle]:
    """As `idle_of_run`, of records in memory."""
    sums: dict[Layout, dict[int, _Sums]] = {}
    starts: dict[tuple[Layout, int], set[tuple[int, int]]] = {}
    for rank in ranks:
        kept = _kept_steps(rank)
        for job in rank.records["job"]:
            layout = Layout(job["stages"], job["world_size"], job["micro_batches"])
            stage = sums.setdefault(layout, {}).setdefault(job["stage"], _Sums())
            stage.ranks.add(job["rank"])
            # a daemon that was restarted records the job again
            starts.setdefault((layout, job["rank"]), set()).add((job["pid"], job["t_ns"]))
            _add(stage, job["job"], kept, rank.records["bubble"])
    return [
        _job_idle(layout, stages, max(len(seen) for (of, _), seen in starts.items() if of == layout))
        for layout, stages in sums.items()
    ]


def _kept_steps(rank: RankRun) -> dict[tuple[int, int], int]:
    """(job, step) -> its length in ns, of steps whose bubbles are on record and that are no warm-up."""
    first: Counter[int] = Counter()
    warm_up = set()
    for step in rank.records["step"]:
        first[step["job"]] += 1
        if first[step["job"]] <= WARM_UP_STEPS:
            warm_up.add((step["job"], step["step"]))
    return {
        key: step["end_ns"] - step["start_ns"]
        for step in rank.detailed_steps()
        if (key := (step["job"], step["step"])) not in warm_up
    }


def _add(stage: _Sums, job: int, kept: Mapping[tuple[int, int], int], bubbles: Sequence[Mapping[str, Any]]) -> None:
    own = {key: length_ns for key, length_ns in kept.items() if key[0] == job}
    stage.steps += len(own)
    stage.step_ns += sum(own.values())
    for bubble in bubbles:
        if (bubble["job"], bubble["step"]) in own:
            stage.wait_ns[bubble["wait"]] += bubble["end_ns"] - bubble["start_ns"]


def _job_idle(layout: Layout, sums: Mapping[int, _Sums], jobs: int) -> JobIdle:
    stages = []
    for number in range(layout.stages):
        of = sums.get(number, _Sums())
        stages.append(
            StageIdle(
                stage=number,
                devices=layout.devices,
                ranks=tuple(sorted(of.ranks)),
                by_kind={kind: ns / of.step_ns for kind, ns in of.wait_ns.items()} if of.step_ns else {},
                steps=of.steps // max(1, len(of.ranks)),
                step_ms=of.step_ns / of.steps / 1e6 if of.steps else None,
            )
        )
    recorded = {rank for stage in stages for rank in stage.ranks}
    missing = tuple(rank for rank in range(layout.world_size) if rank not in recorded)
    return JobIdle(layout=layout, jobs=jobs, stages=stages, missing=missing)


def render_idle(found: Sequence[JobIdle]) -> str:
    """The tables as text, at most 100 columns wide where there are no more than five kinds of wait."""
    return "\n\n".join("\n".join(_lines(job)) for job in found) or _NO_ENGINE


def _lines(job: JobIdle) -> Iterator[str]:
    layout = job.layout
    steps = min(stage.steps for stage in job.stages)
    known = [stage for stage in job.stages if stage.step_ms is not None]
    times = f"{_count(layout.stages, 'stage')} × {_count(layout.devices, 'device')}"
    several = f"{job.jobs} jobs of " if job.jobs > 1 else ""
    if not known:
        yield f"{several}{times}: no step after the {WARM_UP_STEPS} of warm-up, so no share is known."
        return
    step_ms = sum(stage.step_ms or 0 for stage in known) / len(known)
    most = max(stage.steps for stage in known)
    yield (
        f"{several}{times}, {_count(layout.micro_batches, 'micro-batch', 'es')}: {_count(most, 'step')} of "
        f"{step_ms:.1f} ms, after {WARM_UP_STEPS} of warm-up"
    )
    yield ""
    kinds = _kinds(job)
    yield from _table(job, kinds)
    yield ""
    yield "idle: the share of the step in which the device waits, transfers included; then its parts by kind of wait."
    if NOT_IDLE.name in kinds:
        yield f"{NOT_IDLE.name} is not idle, and not counted as such: DeepSpeed copies and sums gradients there."
    if steps < FEW_STEPS:
        yield f"Fewer than {FEW_STEPS} steps: these shares are rough."
    if job.missing:
        yield f"No records of rank{'s' * (len(job.missing) > 1)} {', '.join(map(str, job.missing))}. " + (
            "Other ranks of a stage stand in for them; n/a if there are none."
        )


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural * (number != 1)}"


def _kinds(job: JobIdle) -> list[str]:
    """The kinds of wait on record, in the order of the protocol."""
    present = {kind for stage in job.stages for kind in stage.by_kind}
    return [kind.name for kind in WaitKind if kind.name in present]


def _table(job: JobIdle, kinds: Sequence[str]) -> Iterator[str]:
    heads = [_two_lines(kind) for kind in kinds]
    widths = [max(7, len(above), len(below)) for above, below in heads]
    above = [f"{over:>{width}}" for (over, _), width in zip(heads, widths, strict=True)]
    below = [f"{under:>{width}}" for (_, under), width in zip(heads, widths, strict=True)]
    yield "  ".join([f"{'':5}  {'':7}  {'':6}  {'device-hours':>12}", *above]).rstrip()
    yield "  ".join([f"{'stage':5}  {'devices':7}  {'idle':>6}  {'per day':>12}", *below])
    for stage in job.stages:
        cells = [
            _percent(stage.by_kind[kind], width) if kind in stage.by_kind else f"{'–':>{width}}"
            for kind, width in zip(kinds, widths, strict=True)
        ]
        idle, hours = _percent(stage.share, 6), _hours(stage.device_hours_per_day)
        yield "  ".join([f"{stage.stage:>5}  {stage.devices:>7}  {idle}  {hours}", *cells])
    total = job.device_hours_per_day
    share = None if total is None else total / HOURS_A_DAY / job.layout.world_size
    yield f"{'total':5}  {job.layout.world_size:>7}  {_percent(share, 6)}  {_hours(total)}"


def _two_lines(kind: str) -> tuple[str, str]:
    first, joined, rest = kind.partition("_")
    return (first + joined, rest) if joined else ("", first)


def _percent(share: float | None, width: int) -> str:
    return f"{'n/a':>{width}}" if share is None else f"{100 * share:>{width - 1}.1f}%"


def _hours(hours: float | None) -> str:
    return f"{'n/a':>12}" if hours is None else f"{hours:>12.1f}"
