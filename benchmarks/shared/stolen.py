"""How much of a measurement's time the machine's host has given to others."""

import psutil


class Stolen:
    """Watches from now on."""

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def share(self) -> float:
        """The share of all cores' time so far in which they were ready to run, and the host ran others (*steal*)."""
        now = psutil.cpu_times()
        spent_s = sum(now[:8]) - sum(self._before[:8])  # guests' time, which follows, is part of the others
        return float((now.steal - self._before.steal) / spent_s) if spent_s > 0 else 0.0
