"""Where a side task computes: on the rank's cores, or on its CUDA device. Only this and what it uses knows which."""

import ctypes
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ds_hooks.shared.device_uuid import uuid_number
from ds_hooks.shared.driver import CudaDriver, DriverError
from ds_hooks.shared.page import Field
from ds_hooks.shared.page_file import Page
from ds_hooks.shared.statuses import Status
from trials.gate.base import Gate
from trials.gate.cpu import CpuGate
from trials.gate.cuda import CudaGate
from trials.gate.process import die_with_parent, wake_promptly
from trials.gate.unit_records import UnitRecords
from trials.side_task.fit import most_trials
from trials.side_task.offload import CudaMeter, Offload, tensors_on
from trials.study import Study
from trials.training.batches import Pinned
from trials.training.rehearsal import rehearse, try_out

CONTEXT_BYTES = 600 << 20
"""What a context takes besides what is allocated in it; it counts as the side task's."""

_BLOCKING_SYNC = 4

log = logging.getLogger(__name__)


class SideDeviceError(Exception):
    """A side task cannot compute here, now or ever; the text says why."""


class SideDevice(Protocol):
    """Made once per process, before any tensor."""

    def adopt(self, study: Study) -> None:
        """Have `study` work here; it need not know."""

    def gate(self, page: Page, records: UnitRecords, on_overrun: Callable[[int, int], None]) -> Gate:
        """The gate of this device."""

    def rehearse(self, study: Study, page: Page, gate: Gate) -> int:
        """Train throw-away trials: what is imported, compiled or wrong shows. Returns how many trials fit at most."""

    def offload(self, page: Page, gate: Gate, tell: Callable[[Status], None]) -> Offload | None:
        """What gives way to the main job's memory; None where nothing does."""


class CpuSideDevice:
    """The cores on which this process runs."""

    def adopt(self, study: Study) -> None:
        """Nothing to do."""

    def gate(self, page: Page, records: UnitRecords, on_overrun: Callable[[int, int], None]) -> Gate:
        """The main job itself knows what ran over."""
        return CpuGate(page, records)

    def rehearse(self, study: Study, page: Page, gate: Gate) -> int:
        """Without the gate: the main job stops this process at every bubble's end."""
        rehearse(study)
        return study.fused

    def offload(self, page: Page, gate: Gate, tell: Callable[[Status], None]) -> Offload | None:
        """None: the machine's memory is large."""
        return None


class CudaSideDevice:
    """The one CUDA device that this process sees.

    All of it runs on one stream of the lowest priority, which is current in this thread from now on, and in the
    backward passes that it starts. The host sleeps while it waits for the device.

    Args:
        memory_fraction: the most of the device's memory that this process may hold, its context included.

    Raises:
        SideDeviceError: there is no such device, or the share is too small for a context.
    """

    def __init__(self, memory_fraction: float) -> None:
        if not torch.cuda.is_available():
            raise SideDeviceError("the main job's device is a GPU, and this PyTorch finds none; set kind in [device]")
        _sleep_while_waiting()
        self._device = torch.device("cuda", 0)
        torch.cuda.set_device(self._device)
        properties = torch.cuda.get_device_properties(self._device)
        total = properties.total_memory
        self._uuid = uuid_number(getattr(properties, "uuid", None))
        self._limit = int(memory_fraction * total) - CONTEXT_BYTES
        if self._limit <= 0:
            raise SideDeviceError(
                f"device.memory_fraction = {memory_fraction} is {memory_fraction * total / 2**20:.0f} MiB; "
                f"a CUDA context alone takes {CONTEXT_BYTES >> 20} MiB"
            )
        torch.cuda.set_per_process_memory_fraction(self._limit / total, self._device)
        self._stream = torch.cuda.Stream(self._device, priority=0)
        torch.cuda.set_stream(self._stream)
        torch.empty(1, device=self._device)  # the context, before anything waits
        wake_promptly()

    def adopt(self, study: Study) -> None:
        """Models are made on the host and moved, so that a trial begins as it would there; batches are pinned."""
        own = vars(study)
        make, batches, validation = study.model, study.batches, study.validation

        def model(params: dict[str, Any]) -> nn.Module:
            return make(params).to(self._device)

        own["model"] = model
        own["batches"] = lambda epoch: Pinned(batches(epoch))
        own["validation"] = lambda: Pinned(validation())

    def gate(self, page: Page, records: UnitRecords, on_overrun: Callable[[int, int], None]) -> Gate:
        """See `CudaGate`."""
        try:
            driver = CudaDriver()
        except DriverError as error:
            raise SideDeviceError(f"the device cannot wait for bubbles: {error}") from None
        stream = self._stream.cuda_stream
        gate = CudaGate(page, driver, stream, records, device_uuid=self._uuid, on_overrun=on_overrun)
        die_with_parent(False)  # the stream may wait then: the gate sees to it that this process ends
        return gate

    def rehearse(self, study: Study, page: Page, gate: Gate) -> int:
        """Some steps of one trial, and of two, in bubbles like any; what they take of the memory tells what fits."""
        peaks = []
        for trials in (1, 2):
            torch.cuda.reset_peak_memory_stats(self._device)
            try:
                try_out(study, gate, trials)
            except torch.OutOfMemoryError:
                return trials - 1
            peaks.append(torch.cuda.max_memory_allocated(self._device))
        one, two = peaks
        told = page.words[Field.SIDE_LIMIT_BYTES]  # by now a main job is there
        return most_trials(one, two, min(self._limit, told) if told else self._limit)

    def offload(self, page: Page, gate: Gate, tell: Callable[[Status], None]) -> Offload | None:
        """See `Offload`."""
        return Offload(page.words, gate, CudaMeter(), lambda: tensors_on("cuda"), tell)


def make_side_device(kind: str, memory_fraction: float) -> SideDevice:
    """The side task on a kind of device.

    Raises:
        SideDeviceError: it cannot be used.
    """
    return CudaSideDevice(memory_fraction) if kind == "cuda" else CpuSideDevice()


def _sleep_while_waiting() -> None:
    """Have the host sleep, not spin, where it waits for device 0. PyTorch offers no way; before there is a context.

    Source: CUDA driver API, `cuDevicePrimaryCtxSetFlags`, `CU_CTX_SCHED_BLOCKING_SYNC`.
    """
    library = ctypes.CDLL("libcuda.so.1")
    device = ctypes.c_int()
    failed = (
        library.cuInit(ctypes.c_uint(0))
        or library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(0))
        or library.cuDevicePrimaryCtxSetFlags_v2(device, ctypes.c_uint(_BLOCKING_SYNC))
    )
    if failed:
        log.warning("the host spins where it waits for the device: error %d of its driver", failed)
