"""The side task of `benchmarks.real_jobs`: the example's study, with more trials than any job has bubbles for."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits import Digits


class ManyDigits(Digits):
    """Searched and pruned as the example's, and each trained for longer."""

    trials = 100_000
    epochs = 20
    rungs: tuple[int, ...] = (3, 7, 13)
