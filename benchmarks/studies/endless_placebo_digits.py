"""The side task in the blocks of `bubble_utilization`: `placebo_digits`, whose trials never end and never report."""

from benchmarks.studies.placebo_digits import PlaceboDigits


class EndlessPlaceboDigits(PlaceboDigits):
    """As many fused trials as the baselines train, and no search, as they have none."""

    trials = 64
    epochs = 1_000_000
    rungs = ()
