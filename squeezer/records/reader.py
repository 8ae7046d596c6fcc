"""Reads what a run left behind, all ranks on one clock, so that whatever uses a run may compare times."""

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hooks.shared.rotating_file import older, read_parts
from ds_hooks.shared.unit_record import unit_names_path
from squeezer.records.layout import DETAILS, RECORD_VERSION, details_path, events_path, recorded_ranks, units_path
from squeezer.records.units import UNIT_DTYPE, attribute, cut_at_stops, stopped_intervals

KINDS = ("run", "job", "step", "action", "guard", "side", "fault", "bubble_time", "end", *DETAILS)
# CLOCK_MONOTONIC counts from each machine's boot. Ranks that differ by less than this share a machine: there the
# clocks are one, and wall_s would only add its own error.
SAME_CLOCK_NS = 50_000_000


class ReportError(Exception):
    """The directory holds no run that this version can read; says what it looked for."""


class StepTime(NamedTuple):
    """One step of the main job, on one rank or averaged over `ranks`."""

    job: int
    step: int
    squeezed: bool | None
    start_ns: int
    end_ns: int
    duration_ns: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRun:
    """What one rank left behind.

    Attributes:
        records: kind of record -> its records in order, every kind present. "job" counts over daemon restarts.
        units: `UNIT_DTYPE`, by start; one that was stopped stands here as the pieces in which it ran.
        groups: what `units["group"]` and `units["unit"]` number: trials and unit names.
        first_detailed: the index among the "step" records of the first step of which details and units are kept.
    """

    rank: int
    records: Mapping[str, list[dict[str, Any]]]
    units: NDArray[Any]
    groups: Sequence[Mapping[str, Any]]
    first_detailed: int = 0

    def unit_name(self, group: int, unit: int) -> str:
        """A unit's name; its number where the side task was killed before it wrote the names."""
        if unit < 0:
            return "between layers"
        names = self.groups[group]["units"] if group < len(self.groups) else []
        return names[unit] if unit < len(names) else f"unit {unit}"

    def detailed_steps(self) -> list[dict[str, Any]]:
        """The "step" records of those whose details are kept."""
        return self.records["step"][self.first_detailed :]

    def step_times(self, *, detailed: bool = False) -> list[StepTime]:
        """The "step" records as data: all, or those of `detailed_steps`."""
        records = self.detailed_steps() if detailed else self.records["step"]
        spans = ((s, s["start_ns"], s["end_ns"]) for s in records)
        return [StepTime(s["job"], s["step"], s["squeezed"], a, b, b - a, (self.rank,)) for s, a, b in spans]


def load_run(run: Path) -> list[RankRun]:
    """All ranks of a run, by rank.

    Raises:
        ReportError: no records in `run`, or of another version.
    """
    ranks = [_load_rank(run, rank) for rank in recorded_ranks(run)]
    ranks = [rank for rank in ranks if rank.records["run"]]
    if not ranks:
        raise ReportError(f"{run}: no records of a run here; allowed: a directory with rank0.events.jsonl and so on")
    first = ranks[0].records["run"][0]
    for rank in ranks[1:]:
        own = rank.records["run"][0]
        shift_ns = round((own["wall_s"] - first["wall_s"]) * 1e9) - (own["t_ns"] - first["t_ns"])
        if abs(shift_ns) > SAME_CLOCK_NS:
            _shift(rank, shift_ns)
    return _from_where_all_begin(ranks)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The records in one file, in order; a line that a killed daemon cut short is left out."""
    with path.open(encoding="utf-8") as lines:
        yield from _parsed(lines)


def read_details(run: Path, rank: int) -> Iterator[dict[str, Any]]:
    """What is left of a rank's details, in order."""
    for part in read_parts(details_path(run, rank)):
        yield from _parsed(part.decode(errors="replace").splitlines())


def read_groups(path: Path) -> list[dict[str, Any]]:
    """The groups of units that `path` names, each with its ``trials`` and the names of its ``units``."""
    groups: list[dict[str, Any]] = []
    for line in read_events(path):
        while line["group"] >= len(groups):
            groups.append({"trials": line["trials"], "units": []})
        groups[line["group"]]["units"] += line["units"]
    return groups


def _parsed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def _load_rank(run: Path, number: int) -> RankRun:
    path = events_path(run, number)
    records: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    jobs: dict[tuple[int, int], int] = {}
    served_by: list[dict[str, Any]] = []
    for record in read_events(path):
        if not records["run"] and record.get("r") != "run":
            raise ReportError(f"{path}: begins with {record.get('r')!r}; allowed: a record 'run'")
        if record["r"] == "run" and record["version"] != RECORD_VERSION:
            raise ReportError(f"{path}: record version {record['version']}; allowed: version {RECORD_VERSION}")
        if "job" in record:
            record["job"] = jobs.setdefault((len(records["run"]), record["job"]), len(jobs))
        if record["r"] == "job":
            served_by.append(records["run"][-1])
        records.setdefault(record["r"], []).append(record)
    for record in read_details(run, number):
        records[record["r"]].append(record)
    units = _read_units(units_path(run, number))
    first = _first_detailed(run, number, records, units)
    # a daemon's successor gets the same hello as its predecessor
    attached_ns = [max(job["t_ns"], daemon["t_ns"]) for job, daemon in zip(records["job"], served_by, strict=True)]
    for bubble in records["bubble"]:
        index = bisect_right(attached_ns, bubble["start_ns"])
        bubble["job"] = records["job"][index - 1]["job"] if index else -1
    names = unit_names_path(units_path(run, number))
    groups = read_groups(names) if names.exists() else []
    ran = cut_at_stops(units, stopped_intervals(records["bubble"]))
    attribute(records["bubble"], ran, records["overran"])
    return RankRun(rank=number, records=records, first_detailed=first, units=ran, groups=groups)


def _read_units(path: Path) -> NDArray[Any]:
    """`UNIT_DTYPE`, by start."""
    parts = read_parts(path)
    units = np.concatenate([np.frombuffer(part, UNIT_DTYPE, len(part) // UNIT_DTYPE.itemsize) for part in parts])
    return units[np.argsort(units["start_ns"])]


def _first_detailed(run: Path, number: int, records: Mapping[str, list[dict[str, Any]]], units: NDArray[Any]) -> int:
    """See `RankRun`."""
    from_ns = 0
    if older(details_path(run, number)).exists():
        from_ns = min((bubble["start_ns"] for bubble in records["bubble"]), default=0)
    if older(units_path(run, number)).exists() and len(units):
        from_ns = max(from_ns, int(units["start_ns"][0]))
    return bisect_left(records["step"], from_ns, key=lambda step: step["start_ns"])


def _from_where_all_begin(ranks: Sequence[RankRun]) -> list[RankRun]:
    """With details from the same time on: each rank keeps those of another number of steps."""
    if not any(rank.first_detailed for rank in ranks):
        return list(ranks)
    begins = [rank.detailed_steps()[:1] for rank in ranks]
    from_ns = max((step["start_ns"] for begin in begins for step in begin), default=0)
    return [_detailed_from(rank, from_ns) for rank in ranks]


def _detailed_from(rank: RankRun, from_ns: int) -> RankRun:
    steps = rank.records["step"]
    first = max(rank.first_detailed, bisect_left(steps, from_ns, key=lambda step: step["start_ns"]))
    begin_ns = steps[first]["start_ns"] if first < len(steps) else math.inf
    kept = {kind: [record for record in rank.records[kind] if _begin_ns(record) >= begin_ns] for kind in DETAILS}
    units = rank.units[rank.units["start_ns"] >= begin_ns]
    return replace(rank, records={**rank.records, **kept}, units=units, first_detailed=first)


def _begin_ns(record: Mapping[str, Any]) -> int:
    """When a detail began."""
    if record["r"] == "instructions":
        return min((begin_ns for _, _, begin_ns, _ in record["items"]), default=0)
    return int(record["start_ns"] if record["r"] == "bubble" else record["t_ns"])


def _shift(rank: RankRun, shift_ns: int) -> None:
    for record in (record for records in rank.records.values() for record in records):
        for key in ("t_ns", "start_ns", "end_ns", "permit_until_ns"):
            if record.get(key) is not None:
                record[key] += shift_ns
        if record["r"] == "instructions":
            record["items"] = [[k, slot, a + shift_ns, b + shift_ns] for k, slot, a, b in record["items"]]
    rank.units["start_ns"] += shift_ns
