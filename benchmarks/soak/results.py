"""The results of a soak: one line of JSON per run, appended at once, so that a soak that is cut short resumes.

The first line holds `alone`, the losses without us. Each other one holds run, seed, steps_planned, commit,
date, machine, and what `benchmarks.soak.one_run` found:

    form        how the job was started
    faults      each as drawn (`benchmarks.soak.faults.Fault`); if it was injected also pid, at_step and at_s
    steps       of the main job that were compared bit by bit
    ended       "completed"; "ended by design", by a fault aimed at the main job itself; "harmed"
    side_units  bytes of the side tasks' records of units
    left        what was left behind, by kind; "for the next run" is what the next `ds_squeeze` removed
    failed      what is wrong; empty: nothing
    log         the end of what was printed, if something is wrong
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class ResultsError(Exception):
    """A results file that cannot be continued; the text says why."""


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def to_continue(path: Path, commit: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """All whole lines so far. Half a line, of a soak that was killed while it wrote, is removed.

    Raises:
        ResultsError: they are of another commit, seed or length.
    """
    found = read(path)
    wanted = (commit, seed, steps)
    others = {(line["commit"], line["seed"], line["steps_planned"]) for line in found} - {wanted}
    if others:
        raise ResultsError(f"{path} holds runs of {sorted(others)}, and not of {wanted}; name another file")
    if path.exists():
        content = path.read_bytes()
        path.write_bytes(content[: content.rfind(b"\n") + 1])
    return found


def append(path: Path, line: dict[str, Any]) -> None:
    """Add one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def summary(runs: Iterable[dict[str, Any]]) -> str:
    """For people: what was injected, what became of the jobs, and every failure."""
    runs = list(runs)
    endings = Counter(run["ended"] for run in runs)
    injected: Counter[str] = Counter()
    missed = 0
    for fault in (fault for run in runs for fault in run["faults"]):
        if "pid" in fault:
            injected[f"{fault['what']} {fault['victim'] or 'machine'}"] += 1
        else:
            missed += 1
    steps = sum(run["steps"] for run in runs)
    minutes = sum(run["seconds"] for run in runs) / 60
    failed = [run for run in runs if run["failed"]]
    lines = [
        f"{len(runs)} runs in {minutes:.1f} minutes: "
        + (", ".join(f"{count} {ending}" for ending, count in sorted(endings.items())) or "none"),
        f"{steps} steps of the main job compared bit by bit",
        f"{sum(injected.values())} faults injected; {missed} found no victim",
        *(f"  {count:4} {name}" for name, count in sorted(injected.items())),
        f"{sum(bool(run['left'].get('for the next run')) for run in runs)} left something that the next run removed",
        f"{len(failed)} failed",
        *(f"  run {run['run']}: {'; '.join(run['failed'])}" for run in failed),
    ]
    return "\n".join(lines)
