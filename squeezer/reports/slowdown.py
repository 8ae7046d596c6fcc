"""The printed slowdown: two step times and their ratio, which always agree, and what the interval shows, in words."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

DIGITS = 4
"""Decimals of the printed ratio: its unit is 0.01%."""
WIDEST = 0.1
"""An interval that includes 0 and is wider than ± this says nothing, not even that no slowdown was detected."""


class Printed(NamedTuple):
    """Rounded figures of one report's `main`. `slowdown` has the sign of `squeezed_ms` − `alone_ms`."""

    alone_ms: str
    squeezed_ms: str
    slowdown: str


def printed(main: Mapping[str, Any]) -> Printed:
    """Round `main`'s figures so that the sign of the slowdown is that of the two times' difference.

    Args:
        main: `main` of a report, or of one of its ranks. An unknown figure becomes "n/a".
    """
    alone_ms, squeezed_ms, slowdown = (main[key] for key in ("step_ms_alone", "step_ms_squeezed", "slowdown"))
    if slowdown is None:
        return Printed(_ms(alone_ms), _ms(squeezed_ms), "n/a")
    # enough decimals that one unit of the ratio shows in the times
    decimals = max(2, math.ceil(DIGITS - math.log10(alone_ms)))
    shown_ms, shown = round(alone_ms, decimals), round(slowdown, DIGITS)
    return Printed(_ms(shown_ms, decimals), _ms(shown_ms * (1 + shown), decimals), percent(shown))


def verdict(main: Mapping[str, Any]) -> str:
    """One line: the slowdown with its 95% interval, and what that shows.

    Args:
        main: as for `printed`.
    """
    slowdown, interval = printed(main).slowdown, main["slowdown_ci95"]
    if main["slowdown"] is None:
        return "slowdown n/a: no block of steps left alone between squeezed ones"
    if interval is None:
        return f"slowdown {slowdown}, too few comparisons for an interval"
    low, high = interval
    figures = f"{slowdown}, 95% CI {percent(low)} to {percent(high)}, n = {main['slowdown_pairs']}"
    if low > 0:
        return f"slowdown {figures}"
    if high < 0:
        return f"no slowdown: {figures}"
    if is_too_wide(main):
        return f"slowdown unknown, steps vary too much to tell: {figures}"
    return f"no slowdown detected (±{100 * (high - low) / 2:.2f}%): {figures}"


def is_too_wide(main: Mapping[str, Any]) -> bool:
    """Whether the interval is too wide to tell anything."""
    low, high = main["slowdown_ci95"]
    return bool(low <= 0 <= high and high - low > 2 * WIDEST)


def percent(ratio: float) -> str:
    """With its sign and two decimals; a zero has a plus."""
    return f"{100 * round(ratio, DIGITS) + 0.0:+.2f}%"


def _ms(value: float | None, decimals: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{decimals}f}"
