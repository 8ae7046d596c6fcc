"""The side task's program on a device with streams, played by threads. The trials themselves compute on the host.

Each unit queues a kernel. At its end it says when they ran, in the file that `$STREAM_KERNELS` names.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trials.places
from benchmarks.gpu.fake_driver import FakeDriver
from ds_hooks.shared.page import Page
from trials import runner
from trials.ledger import HOST_UNIT
from trials.places import AnyGate, CorePlace
from trials.process import die_with_parent
from trials.stream_gate import StreamGate
from trials.study import Study
from trials.ungated import try_out
from trials.unit_records import UnitRecords

KERNEL_NS = 1_000_000


class BusyGate(StreamGate):
    """Each unit has some work for the device."""

    def enter(self, unit: int) -> None:
        super().enter(unit)
        if unit != HOST_UNIT:
            self.fake.launch(self._stream, KERNEL_NS)

    fake: FakeDriver


class StreamPlace(CorePlace):
    """The device."""

    def __init__(self) -> None:
        self.driver = FakeDriver()

    def gate(self, page: Page, records: UnitRecords, on_overrun: Callable[[int, int], None]) -> AnyGate:
        made = BusyGate(page, self.driver, self.driver.create_stream(), records, on_overrun=on_overrun)
        made.fake = self.driver
        die_with_parent(False)  # as CudaPlace
        return made

    def rehearse(self, study: Study, page: Page, gate: AnyGate) -> int:
        try_out(study, gate, 2)
        return study.fused


def main() -> int:
    """The real program, elsewhere."""
    made: list[StreamPlace] = []

    def make_place(kind: str, memory_fraction: float) -> StreamPlace:
        assert kind == "cuda"
        made.append(StreamPlace())  # not before: the gate's signals are blocked now, and its threads must not get them
        return made[0]

    places: Any = trials.places
    places.make_place = make_place
    status = runner.main()
    kernels = [(kernel.start_ns, kernel.end_ns) for kernel in made[0].driver.kernels]
    Path(os.environ["STREAM_KERNELS"]).write_text(json.dumps(kernels))
    made[0].driver.close()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
