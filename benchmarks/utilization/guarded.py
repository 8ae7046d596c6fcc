"""The scenarios `guarded_…`: disturbed ghost stages with the guard on. Does the budget hold over any 50 steps?

The daemon has its defaults, except that a quarter of the steps is left alone, for narrower intervals, and that
squeezing is tried again soon, so that a run shows it. A ghost's peers are never late because of ours: delays that
compound over ranks are not judged here.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.processes import environment, run_directories
from benchmarks.shared.results import commit
from benchmarks.studies import ENDLESS_DIGITS, UNRULY_DIGITS, unruly_digits
from benchmarks.utilization.ghost_run import train, write_config
from benchmarks.utilization.guarded_figures import guarded_steps, harvests, judge
from squeezer.policy.margins import RECENT_STEPS
from squeezer.records.reader import load_run

CONFIG = """
[squeeze]
preemptive = {preemptive}
alone_share = 0.25
[guard]
retry_steps = {retry_steps}
[side]
study = "{study}"
[run]
directory = "{run}"
keep_mb = 4096
"""
BUDGET = 0.01
"""The default of `guard.slowdown_budget`."""
RECOVERED = 0.9
RETRY_STEPS = 50
BEFORE_STEPS, DISTURBED_STEPS, AFTER_STEPS = 90, 110, 200
"""A broken budget closes the gate for 50 steps, then for 100; clearing the side task may take 40 more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guarded:
    """Stage 1 of 4 in steps of about 170 ms, disturbed from `first_step` on."""

    how: str
    preemptive: bool = True

    @property
    def name(self) -> str:
        """The scenario's name."""
        return f"guarded_{self.how}"

    @property
    def first_step(self) -> int:
        """The first step of the disturbance, counted from 1."""
        return BEFORE_STEPS + 1

    @property
    def until_step(self) -> int:
        """The first step after the disturbance, or after the part of a lasting one that is judged."""
        return self.first_step + DISTURBED_STEPS

    @property
    def is_unruly(self) -> bool:
        """Whether the side task is the disturbance."""
        return self.how in ("loader", "costs")

    def arguments(self) -> list[str]:
        """Options for `benchmarks.ghost.job`."""
        shape = ["--stages", "4", "--stage", "1", "--micro-batches", "4", "--micro-batch-size", "256"]
        steps = self.until_step - 1 + AFTER_STEPS
        more = {
            "jitter": ["--jitter", "0.2", "--jitter-step", str(BEFORE_STEPS)],
            "stall": ["--stall-step", str(BEFORE_STEPS)],
            "resize": ["--resize-step", str(BEFORE_STEPS)],
        }
        return [*shape, *more.get(self.how, []), "--steps", str(steps)]


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        *(Guarded(how=how) for how in ("jitter", "stall", "resize", "loader")),
        Guarded(how="costs", preemptive=False),  # preemptively no unit is too long
    )
}


def measure(scenario: Guarded) -> dict[str, Any]:
    """One run of a scenario; a minute or two."""
    with run_directories() as (run, pages):
        study = UNRULY_DIGITS if scenario.is_unruly else ENDLESS_DIGITS
        behaviour = f"{scenario.how}:{scenario.first_step}:{scenario.until_step}"
        env = {**environment(pages), unruly_digits.ENVIRONMENT: behaviour}
        preemptive = str(scenario.preemptive).lower()
        config = write_config(CONFIG, run, study, retry_steps=RETRY_STEPS, preemptive=preemptive)
        model = run.parent / "model.json"
        train([*scenario.arguments(), "--wait-for-side", "--model", str(model)], config, env)
        return _result(scenario, run, json.loads(model.read_text(encoding="utf-8")))


def _result(scenario: Guarded, run: Path, modelled_ms: list[float]) -> dict[str, Any]:
    (rank,) = load_run(run)
    steps = guarded_steps(rank.records, modelled_ms)
    dedicated = rank.records["end"][-1]["dedicated"]
    if dedicated is None:
        raise RuntimeError(f"{scenario.name}: the daemon could not measure the dedicated rate")
    first = scenario.first_step
    harvest = harvests(steps, first, scenario.until_step, dedicated["work_per_s"] / 1e3)
    decisions = [{key: d[key] for key in ("step", "what", "cause", "figures")} for d in rank.records["guard"]]
    judged = judge(steps, first, BUDGET)
    result: dict[str, Any] = {
        "scenario": scenario.name,
        "commit": commit(),
        "disturbed_step": first,
        "until_step": scenario.until_step if scenario.is_unruly else None,
        "budget": BUDGET,
        "guarded": judged,
        "harvest": harvest,
        "recovered": _recovered(harvest, since="disturbed" if scenario.how == "resize" else "before"),
        "decisions": decisions,
        "steps": {
            "squeezed": [s.squeezed for s in steps],
            "ms": [round(s.ms, 3) for s in steps],
            "modelled_ms": [round(s.modelled_ms, 3) for s in steps],
        },
    }
    worst = judged["worst"]
    low, high = worst["cost_ci95"]
    print(
        f"{scenario.name}: worst {RECENT_STEPS} steps {worst['cost']:+.2%} [{low:+.2%}, {high:+.2%}], "
        f"held {judged['held']}; recovered {result['recovered']}",
        file=sys.stderr,
        flush=True,
    )
    return result


def _recovered(harvest: Mapping[str, Mapping[str, float | None]], since: str) -> bool:
    """Whether the last 60 steps fill at least nearly as much of the bubbles as the steps `since`.

    The harvest will not do, because it follows the machine's speed, which drifts by more. After a resize bubbles are
    half as long, and less of a short bubble can be filled, so steps 11 and later are compared with the final level.
    """
    parts = (harvest[part] for part in (since, "last_60"))
    first, last = ((part["fill"] or 0.0) * (part["squeezed_share"] or 0.0) for part in parts)
    if since == "disturbed":
        first, last = last, first
    return last >= RECOVERED * first
