"""`squeezer.calibration --one` on the fake driver; its figure `slices` hangs, and hears no request to end."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.fake_calibration import SWITCH_S, fake_device
from squeezer.calibration import __main__ as calibration
from squeezer.calibration.figures import Figures, Row
from squeezer.calibration.limited import ended_when_asked
from squeezer.calibration.measured_device import MeasuredDevice


class Hanging(Figures):
    """The figures, beside a second process on the same driver."""

    def slices(self) -> Iterator[Row]:
        signal.signal(signal.SIGTERM, lambda *_: None)  # a blocked one would come to another thread
        with self._peer() as other:
            other.tell("hold", value=1)
            other.answer()
            yield {"pids": [os.getpid(), other.process.pid], "words": str(self._path)}
            while True:
                time.sleep(1)


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_S)
    MeasuredDevice.open = staticmethod(fake_device)  # type: ignore[method-assign]
    program: Any = calibration
    program.Figures = partial(Hanging, program="benchmarks.gpu.fake_calibration")
    with ended_when_asked():
        sys.exit(calibration.main())
