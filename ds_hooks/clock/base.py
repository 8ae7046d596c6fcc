"""What a bubble clock is: it writes the words by which the others know when a bubble begins and ends.

The hooks call a clock around each wait. On a CPU the call itself is the moment. On CUDA the call only queues the wait,
so the clock lets the device write the words when it gets there, and knows the times later.
"""

from typing import Protocol


class BubbleClock(Protocol):
    """The clock of one page. No call blocks or waits for the device, but for `leave`.

    A *stamp* is a moment that the clock has noted; `time_ns` gives its time. All times are CLOCK_MONOTONIC in ns.
    """

    kind: int
    """Its `ClockKind`, which it writes on the page."""
    follows_host: bool
    """Whether the host's clock is true for the device, so that stamps are times.

    The device is then the host's own cores, and a signal halts what runs there.
    """
    epoch: int
    """The number of the last bubble. It continues the page's count, so no two bubbles of a page share one."""
    permit_ns: int
    """The permit of the bubble that was opened last; 0: it stays shut."""

    def open(self, step: int, slot: int, permit_ns: int, opens_before_ns: int = 0) -> int:
        """Begin a bubble: what the main job does next is wait.

        Args:
            step: of the bubble.
            slot: of the bubble.
            permit_ns: how long the side task may run in it; 0: the bubble is timed and stays shut.
            opens_before_ns: see `plan.plan_slot`.

        Returns:
            The stamp of its begin.

        Raises:
            DriverError: the device refuses.
        """

    def close(self) -> int:
        """End the bubble, and return the stamp of its end.

        Raises:
            DriverError: the device refuses.
        """

    def begin_step(self) -> int:
        """Note that a step begins, and return its stamp.

        Raises:
            DriverError: the device refuses.
        """

    def end_step(self, step: int) -> None:
        """Write what changes slowly, such as the main job's use of memory."""

    def stamp(self) -> int:
        """Note this moment.

        Raises:
            DriverError: the device refuses.
        """

    def time_ns(self, stamp: int) -> int | None:
        """Look up when that was; None: the device has not come there yet.

        Stamps must be asked for in the order in which they were made, each until its time is known, even
        after `leave`. Within a step times never go back; where a step begins, a device's may be set anew.
        """

    def side_cpu_ns(self) -> int:
        """The CPU time that the side task's processes have used so far; 0 without one, -1 where it means nothing.

        Its search worker, which needs no gate, does not count.
        """

    def main_cpu_ns(self) -> int:
        """The CPU time that this process has used so far; -1 where it means nothing."""

    def leave(self, *, wait: bool) -> bool:
        """Shut the bubble word and stop writing to the page, also in the middle of a bubble.

        Args:
            wait: give the device a second to finish. Without it, a device is not waited for at all.

        Returns:
            False if the device may still write to the page, as far as is known. Then the memory stays mapped, and the
            device itself shuts the word when it gets there.
        """
