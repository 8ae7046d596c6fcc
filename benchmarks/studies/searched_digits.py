"""The study of `benchmarks.study`: the example's, with promotion, a seed to choose, and 200 trials unless told."""

import os
import sys
from pathlib import Path
from typing import Any

import optuna

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits import Digits

SEED_VARIABLE, TRIALS_VARIABLE = "STUDY_SEED", "STUDY_TRIALS"


class SearchedDigits(Digits):
    """Trials of 27 epochs at most, by asynchronous successive halving."""

    trials = int(os.environ.get(TRIALS_VARIABLE, "200"))
    epochs = 27
    rungs: tuple[int, ...] = (1, 3, 9)
    search = "asha"

    def sampler(self) -> optuna.samplers.BaseSampler:
        """Optuna's default with a seed, so that runs differ."""
        return optuna.samplers.TPESampler(seed=int(os.environ.get(SEED_VARIABLE, "0")))

    def seed(self, params: dict[str, Any], number: int) -> int:
        """Return a seed that differs between runs, too."""
        return number + 1000 * int(os.environ.get(SEED_VARIABLE, "0"))
