"""Draws the results of `bubble_utilization` as a table (.md) and a picture (.svg) beside FILE.json.

The colours are of Okabe and Ito's palette, which colour-blind people can tell apart.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.utilization.guarded_figures import placebo
from benchmarks.windows.modes import COOPERATIVE, MODES, NAIVE, ORACLE, PREEMPTIVE, SCHED_IDLE, STEP_GRAIN

COLOURS = {
    PREEMPTIVE: "#009E73",
    COOPERATIVE: "#0072B2",
    ORACLE: "#56B4E9",
    STEP_GRAIN: "#E69F00",
    SCHED_IDLE: "#CC79A7",
    NAIVE: "#D55E00",
}
LABELS = {PREEMPTIVE: "preemptive (default)", STEP_GRAIN: "step grain", SCHED_IDLE: "SCHED_IDLE"}
WIDTH, LEFT, TOP, ROW, PANEL, GAP = 980, 210, 86, 26, 340, 50
SLOWDOWN_PERCENT = (-5.0, 20.0)
HARVEST_PERCENT = (0.0, 120.0)
STYLE = """
  text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #30363d } .ink { fill: #e6edf3 } .soft { fill: #9198a1 } .grid { stroke: #262c36 }
  }
"""


def write_figures(results: Path) -> None:
    """Write the table (.md) and the picture (.svg) of a JSON file beside it."""
    content = json.loads(results.read_text(encoding="utf-8"))
    results.with_suffix(".md").write_text(table(content), encoding="utf-8")
    compared = [run for run in content["runs"] if "baselines" in run]
    results.with_suffix(".svg").write_text(picture(compared), encoding="utf-8")


def table(content: Mapping[str, Any]) -> str:
    """Slowdown with its 95% interval, and harvest, of every scenario and mode, in Markdown."""
    machine = content["machine"]
    lines = [
        f"`python -m benchmarks.{content['name']}` on {machine['cores']} cores ({machine['cpu']}), {content['date']}, "
        f"{content['commit']}. Each cell: slowdown [95% interval] / harvest, in percent.",
        "",
        "| scenario | step, ms | " + " | ".join(LABELS.get(mode, mode) for mode in MODES) + " |",
        "|---" * (len(MODES) + 2) + "|",
    ]
    for run in content["runs"]:
        if "baselines" not in run:
            continue
        cells = [_cell(run["baselines"][mode]) for mode in MODES]
        lines.append(f"| {run['scenario']} | {run['step_ms_alone']:.0f} | " + " | ".join(cells) + " |")
    disturbed = [run for run in content["runs"] if "disturbance" in run]
    if disturbed:
        lines += [
            "",
            "Disturbed scenarios: the 50 steps after the first 10. Fill before, in those 10, and after:",
            "",
        ]
        for run in disturbed:
            for mode, of in run["disturbance"]["harvest"].items():
                parts = ", ".join(
                    f"{100 * of['fill'][part]:.0f}%" for part in ("before", "in_the_first_cycle", "after")
                )
                lines.append(f"- {run['scenario']}, {mode}: {parts}")
    guards = [run for run in content["runs"] if "guarded" in run]
    if guards:
        lines += ["", *_guarded_table(guards)]
    return "\n".join(lines) + "\n"


def _guarded_table(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The cost of squeezing with the guard on in the worst 50 consecutive steps, and the guard's decisions."""
    yield (
        "With the guard on: what squeezing cost the main job in the worst 50 steps in a row after the first 10 of the "
        f"disturbance, in percent, with its 95% interval; the budget is {100 * runs[0]['budget']:g}%. How many of "
        "these intervals lay above it, and how many seem to by noise, if a third of the squeezed steps passes for steps"
        " alone. Harvest / fill of squeezed steps / share of steps that were squeezed, in percent."
    )
    yield ""
    columns = ("worst cost", "over all", "worst overrun", "above", "by noise", "before", "disturbed", "last 60")
    yield f"| scenario | {' | '.join(columns)} | the guard |"
    yield "|---" * 10 + "|"
    for run in runs:
        found, noise = run["guarded"], placebo(run)
        costs = [_cost(found[part]) for part in ("worst", "over_all")]
        parts = [_part(run["harvest"].get(part)) for part in ("before", "disturbed", "last_60")]
        decisions = [f"{d['step']}: {d['what'].replace('_', ' ')} {d['cause']}".strip() for d in run["decisions"]]
        gate = [word for word in decisions if " widen" not in word and " narrow" not in word]
        yield (
            f"| {run['scenario']} | {costs[0]} | {costs[1]} | {100 * found['worst_overrun_share']:.2f} | "
            f"{_above(found)} | {_above(noise)} | {' | '.join(parts)} | {'; '.join(gate) or 'nothing'} |"
        )


def _above(found: Mapping[str, Any]) -> str:
    return f"{found['intervals_broken']} of {found['intervals']}"


def _cost(found: Mapping[str, Any]) -> str:
    low, high = found["cost_ci95"]
    return f"{100 * found['cost']:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"


def _part(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "n/a"
    shares = (found[key] for key in ("harvest", "fill", "squeezed_share"))
    return " / ".join("n/a" if share is None else f"{100 * share:.0f}" for share in shares)


def _cell(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "n/a"
    low, high = figures["slowdown_ci95"]
    harvest = "n/a" if figures["harvest"] is None else f"{100 * figures['harvest']:.0f}"
    return f"{100 * figures['slowdown']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] / {harvest}"


def picture(runs: Sequence[Mapping[str, Any]]) -> str:
    """Slowdown and harvest of every scenario and mode, as an SVG."""
    height = TOP + ROW * len(runs) + 40
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>Slowdown of the main job and harvest of the side task, by scenario and baseline</title>\n"
        f"<style>{STYLE}</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="#ffffff" '
        f'stroke="#d1d9e0"/>\n' + "\n".join(_parts(runs)) + "\n</svg>\n"
    )


def _parts(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    panels = (
        ("slowdown of the main job, % (line: 95% interval)", LEFT, SLOWDOWN_PERCENT, "slowdown", 5),
        ("harvest of the side task, %", LEFT + PANEL + GAP, HARVEST_PERCENT, "harvest", 20),
    )
    x = float(LEFT)
    for mode in MODES:
        label = LABELS.get(mode, mode)
        yield f'<circle cx="{x:.1f}" cy="24" r="5" fill="{COLOURS[mode]}"/>' + _text(x + 10, 28, label)
        x += 36 + 6.4 * len(label)
    bottom = TOP + ROW * len(runs)
    for title, left, (low, high), key, tick in panels:
        yield _text(left, 54, title, "ink")
        for value in range(int(low), int(high) + 1, tick):
            at = left + (value - low) / (high - low) * PANEL
            width = 1.6 if value == 0 else 1
            yield f'<path class="grid" d="M{at:.1f} {TOP - 12}V{bottom}" stroke="#e4e8ec" stroke-width="{width}"/>'
            yield _text(at, bottom + 18, f"{value:+d}" if key == "slowdown" else str(value), "soft", "middle")
        for row, run in enumerate(runs):
            for index, mode in enumerate(MODES):
                figures = run["baselines"][mode]
                if figures is not None and figures[key] is not None:
                    y = TOP + ROW * row + 3.2 * index - 2
                    yield from _mark(figures, key, mode, y, left, (low, high))
    for row, run in enumerate(runs):
        yield _text(LEFT - 14, TOP + ROW * row + 10, run["scenario"].replace("_", " "), "ink", "end")


def _mark(
    figures: Mapping[str, Any], key: str, mode: str, y: float, left: float, bounds: tuple[float, float]
) -> Iterator[str]:
    low, high = bounds

    def x(value: float) -> float:
        return left + (min(max(100 * value, low), high) - low) / (high - low) * PANEL

    interval = figures[f"{key}_ci95"]
    if key == "slowdown" and all(map(math.isfinite, interval)):
        yield f'<path d="M{x(interval[0]):.1f} {y:.1f}H{x(interval[1]):.1f}" stroke="{COLOURS[mode]}" opacity="0.6"/>'
    yield f'<circle cx="{x(figures[key]):.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[mode]}"/>'
    if 100 * figures[key] > high:
        sign = "+" if key == "slowdown" else ""
        yield _text(left + PANEL + 5, y + 3, f"{sign}{100 * figures[key]:.0f}", "soft", size=9)


def _text(x: float, y: float, words: str, css: str = "ink", anchor: str = "start", size: int = 12) -> str:
    fill = "#59636e" if css == "soft" else "#1f2328"
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.utilization.picture", description=__doc__)
    parser.add_argument("results", type=Path, metavar="FILE.json")
    write_figures(parser.parse_args().results)
