"""What a side task has trained so far, and the device's time for it: the side task's part of the waterfall."""

from collections.abc import Iterator
from contextlib import contextmanager

from ds_hooks.shared.statuses import Progress
from trials.gate.base import Gate
from trials.side_task.audits import Audits


class Accounts:
    """The accounts of one side task, from when it is ready.

    Args:
        gate: whose time counts.
        audits: of which the time is no training.

    Attributes:
        work: trial-samples trained.
        epochs: summed over trials.
        ready_ns: the device's time that was used before.
    """

    def __init__(self, gate: Gate, audits: Audits) -> None:
        self._gate, self._audits = gate, audits
        self.ready_ns = gate.busy_ns()
        self.work = self.epochs = self._training_ns = 0
        self._samples = 0.0
        self._began_ns: int | None = None  # the training in progress, on the clock of training alone

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count the time of an epoch's steps as training, but for audits."""
        self._began_ns = self._now_ns()
        try:
            yield
        finally:
            self._training_ns += self._now_ns() - self._began_ns
            self._began_ns = None

    def count(self, trial_samples: int, trials: int) -> None:
        """Count a step of a group of `trials`, also for the gate."""
        self._gate.add_work(trial_samples)
        self.work += trial_samples
        self._samples += trial_samples / trials

    def progress(self, trials_running: int, lost: int) -> Progress:
        """The accounts so far, for the daemon. Of the work, `lost` would be lost if the process died now."""
        training_ns = self._training_ns + (0 if self._began_ns is None else self._now_ns() - self._began_ns)
        return Progress(
            work=self.work,
            trials_running=trials_running,
            epochs=self.epochs,
            samples=self._samples,
            training_ms=training_ns / 1e6,
            busy_ms=(self._gate.busy_ns() - self.ready_ns) / 1e6,
            lost=lost,
        )

    def _now_ns(self) -> int:
        return self._gate.busy_ns() - self._audits.spent_ns
