"""Sixteen trials at a time that train as long as there are bubbles; what it loads is soon there, unlike data sets."""

from tiny import Tiny


class Endless(Tiny):
    trials = 64  # 16 for each of up to four ranks
    fused = 16
    epochs = 1_000_000
    rungs = ()
