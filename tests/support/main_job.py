"""A main job that a thread plays: it writes the page's words as the job's device would."""

import signal
import threading
import time
from itertools import chain, repeat

from ds_hooks.shared.page.file import Page
from ds_hooks.shared.page.layout import ClockKind, DeviceGate, Field
from ds_hooks.shared.page.plan import plan_steps

MS = 1_000_000


class MainJob:
    """Opens bubbles on the page, and signals the side task, which is the thread that made this."""

    def __init__(self, page: Page) -> None:
        self._words = page.words
        self._words[Field.CLOCK_KIND] = ClockKind.CUDA  # which a side task on a CPU does not look at
        self._side = threading.get_ident()
        self._epoch = page.words[Field.BUBBLE] >> 1
        self.bubbles: list[tuple[int, int]] = []
        self._thread: threading.Thread | None = None
        self._is_joined = threading.Event()

    def open(self, permit_ms: int) -> None:
        words = self._words
        self._epoch += 1
        words[Field.STEP], words[Field.SLOT] = self._epoch, 0
        words[Field.PERMIT_LENGTH_NS] = permit_ms * MS
        start_ns = time.monotonic_ns()
        words[Field.BUBBLE_START_NS] = words[Field.PLAN_BASE_NS] = start_ns
        words[Field.PERMIT_UNTIL_NS] = start_ns + permit_ms * MS
        self.bubbles.append((start_ns, 0))
        words[Field.BUBBLE] = self._epoch << 1 | 1
        words[Field.PERMIT_LEFT] = DeviceGate.ANY
        words[Field.DEVICE_GATE] = DeviceGate.open_for(permit_ms * MS)
        signal.pthread_kill(self._side, signal.SIGUSR1)

    def close(self) -> None:
        self._words[Field.DEVICE_GATE] = DeviceGate.CLOSED
        self._words[Field.BUBBLE] = self._epoch << 1
        self.bubbles[-1] = self.bubbles[-1][0], time.monotonic_ns()

    def due(self, permit_ms: int) -> None:
        self._words[Field.PERMITS] = permit_ms * 1000  # and no word about renewals
        plan_steps(self._words, self._epoch + 1, self._epoch + 2)

    def play(self, *bubbles: tuple[int, int, int]) -> None:
        """Begin bubbles of (ms before it, ms of permit, ms long), one after another, and return meanwhile.

        The last one comes again until `join`: on a busy machine, a side task may miss it.
        """
        self._is_joined.clear()

        def run() -> None:
            for number, (before_ms, permit_ms, length_ms) in enumerate(chain(bubbles, repeat(bubbles[-1]))):
                if number >= len(bubbles) and self._is_joined.is_set():
                    return
                self.due(permit_ms)
                time.sleep(before_ms / 1e3)
                self.open(permit_ms)
                time.sleep(length_ms / 1e3)
                self.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Let the bubbles end."""
        self._is_joined.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def strays(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """What began in no bubble, nor soon after one."""
        nexts = [begin for begin, _ in self.bubbles[1:]] + [2**63]
        first = self.bubbles[0][0]
        gaps = [(end, begin) for (_, end), begin in zip(self.bubbles, nexts, strict=True) if end]
        late = [(end + min(begin - end, 100 * MS) // 2, begin) for end, begin in gaps]
        return [span for span in spans if span[0] < first or any(a <= span[0] < b for a, b in late)]
