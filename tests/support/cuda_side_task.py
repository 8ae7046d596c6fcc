"""The side task's program on a CUDA device that threads play. The trials themselves compute on the host.

Each unit queues a kernel. At its end it says when they ran, in the file that `$STREAM_KERNELS` names. As on a device,
the host learns later which trials are lost. With `$UNKIND_DRIVER` all streams share a short queue, and the first launch
of each kernel waits for the device, and so for the gate; each unit of each group has a kernel of its own.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.fake_driver import FakeDriver
from ds_hooks.shared.page.file import Page
from ds_hooks.shared.processes.parent import die_with_parent
from trials.gate.base import HOST_UNIT, Gate
from trials.gate.cuda import CudaGate
from trials.gate.unit_records import UnitRecords
from trials.optim import block
from trials.side_task import devices
from trials.side_task import main as side_task
from trials.side_task.devices import CpuSideDevice
from trials.study import Study
from trials.training import group_state
from trials.training.most_fused import Known, MostFused
from trials.training.rehearsal import try_out

KERNEL_NS = 1_000_000
UNKIND: dict[str, Any] = {"connections": 1, "depth": 16, "loads_lazily": True}


class BusyGate(CudaGate):
    """Each unit has some work for the device."""

    def enter(self, unit: int) -> None:
        super().enter(unit)
        if unit != HOST_UNIT:
            self.fake.launch(self.stream, KERNEL_NS, f"unit {unit} of units {self._group}")

    fake: FakeDriver
    stream: int


class FakeCudaSideDevice(CpuSideDevice):
    """The device."""

    def __init__(self, queue_depth: int) -> None:
        self.driver = FakeDriver(**(UNKIND if "UNKIND_DRIVER" in os.environ else {}))
        self._queue_depth = queue_depth

    def gate(self, page: Page, records: UnitRecords, on_overrun: Callable[[int, int], None]) -> Gate:
        stream = self.driver.create_stream()
        made = BusyGate(page, self.driver, stream, records, on_overrun=on_overrun)
        made.limit_queue(self._queue_depth)
        made.fake, made.stream = self.driver, stream
        die_with_parent(wanted=False)  # as CudaSideDevice
        return made

    def rehearse(self, study: Study, page: Page | None, gate: Gate, known: Known | None = None) -> MostFused:
        try_out(study, gate, 2)
        return MostFused(study.rows)


def main() -> int:
    """The real program, elsewhere."""
    made: list[FakeCudaSideDevice] = []

    def make_side_device(kind: str, memory_fraction: float, queue_depth: int) -> FakeCudaSideDevice:
        assert kind == "cuda"
        made.append(
            FakeCudaSideDevice(queue_depth)
        )  # not before: the gate's signals are blocked now, and its threads must not get them
        return made[0]

    program: Any = devices
    program.make_side_device = make_side_device
    trained: Any = group_state
    trained.decides_on_device = lambda device: True
    stepped: Any = block
    stepped.SinglePass = type(None)  # such kernels are a CPU's
    status = side_task.main()
    kernels = [(kernel.start_ns, kernel.end_ns) for kernel in made[0].driver.kernels]
    Path(os.environ["STREAM_KERNELS"]).write_text(json.dumps(kernels))
    made[0].driver.close()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
