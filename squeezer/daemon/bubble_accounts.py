"""Counts where bubble time goes, over the whole run: details of which only the latest are kept would not do.

Each bubble is counted once, by the first of these that holds: there is no side task, it is starting, the step is left
alone or the guard has the gate shut, the slot was not opened. The rest was opened; there the main job has measured what
the side task used, and what it used itself. What the side task's part was for, the side task reports.
"""

from dataclasses import asdict, dataclass
from enum import Enum

from ds_hooks.shared.statuses import Progress
from squeezer.records.facts import Bubble

NOTHING = Progress(0, 0, 0, 0.0, 0.0, 0.0, 0)
"""What a process has reported before it reports."""


class Shut(Enum):
    """Why a step's bubbles are not for trials."""

    ENDED = "ended"
    STARTING = "starting"
    ALONE = "alone"
    GUARD = "guard"


@dataclass(slots=True)
class BubbleAccounts:
    """Sums since the last record.

    Attributes:
        bubble_ns: all bubbles.
        ended_ns: of that, without a side task: its study is done, it was given up or never started, or the device
            has no room for it.
        starting_ns: while it starts.
        alone_ns: in steps that are left alone, to learn and to compare.
        guard_ns: in steps in which the guard has the gate shut.
        unopened_ns: in slots that were not opened: too short, or of a kind that is not to be. Without what the side
            task used of it, if it runs on in idle time.
        unmeasured_ns: opened, on a device of which the main job's host does not see what the side task uses.
        search_ns: opened and not used, while no trial was there to train.
        unused_ns: opened and not used otherwise: resuming, and tails into which no unit fits.
        main_ns: opened, and used by the main job itself, such as for copying what it has received.
        side_ns: used by the side task.
        overrun_ns: used after opened bubbles.
        work: trial-samples trained.
        lost_work: of that, lost with a process that died or was ended.
        samples: see `Progress`.
        training_ms: see `Progress`.
        busy_ms: see `Progress`.
        lost_ms: device time of which no process has reported before it died.
    """

    bubble_ns: int = 0
    ended_ns: int = 0
    starting_ns: int = 0
    alone_ns: int = 0
    guard_ns: int = 0
    unopened_ns: int = 0
    unmeasured_ns: int = 0
    search_ns: int = 0
    unused_ns: int = 0
    main_ns: int = 0
    side_ns: int = 0
    overrun_ns: int = 0
    work: float = 0.0
    lost_work: float = 0.0
    samples: float = 0.0
    training_ms: float = 0.0
    busy_ms: float = 0.0
    lost_ms: float = 0.0


class BubbleCounter:
    """Fills the accounts of one device.

    Attributes:
        sums: since the last `take`.
    """

    def __init__(self) -> None:
        self.sums = BubbleAccounts()
        self._last = NOTHING
        self._unreported_ns = 0  # used since the last report
        self._ready_ns = self._ready_busy_ns = 0

    def bubble(self, bubble: Bubble, shut: Shut | None, busy_until_ns: int) -> None:
        """Count a bubble that is over, its overrun included.

        Args:
            bubble: the record of it.
            shut: why its step's bubbles are not for trials; None: they are.
            busy_until_ns: all that the side task had used at its end, where the main job measures that.
        """
        sums, length_ns = self.sums, bubble.end_ns - bubble.start_ns
        sums.bubble_ns += length_ns
        side_ns = bubble.side_ns
        if shut is Shut.STARTING and 0 < self._ready_ns < bubble.end_ns:
            shut = None  # it has become ready since the step began
        if shut is None and bubble.start_ns < self._ready_ns:  # messages may come later than the word that it is ready
            starting_ns = min(self._ready_ns - bubble.start_ns, length_ns)
            sums.starting_ns += starting_ns
            length_ns -= starting_ns
            if side_ns is not None:
                side_ns = min(side_ns, max(0, busy_until_ns - self._ready_busy_ns))
        if shut is not None:
            name = f"{shut.value}_ns"
            setattr(sums, name, getattr(sums, name) + length_ns)
            return
        overrun_ns = bubble.overrun_ns or 0
        sums.overrun_ns += overrun_ns
        used_ns = min(side_ns or 0, length_ns)
        if side_ns is not None:
            sums.side_ns += used_ns
            self._unreported_ns += used_ns + overrun_ns
        if bubble.permit_until_ns is None:
            sums.unopened_ns += length_ns - used_ns
        elif side_ns is None:
            sums.unmeasured_ns += length_ns
        else:
            main_ns = min(bubble.main_ns or 0, length_ns - used_ns)
            sums.main_ns += main_ns
            left_ns = length_ns - used_ns - main_ns
            if self._last.trials_running:
                sums.unused_ns += left_ns
            else:
                sums.search_ns += left_ns

    def overran(self, overrun_ns: int) -> None:
        """Count an overrun that only the side task can measure."""
        self.sums.overrun_ns += overrun_ns

    def ready(self, t_ns: int, busy_ms: float) -> None:
        """The side task asks its gate from now on, and has used `busy_ms` before."""
        self._ready_ns, self._ready_busy_ns = t_ns, round(busy_ms * 1e6)

    def progress(self, now: Progress) -> None:
        """Count what the side task has done since its last report."""
        sums, last = self.sums, self._last
        sums.work += now.work - last.work
        sums.samples += now.samples - last.samples
        sums.training_ms += now.training_ms - last.training_ms
        sums.busy_ms += now.busy_ms - last.busy_ms
        self._last, self._unreported_ns = now, 0

    def side_ended(self) -> None:
        """The process is gone, and with it what it has not saved."""
        self.sums.lost_work += self._last.lost
        self.sums.lost_ms += self._unreported_ns / 1e6
        self._last, self._unreported_ns, self._ready_ns = NOTHING, 0, 0

    def take(self) -> dict[str, int | float]:
        """Return the sums, and begin anew."""
        sums, self.sums = self.sums, BubbleAccounts()
        return {name: round(value, 3) for name, value in asdict(sums).items()}
