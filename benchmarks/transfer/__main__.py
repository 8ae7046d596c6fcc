"""Whether the best hyperparameters of surrogates are their targets': python -m benchmarks.transfer --json FILE.

With `--only EXPERIMENT` it runs one of `EXPERIMENTS`, and keeps the others that FILE holds, so that it can be run in
pieces. The summary is of all that FILE holds.
"""

import sys

from benchmarks.common import finish, kept_runs, parse
from benchmarks.transfer.experiments import EXPERIMENTS, timed
from benchmarks.transfer.figures import summary


def main() -> None:
    """Run one experiment or all."""
    options = parse("transfer", __doc__ or "")
    if options.only and options.only not in EXPERIMENTS:
        sys.exit(f"--only {options.only}: no such experiment; allowed: {', '.join(EXPERIMENTS)}")
    runs = kept_runs(options)
    for name in [options.only] if options.only else EXPERIMENTS:
        made = timed(lambda name=name: EXPERIMENTS[name](options.quick))  # type: ignore[misc]
        runs += [{"scenario": name, **run} for run in made]
        print(f"{name}: {made[0]['experiment_s']:.0f} s", file=sys.stderr)
    finish("transfer", options, runs, summary(runs))


if __name__ == "__main__":
    main()
