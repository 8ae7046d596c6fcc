"""Whether the best hyperparameters of surrogates are their targets': python -m benchmarks.transfer --json FILE.

FILE is written after each of `EXPERIMENTS`. If it was stopped, the same command at the same commit runs those that
FILE lacks. With `--only EXPERIMENT` it runs one, anew, and keeps the others that FILE holds. The summary is of all
that FILE holds.
"""

import argparse
import sys
from typing import Any

from benchmarks.shared.results import finish, parse, stopped_runs, write
from benchmarks.transfer.experiments import EXPERIMENTS, timed
from benchmarks.transfer.figures import summary


def main() -> None:
    """Run one experiment, or all that are missing."""
    options = parse("transfer", __doc__ or "")
    if options.only and options.only not in EXPERIMENTS:
        sys.exit(f"--only {options.only}: no such experiment; allowed: {', '.join(EXPERIMENTS)}")
    runs = _runs_before(options)
    have = {run["scenario"] for run in runs}
    if have and not options.only:
        print(f"{options.json} holds {', '.join(n for n in EXPERIMENTS if n in have)}: kept", file=sys.stderr)
    for name in [options.only] if options.only else [name for name in EXPERIMENTS if name not in have]:
        made = timed(lambda name=name: EXPERIMENTS[name](options.quick))  # type: ignore[misc]
        runs += [{"scenario": name, **run} for run in made]
        print(f"{name}: {made[0]['experiment_s']:.0f} s", file=sys.stderr)
        if options.json:
            write("transfer", options, runs, summary(runs))
    finish("transfer", options, runs, summary(runs))


def _runs_before(options: argparse.Namespace) -> list[dict[str, Any]]:
    """See `stopped_runs`; but what is whole is measured anew."""
    runs = stopped_runs(options)
    is_whole = {run["scenario"] for run in runs} >= set(EXPERIMENTS)
    return [] if is_whole and not options.only else runs


if __name__ == "__main__":
    main()
