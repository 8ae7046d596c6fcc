"""Student's t distribution. Standard library only, as what measures a bare machine needs it, too."""

import math


def t_quantile_975(degrees: int) -> float:
    """The 97.5% quantile of Student's t (Abramowitz & Stegun, 26.7.3 and 26.7.4, inverted by bisection)."""

    def two_sided(t: float) -> float:
        angle = math.atan2(t, math.sqrt(degrees))
        odd = degrees % 2
        term = math.cos(angle) if odd else 1.0
        total = 0.0
        for k in range(1 + odd, degrees, 2):
            total += term
            term *= math.cos(angle) ** 2 * k / (k + 1)
        return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total

    low, high = 0.0, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle) < 0.95 else (low, middle)
    return low
