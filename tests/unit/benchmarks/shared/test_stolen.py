"""The share of time that the host gave to others."""

from typing import Any

import psutil
import pytest

from benchmarks.shared.stolen import Stolen


def test_the_share_is_that_of_the_time_since_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    times = psutil.cpu_times()
    kind: Any = type(times)
    later = [0.0] * len(times)
    later[times._fields.index("user")], later[times._fields.index("idle")] = 6.0, 3.0
    later[times._fields.index("steal")], later[times._fields.index("guest")] = 1.0, 4.0
    given = [times, kind(*(a + b for a, b in zip(times, later, strict=True)))]
    monkeypatch.setattr(psutil, "cpu_times", lambda: given.pop(0))
    assert Stolen().share() == pytest.approx(0.1)


def test_this_machine_says_how_much() -> None:
    watched = Stolen()
    assert 0 <= watched.share() <= 1
