"""What a side task has trained so far, and the device's time for it: the side task's part of the waterfall."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ds_hooks.shared.statuses import Progress
from trials.gate.base import Gate
from trials.own_logger import own_logger
from trials.side_task.audits import Audits

LONG_EPOCH_S = 900.0
"""Of an epoch that takes longer the user hears, because checkpoints hold whole epochs."""

log = own_logger(__name__)


class Accounts:
    """The accounts of one side task, from when it is ready.

    Args:
        gate: whose time counts.
        audits: of which the time is no training.
        clock_s: the time.

    Attributes:
        work: trial-samples trained.
        epochs: summed over trials.
        ready_ns: the device's time that was used before.
    """

    def __init__(self, gate: Gate, audits: Audits, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._gate, self._audits, self._clock_s = gate, audits, clock_s
        self.ready_ns = gate.busy_ns()
        self.work = self.epochs = self._training_ns = 0
        self._samples = 0.0
        self._steps, self._long_s = 0, float("inf")
        self._is_told = False

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count the time of an epoch's steps as training, but for audits."""
        self._steps, self._long_s = 0, self._clock_s() + LONG_EPOCH_S
        began_ns, audited_ns = self._gate.busy_ns(), self._audits.spent_ns
        try:
            yield
        finally:
            self._training_ns += self._gate.busy_ns() - began_ns - (self._audits.spent_ns - audited_ns)

    def count(self, trial_samples: int, trials: int) -> None:
        """Count a step of a group of `trials`, also for the gate."""
        self._gate.add_work(trial_samples)
        self.work += trial_samples
        self._samples += trial_samples / trials
        self._steps += 1
        if not self._is_told and self._clock_s() >= self._long_s:
            self._is_told = True
            log.warning(
                "an epoch has taken %.0f minutes so far, for %d steps. Trials are saved only when it ends: to stop the "
                "side task earlier costs all of it. Let Study.batches return a part of the data, and raise `epochs`.",
                LONG_EPOCH_S / 60,
                self._steps,
            )

    def progress(self, trials_running: int, unsaved_epochs: int) -> Progress:
        """The accounts so far, for the daemon."""
        return Progress(
            work=self.work,
            trials_running=trials_running,
            epochs=self.epochs,
            samples=self._samples,
            training_ms=self._training_ns / 1e6,
            busy_ms=(self._gate.busy_ns() - self.ready_ns) / 1e6,
            unsaved_epochs=unsaved_epochs,
        )
