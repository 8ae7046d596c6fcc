"""`benchmarks.gpu.one_figure` whose figure `sigstop` hangs, in the driver and beside a side task at the gate.

Once it does, the file HANGING_FIGURE has the numbers of both processes.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import one_figure
from benchmarks.gpu.parts import Bench
from ds_hooks.shared.cuda_driver import DeviceWords
from ds_hooks.shared.page.layout import Field
from squeezer.calibration.limited import ended_when_asked


def hang(bench: Bench, windows: int | None) -> dict[str, Any]:
    """Wait for a word that nobody writes."""
    if os.environ["HEARS"] == "False":
        signal.signal(signal.SIGTERM, lambda *_: None)  # a blocked one would come to another thread
    stream = bench.driver.create_stream()
    words = DeviceWords(bench.driver, bench.page.words, probe=Field.PROBE)
    with bench.side("waiting") as side:
        bench.driver.wait_at_least(stream, words.address(Field.PROBE), 7)
        event = bench.driver.create_event()
        bench.driver.record(event, stream)
        Path(os.environ["HANGING_FIGURE"]).write_text(f"{os.getpid()} {side.process.pid}")
        while not bench.driver.is_done(event):
            time.sleep(0.01)
    return {}


if __name__ == "__main__":
    one_figure.FIGURES["sigstop"] = hang
    with ended_when_asked():
        one_figure.main()
