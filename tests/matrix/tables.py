"""The tables of `docs/matrix.md`, from the results of the last run."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.matrix.__main__ import RESULTS
from tests.matrix.cell import EQUAL, NOT_AVAILABLE
from tests.matrix.modes import MODES


def read() -> dict[str, Any]:
    """The results."""
    content: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return content


def run_table(content: Mapping[str, Any]) -> str:
    """When, where and with what it ran."""
    machine = content["machine"]
    rows = {
        "date": content["date"],
        "commit": f"`{content['commit']}`",
        "PyTorch": machine["torch"],
        "Python": machine["python"],
        "machine": f"{machine['cores']} cores, {machine['cpu']}",
        "cells": f"{_count(content, EQUAL)} equal, {_count(content, NOT_AVAILABLE)} n/a, {_count(content)} in all",
    }
    return "\n".join(["| of the run | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def matrix_table(content: Mapping[str, Any]) -> str:
    """A row per way of training, a column per release."""
    cells = {(cell["mode"], cell["deepspeed"]): cell for cell in content["cells"]}
    releases = _releases(content["cells"])
    lines = ["| losses with hooks and with side tasks |" + "".join(f" {release} |" for release in releases)]
    lines.append("|---|" + "---|" * len(releases))
    notes: list[str] = []
    for name, mode in MODES.items():
        found = [_shown(cells.get((name, release)), notes) for release in releases]
        lines.append(f"| {mode.title} | {' | '.join(found)} |")
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, *([""] if numbered else []), *numbered])


def _releases(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(cell["deepspeed"] for cell in cells))


def _shown(cell: Mapping[str, Any] | None, notes: list[str]) -> str:
    """One cell. What is not equal has a number, under which its reason stands below."""
    if cell is None:
        return "not run"
    if cell["result"] == EQUAL:
        return "equal"
    note = f"`{cell['reason'].replace('`', '')}`"
    if note not in notes:
        notes.append(note)
    shown = cell["result"] if cell["result"] == NOT_AVAILABLE else f"**{cell['result']}**"
    return f"{shown} ({notes.index(note) + 1})"


def _count(content: Mapping[str, Any], result: str | None = None) -> int:
    return sum(result in (None, cell["result"]) for cell in content["cells"])
