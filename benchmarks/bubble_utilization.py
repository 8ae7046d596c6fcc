"""What squeezing costs ghost stages, and what it yields, by class of pipeline and beside baselines.

    python -m benchmarks.bubble_utilization [--quick] [--json FILE] [--only SCENARIO]

The classes are *long* bubbles, *many* micro-batches (twice as many as stages) and *dualpipev*. Each has a ghost stage,
which is squeezed in several ways:

- `…_arms`: one run in rounds of short blocks, in random order: *alone*, where the core sleeps through bubbles; *awake*,
  where a process of the idle class spins and touches no memory; *placebos*, in which our side task goes through its
  gate, but its units only spin, or (`long` only) only run through a buffer as large as the core's own cache; *ours*,
  preemptive, left to the idle class at a bubble's end, and cooperative; the kernel's *idle class* without our gate;
  *step grain*, as FreeRide gates, in the idle class and woken by bubbles, with as many fused trials as ours and with
  fewer (`windows/baselines.py`).
- `…_naive`: the same beside naive co-location at niceness 19, and in a control group of the least weight. Both upset
  the forecasts, which cooperative gates and step grain need, so these are not among them.
- `…_yield`: runs with all defaults, beside a study that is searched and pruned; their reports' yield, and what the rest
  of the bubble time went to. `many_cooperative` is the same without preemption. The ghosts' speed is measured while the
  side task starts, which may make bubbles a little longer than they would be.

In blocks nothing is searched, and no trial ends: all do the same work. FILE is written after each run; if it was
stopped, the same command at the same commit and on the same machine continues. Each run says which share of the cores'
time was *stolen*: their host ran others. Ghosts show no delays that compound over ranks, and no CPU time of gloo's
(`benchmarks.ghost_twins`); real jobs are for `benchmarks.real_jobs`.
"""

import random
import signal
import sys

from benchmarks.shared.results import finish, parse, stopped_runs, write
from benchmarks.shared.stolen import Stolen
from benchmarks.utilization.figures import summary, table
from benchmarks.utilization.scenarios import LONG, measure, plan

NAME = "bubble_utilization"


def main() -> None:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    planned = _plan(options.only, quick=options.quick)
    runs = stopped_runs(options)
    for scenario, number in random.Random(0).sample(planned, len(planned)):
        if any((run["scenario"], run["run"]) == (scenario, number) for run in runs):
            continue
        watched = Stolen()
        measured = measure(scenario, quick=options.quick)
        print(scenario, summary([{"scenario": scenario, **measured}]), file=sys.stderr, flush=True)
        runs.append({"scenario": scenario, "run": number, "stolen": round(watched.share(), 5), **measured})
        if options.json:  # a run that is cut short keeps its results
            write(NAME, options, runs, summary(runs))
    finish(NAME, options, runs, summary(runs))
    print(table(summary(runs)))


def _plan(only: str | None, *, quick: bool) -> list[tuple[str, int]]:
    """(scenario, number of the run) of all that are to be measured."""
    planned = plan(quick=quick)
    names = [*dict.fromkeys(scenario for scenario, _ in planned)]
    if only not in (None, *names):
        raise SystemExit(f"--only {only}: no such scenario; allowed: {', '.join(names)}")
    return [each for each in planned if each[0] == only or (not only and (not quick or each[0].startswith(LONG)))]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leaves nothing running
    main()
