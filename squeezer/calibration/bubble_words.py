"""Figure `words`: what it costs the main job's device and host to mark a bubble's start and end, in several ways."""

import time
from collections.abc import Callable
from typing import Any

from squeezer.calibration.measured_device import MeasuredDevice, Word

BUBBLES = 16
"""In one measurement; all are queued before the first runs, so that the host's time does not count."""
_AT_START, _AT_END = 5, 2
"""Words that the clock writes."""
_KERNEL_NS = 20_000


class WaysToMark:
    """Small kernels with a bubble's marks between each two.

    nothing: the kernels alone. events: an event at each end, which every way has. one_word_each: one write at each end.
    batches: the clock's words, each end's by one call, on the compute stream. two_streams: the same words one by one,
    on a stream of their own that waits for the events.
    """

    def __init__(self, device: MeasuredDevice) -> None:
        self._device, self._driver = device, device.driver
        self._second = device.driver.create_stream()
        self._events = [device.driver.create_event() for _ in range(2 * BUBBLES)]
        self._word = device.address(Word.PROBE)
        self.ways: dict[str, Callable[[int], None]] = {
            "nothing": lambda i: None,
            "events": lambda i: self._on_compute_stream(i, 0, 0),
            "one_word_each": lambda i: self._on_compute_stream(i, 1, 1),
            "batches": lambda i: self._on_compute_stream(i, _AT_START, _AT_END),
            "two_streams": self._on_two_streams,
        }
        self._device_us: dict[str, list[float]] = {name: [] for name in self.ways}
        self._host_us: dict[str, list[float]] = {name: [] for name in self.ways}

    def measure(self, way: str) -> None:
        """Run the bubbles once."""
        device, mark, host_ns = self._device, self.ways[way], 0
        device.words[Word.READY] = 0
        device.wait_for(Word.READY, 1)
        first = device.kernels.stamp(device.stream)
        for i in range(BUBBLES):
            device.kernels.small(device.stream, _KERNEL_NS)
            before_ns = time.perf_counter_ns()
            mark(i)
            host_ns += time.perf_counter_ns() - before_ns
            device.kernels.small(device.stream, _KERNEL_NS)
        last = device.kernels.stamp(device.stream)
        device.words[Word.READY] = 1
        device.finish()
        device.finish(self._second)
        span_ns = device.kernels.times(last)[0] - device.kernels.times(first)[0]
        self._device_us[way].append(round(span_ns / BUBBLES / 1e3, 3))
        self._host_us[way].append(round(host_ns / BUBBLES / 1e3, 2))

    def row(self) -> dict[str, Any]:
        """The µs per bubble, of the device (the kernels included) and of the host, by way."""
        self._driver.destroy_stream(self._second)
        return {"device_us_per_bubble": self._device_us, "host_us_per_bubble": self._host_us, "bubbles": BUBBLES}

    def _values(self, many: int, value: int) -> list[tuple[int, int]]:
        return [(self._word + 8 * place, value) for place in range(many)]

    def _on_compute_stream(self, i: int, at_start: int, at_end: int) -> None:
        self._driver.record(self._events[2 * i], self._device.stream)
        if at_start:
            self._driver.write_words(self._device.stream, self._values(at_start, i))
        if at_end:
            self._driver.write_words(self._device.stream, self._values(at_end, i))
        self._driver.record(self._events[2 * i + 1], self._device.stream)

    def _on_two_streams(self, i: int) -> None:
        for event, words in ((self._events[2 * i], _AT_START), (self._events[2 * i + 1], _AT_END)):
            self._driver.record(event, self._device.stream)
            self._driver.wait_event(self._second, event)
            for value in self._values(words, i):
                self._driver.write_word(self._second, *value)
