"""The clocks of a CUDA device: the host runs ahead, so bubbles begin and end in the order of the device's stream.

Around each wait the clock records two events on the compute stream, and where the bubble has a permit also lets that
stream write the page's words, several by one call. So the word is shut before the main job's next kernel starts, and no
other stream, callback into Python or synchronization is needed, ever. Later, when a look finds the events done, they
give the wait's length.
"""

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from ds_hooks.notice import notice
from ds_hooks.shared.cuda_driver import PATIENCE_S, CudaDriver, DeviceWords, Driver, DriverError, comes, keep_mapped
from ds_hooks.shared.device_uuid import uuid_number, write_device_uuid
from ds_hooks.shared.page.file import Page
from ds_hooks.shared.page.layout import ClockKind, DeviceGate, Field
from ds_hooks.shared.page.memory_order import light_fence

WORD_MAX = 2**32 - 1
"""The largest value that a device writes: the low half of a word."""
STAMPS_AT_MOST = 1 << 16
"""Unread stamps; with more of them the device does not move."""
_OFFSETS_KEPT = 64
_MEMORY_EVERY_STEPS = 10
_NAP_S = 2e-4


class CudaClock:
    """Lets the device write the bubble word when it comes to the wait. See `BubbleClock`. Stamps are events.

    Args:
        page: the device's page.
        driver: the device.
        compute_stream: gives the stream on which the main job computes now.
        clock_ns: the host's clock.

    Raises:
        DriverError: the device cannot write the page's words.
    """

    kind: int = ClockKind.CUDA
    follows_host = False

    def __init__(
        self, page: Page, driver: Driver, compute_stream: Callable[[], int], clock_ns: Callable[[], int]
    ) -> None:
        self._words, self._driver = page.words, driver
        self._compute_stream, self._clock_ns = compute_stream, clock_ns
        self.epoch = page.words[Field.BUBBLE] >> 1
        self.permit_ns = 0
        self._free: list[int] = []
        self._unread = 0
        self._step_begins: deque[int] = deque()
        self._step_stream: int | None = None  # on which the step began
        self._last = 0
        self._newest = 0
        self._device_ns = 0  # time of `_last`, in device time since the first event
        self._least_ns: int | None = None
        self._offsets_ns: deque[int] = deque(maxlen=_OFFSETS_KEPT)
        self._offset_ns = 0
        self._start_writing()
        page.words[Field.DEVICE_GATE] = DeviceGate.CLOSED
        page.words[Field.CLOCK_KIND] = self.kind

    def open(self, step: int, slot: int, permit_ns: int, opens_before_ns: int = 0) -> int:
        """See `BubbleClock`. What is queued next is a wait.

        With `opens_before_ns` the bubble stays shut, since the host cannot know yet when the one before it has ended;
        and on another stream than the step began on, since that one may compute meanwhile.
        """
        self.epoch += 1
        stream = self._compute_stream()
        stays_shut = opens_before_ns or self._step_stream not in (None, stream)
        self.permit_ns, permit_ns = 0, 0 if stays_shut else min(permit_ns, WORD_MAX)
        begin = self._stamp_on(stream)
        if permit_ns:
            self._queue_writes(
                stream,
                (Field.STEP, step),
                (Field.SLOT, slot),
                (Field.PERMIT_LENGTH_NS, permit_ns),
                (Field.BUBBLE, self.epoch << 1 | 1),
                (Field.PERMIT_LEFT, DeviceGate.ANY),  # the side task's host may hang in a call that waits for the gate
                (Field.DEVICE_GATE, DeviceGate.open_for(permit_ns)),
            )
            self.permit_ns = permit_ns
        return begin

    def close(self) -> int:
        """See `BubbleClock`. The wait is queued now."""
        stream = self._compute_stream()
        if self.permit_ns:
            self._queue_writes(stream, (Field.DEVICE_GATE, DeviceGate.CLOSED), (Field.BUBBLE, self.epoch << 1))
            self.permit_ns = 0
        return self._stamp_on(stream)

    def begin_step(self) -> int:
        """See `BubbleClock`. Here the times may be set by the host's clock again."""
        stream = self._step_stream = self._compute_stream()
        begin = self._stamp_on(stream)
        self._step_begins.append(begin)
        return begin

    def stamp(self) -> int:
        """See `BubbleClock`. Marks this place of the compute stream.

        Raises:
            DriverError: the device refuses, or the last 65 536 stamps are unread.
        """
        return self._stamp_on(self._compute_stream())

    def _stamp_on(self, stream: int) -> int:
        if self._unread >= STAMPS_AT_MOST:
            raise DriverError(f"the device is {self._unread} stamps behind the host")
        self._unread += 1
        event = self._newest = self._free.pop() if self._free else self._driver.create_event()
        self._driver.record(event, stream)
        return event

    def time_ns(self, stamp: int) -> int | None:
        """See `BubbleClock`.

        Differences are the device's own. All times are late by a constant: the least delay of the latest looks.
        """
        if not self._driver.is_done(stamp):
            return None
        if self._last:
            self._device_ns += self._driver.elapsed_ns(self._last, stamp)
            self._free.append(self._last)
        self._last = stamp
        self._unread -= 1
        offset_ns = self._clock_ns() - self._device_ns
        self._least_ns = offset_ns if self._least_ns is None else min(self._least_ns, offset_ns)
        if not self._offsets_ns:
            self._set_clock()
        if self._step_begins and self._step_begins[0] == stamp:
            self._step_begins.popleft()
            self._set_clock()
        return self._device_ns + self._offset_ns

    def end_step(self, step: int) -> None:
        """See `BubbleClock`. Every 10 steps, write how much memory the main job has needed, and how much is free."""
        if step % _MEMORY_EVERY_STEPS == 1:
            cuda = sys.modules["torch"].cuda
            self._words[Field.MAIN_PEAK_BYTES] = cuda.max_memory_reserved()
            self._words[Field.FREE_BYTES] = cuda.mem_get_info()[0]

    def _set_clock(self) -> None:
        """Follow the host's clock. Never within a bubble, whose length would change."""
        if self._least_ns is not None:
            self._offsets_ns.append(self._least_ns)
            self._offset_ns = min(self._offsets_ns)
            self._least_ns = None

    def side_cpu_ns(self) -> int:
        """See `BubbleClock`. CPU time means nothing here."""
        return -1

    def main_cpu_ns(self) -> int:
        """See `BubbleClock`. CPU time means nothing here."""
        return -1

    def leave(self, *, wait: bool) -> bool:
        """See `BubbleClock`."""
        self._words[Field.CLOCK_KIND] = ClockKind.CPU
        try:
            if self.permit_ns:
                self.close()  # a fault came between the two: nothing else would shut the gate
            newest = self._newest
            if wait and (not newest or comes(self._driver, newest)) and self._stop_writing():
                self._words[Field.BUBBLE] &= ~1
                return True
        except DriverError:
            # the device may open the gate yet, but no side task goes by it: by its kind, this clock has left
            self._words[Field.DEVICE_GATE] = DeviceGate.CLOSED
            self._words[Field.BUBBLE] &= ~1
        keep_mapped(self._words)
        return False

    # What the polled clock does differently

    def _start_writing(self) -> None:
        self._device_words = DeviceWords(self._driver, self._words, probe=Field.PROBE)

    def _queue_writes(self, stream: int, *values: tuple[int, int]) -> None:
        """Let the device write words, in this order, when it has come to this place of the stream."""
        self._device_words.write(stream, *((field, value & WORD_MAX) for field, value in values))

    def _stop_writing(self) -> bool:
        self._device_words.release()
        return True


class PolledCudaClock(CudaClock):
    """The same where the device cannot write words: a thread polls the events and writes a little late.

    Each look costs the main job's interpreter a moment. The thread looks only from a planned bubble's issue to its end.
    """

    kind = ClockKind.CUDA_POLLED

    def _start_writing(self) -> None:
        self._work: queue.SimpleQueue[tuple[int, tuple[tuple[int, int], ...]] | None] = queue.SimpleQueue()
        self._looked_at: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._own_words = memoryview(self._words)  # the page may be closed while the thread still needs it
        self._fault: DriverError | None = None
        self._thread = threading.Thread(target=self._look, name="bubble clock", daemon=True)
        self._thread.start()

    def _queue_writes(self, stream: int, *values: tuple[int, int]) -> None:
        if self._fault is not None:
            raise self._fault
        # an event of the thread's own, since the other one may be read and recorded again before the thread looks
        try:
            own = self._looked_at.get_nowait()
        except queue.Empty:
            own = self._driver.create_event()
        self._driver.record(own, stream)
        self._work.put((own, values))

    def _stop_writing(self) -> bool:
        self._work.put(None)
        self._thread.join(PATIENCE_S)
        return not self._thread.is_alive()

    def _look(self) -> None:
        words = self._own_words
        try:
            self._driver.adopt_thread()
            self._driver.spare_recordings()  # the host runs ahead, and may record a graph in its next forward
            self._serve(words)
        except DriverError as error:
            self._fault = error
            words[Field.DEVICE_GATE] = DeviceGate.CLOSED
            words[Field.BUBBLE] &= ~1

    def _serve(self, words: "memoryview[int]") -> None:
        while (work := self._work.get()) is not None:
            event, values = work
            while not self._driver.is_done(event):
                time.sleep(_NAP_S)
            for field, value in values:
                light_fence()
                words[field] = value
            self._looked_at.put(event)


def cuda_clock(page: Page, clock_ns: Callable[[], int]) -> CudaClock:
    """Make the best clock that this process's CUDA device and the page's memory allow.

    Raises:
        DriverError: the device has not even events.
    """
    cuda = sys.modules["torch"].cuda
    driver = CudaDriver()
    uuid = getattr(cuda.get_device_properties(cuda.current_device()), "uuid", None)
    write_device_uuid(page.words, uuid_number(uuid))

    def compute_stream() -> int:
        return int(cuda.current_stream().cuda_stream)

    try:
        return CudaClock(page, driver, compute_stream, clock_ns)
    except DriverError as error:
        notice(f"a polling thread opens bubbles, a little late: {error}")
        return PolledCudaClock(page, driver, compute_stream, clock_ns)
