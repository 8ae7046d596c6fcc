"""A limit that strikes a program as soon as it hangs, so that no test waits for it."""

from collections.abc import Callable

import pytest

from squeezer.calibration import limited
from tests.support.sandbox import wait_for

LIMIT_S = 1000.0
"""What `run_limited` is told; longer than a test may take."""
_STRIKES_AFTER_S = 0.1


def strike_the_first(monkeypatch: pytest.MonkeyPatch, hangs: Callable[[], object], grace_s: float = 0.5) -> None:
    """Let `LIMIT_S` be over for the first program once it hangs, and `GRACE_S` be `grace_s`."""
    has_ended = limited._has_ended
    struck = False

    def ends_soon(pidfd: int, within_s: float) -> bool:
        nonlocal struck
        if within_s == LIMIT_S and not struck:
            wait_for(lambda: hangs() or has_ended(pidfd, 0.0), "the program that hangs")
            struck, within_s = True, _STRIKES_AFTER_S
        return has_ended(pidfd, within_s)

    monkeypatch.setattr(limited, "_has_ended", ends_soon)
    monkeypatch.setattr(limited, "GRACE_S", grace_s)
