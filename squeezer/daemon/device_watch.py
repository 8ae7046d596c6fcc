"""Looks at the device's own meters once a second: for the records, and so that memory is left for the main job.

A look is made while nothing else is to be done, and never takes more than a hundredth of this process's time.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict

from squeezer.daemon.memory_limit import LowMemory, MemoryLimit
from squeezer.device import Device
from squeezer.device.nvml import Look, Meters
from squeezer.policy.events import Event, SideBarred
from squeezer.records.writer import Recorder

EVERY_NS = 1_000_000_000
LOOKING_SHARE = 0.01
"""A driver that is slow to answer is asked less often."""

log = logging.getLogger(__name__)


class DeviceWatch:
    """Of one device, as long as a main job lives. Where there are no meters it does nothing.

    Args:
        device: has the meters.
        words: the page's.
        reserve_bytes: how much memory is to stay free for the main job at least.
        memory_limit: is set by the free memory that is measured here.
        has_side: whether a side task is to run at all.
        has_job: whether a main job's process lives.
        recorder: takes the records.
        feed: takes events for the policy.
        fault: takes a sentence about whatever is wrong.
        clock_ns: the host's clock.
    """

    def __init__(  # noqa: PLR0913 - by name, one for each part of the daemon
        self,
        *,
        device: Device,
        words: "memoryview[int]",
        reserve_bytes: int,
        memory_limit: MemoryLimit,
        has_side: bool,
        has_job: Callable[[], bool],
        recorder: Recorder,
        feed: Callable[[Event], None],
        fault: Callable[[str], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._device, self._words = device, words
        self._memory_limit = memory_limit
        self._reserve_bytes = reserve_bytes
        self._low = LowMemory(words, reserve_bytes)
        self._has_side, self._has_job = has_side, has_job
        self._recorder, self._feed, self._fault = recorder, feed, fault
        self._clock_ns = clock_ns
        self._meters: Meters | None = None
        self._next_ns = 0
        self._mode_bars = ""
        self._said = ""
        self._lost = ""

    def job_attached(self) -> None:
        """A main job has said hello, so its device is known. Whatever bars a side task is said before one starts."""
        meters = self._device.meters()
        if meters is not self._meters:
            self._meters = meters
            self._low = LowMemory(self._words, self._reserve_bytes)  # what was free on another device
            if meters is not None:
                meters.watch_errors()
        self._mode_bars = self._device.bars_side_task()
        self._say()

    def left_s(self) -> float | None:
        """How long until the next look; None: there will be none."""
        if self._meters is None or not self._has_job():
            return None
        return max(0, self._next_ns - self._clock_ns()) / 1e9

    def look_if_due(self) -> None:
        """Look, if it is time."""
        if self._meters is None or self.left_s() != 0.0:
            return
        begin_ns = self._clock_ns()
        look = self._meters.look()
        self._mode_bars = self._device.bars_side_task()
        self._next_ns = begin_ns + max(EVERY_NS, int((self._clock_ns() - begin_ns) / LOOKING_SHARE))
        if look != Look():
            self._recorder.add("device", t_ns=begin_ns, **asdict(look))
        if look.free_bytes is not None:
            self._memory_limit.measured(look.free_bytes)
            self._low.look(look.free_bytes)
        self._say()
        self._say_errors(look, self._meters.lost)

    def _say(self) -> None:
        """Tell the policy if the device has room for a side task, whenever that changes."""
        reason = self._mode_bars or self._low.reason
        if reason == self._said or not self._has_side:
            return
        if reason:
            log.warning("no side task runs beside the main job: %s", reason)
        else:
            log.info("a side task may run again beside the main job")
        event = "barred" if reason else "let_in"
        self._recorder.add("side", t_ns=self._clock_ns(), event=event, **({"reason": reason} if reason else {}))
        self._said = reason
        self._feed(SideBarred(reason))

    def _say_errors(self, look: Look, lost: str) -> None:
        if look.xid is not None:
            self._fault(f"the driver has reported error {look.xid} (Xid) of the device; the kernel's log says more")
            log.warning("the driver has reported error %d (Xid) of the device", look.xid)
        if lost and not self._lost:
            self._fault(f"the device has no meters any more: {lost}")
        self._lost = lost
