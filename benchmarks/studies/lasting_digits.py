"""A side task of `benchmarks.real_jobs`: the example's study with trials that last."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits import Digits


class LastingDigits(Digits):
    """Each trial is trained for some ten times as long as in `ManyDigits`."""

    trials = 100_000
    epochs = 200
    rungs = (30, 70, 130)
