"""What contexts of the fake driver share: they take turns on the device, or overlap as clients of an MPS server."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SLICE_NS = 2_000_000


@dataclass(slots=True, eq=False)
class _Work:
    """What a context has for the device now."""

    context: int
    priority: int
    computes: bool
    has_begun: bool = False


class FakeDevice:
    """One device for contexts of this process.

    Without MPS one context has the device, for a slice of time if others have work, too. A kernel that spins is work; a
    stream that waits for a word is none. With MPS all run at once, but no kernel that computes begins while one of a
    client of higher priority does.

    Args:
        slice_ns: how long a context keeps the device while another one has work.
        mps: whether the contexts are clients of an MPS server.
    """

    def __init__(self, slice_ns: int = SLICE_NS, *, mps: bool = False) -> None:
        self._slice_ns, self._mps = slice_ns, mps
        self._lock = threading.Lock()
        self._work: set[_Work] = set()
        self._holder = 0
        self._until_ns = 0

    @contextmanager
    def work(self, context: int, priority: int, *, computes: bool) -> Iterator[Callable[[], bool]]:
        """While entered, `context` has work. Yields a function: whether that runs now.

        Args:
            context: a number of its own.
            priority: of the MPS client; 0 is the highest.
            computes: it fills the device, unlike a word, a mark, or a kernel that spins.
        """
        own = _Work(context, priority, computes)
        with self._lock:
            self._work.add(own)
        try:
            yield lambda: self._runs(own)
        finally:
            with self._lock:
                self._work.discard(own)

    def _runs(self, own: _Work) -> bool:
        with self._lock:
            if self._mps:
                own.has_begun = own.has_begun or not (own.computes and self._has_better(own))
                return own.has_begun
            now_ns = time.monotonic_ns()
            is_free = all(each.context != self._holder for each in self._work)
            if own.context != self._holder and (is_free or now_ns >= self._until_ns):
                self._holder, self._until_ns = own.context, now_ns + self._slice_ns
            return own.context == self._holder

    def _has_better(self, own: _Work) -> bool:
        return any(each.computes and each.has_begun and each.priority < own.priority for each in self._work)
