"""The example's study, whose trials never end and never report: what several benchmarks and the baselines train."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits import Digits


class EndlessDigits(Digits):
    """16 fused trials that train as long as there are bubbles."""

    trials = 64  # 16 for each of up to four ranks
    epochs = 1_000_000
    rungs = ()
