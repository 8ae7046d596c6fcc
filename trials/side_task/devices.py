"""Where a side task computes: on the rank's cores, or on its CUDA device. The rest of the side task need not know."""

import ctypes
import os
from collections.abc import Callable
from typing import Protocol

import torch

from ds_hooks.shared import memory_cap
from ds_hooks.shared.cuda_driver import CONTEXT_BYTES, CudaDriver, DriverError
from ds_hooks.shared.device_uuid import uuid_number
from ds_hooks.shared.page.file import Page
from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.processes.parent import die_with_parent
from ds_hooks.shared.statuses import Status
from trials.gate.base import Gate
from trials.gate.cpu import CpuGate
from trials.gate.cuda import CudaGate
from trials.gate.cuda_queue import IN_FLIGHT
from trials.gate.process import wake_promptly
from trials.gate.unit_records import UnitRecords
from trials.own_logger import own_logger
from trials.side_task.fit import most_trials
from trials.side_task.offload import CudaMeter, Offload, tensors_on
from trials.study import Study
from trials.training.inputs.batches import Pinned
from trials.training.member import build_on
from trials.training.most_fused import Known, MostFused
from trials.training.rehearsal import rehearse, try_out

_BLOCKING_SYNC = 4

log = own_logger(__name__)


class SideDeviceError(Exception):
    """A side task cannot compute on this device. The message gives the reason."""


class NoRoomError(SideDeviceError):
    """Not even one trial of the study fits. It may on another device."""

    may_pass = True


class SideDevice(Protocol):
    """The device of a side task. Created once per process, before any tensor."""

    def adopt(self, study: Study) -> None:
        """Make `study` work on this device, without its knowledge."""

    def gate(self, page: Page, records: UnitRecords, on_overrun: Callable[[int, int], None]) -> Gate:
        """Return the gate of this device.

        Args:
            page: the device's page.
            records: receives a record of each unit.
            on_overrun: called with (slot, ns) of a unit that ran on after its bubble, if the device notices.
        """

    def rehearse(self, study: Study, page: Page | None, gate: Gate, known: Known | None = None) -> MostFused:
        """Train throw-away trials, so that imports, compilations and errors come first.

        Args:
            study: the user's.
            page: the device's; None: there is no main job.
            gate: asked before each unit, unless the main job stops this process.
            known: what was found before about this study, if anything.

        Returns:
            How many trials to fuse at most. 0: not even one fits.
        """

    def offload(self, page: Page, gate: Gate, report: Callable[[Status], None]) -> Offload | None:
        """Return what gives memory back to the main job; None where memory is not shared."""


class CpuSideDevice:
    """The cores on which this process runs."""

    def adopt(self, study: Study) -> None:
        """Nothing to do."""

    def gate(self, page: Page, records: UnitRecords, on_overrun: Callable[[int, int], None]) -> Gate:
        """See `CpuGate`. The main job itself notices overruns."""
        return CpuGate(page, records)

    def rehearse(self, study: Study, page: Page | None, gate: Gate, known: Known | None = None) -> MostFused:
        """Train without the gate: the main job stops this process at the end of every bubble."""
        return rehearse(study, known)

    def offload(self, page: Page, gate: Gate, report: Callable[[Status], None]) -> Offload | None:
        """Return None: the machine's memory is large."""
        return None


class CudaSideDevice:
    """The one CUDA device that this process sees.

    All its work runs on one stream of the lowest priority. That stream becomes current in this thread, and in the
    backward passes that it starts. The host sleeps while it waits for the device.

    Args:
        memory_fraction: the most of the device's memory that this process may hold, its context included.
        queue_depth: see `CudaGate.limit_queue`.

    Raises:
        SideDeviceError: there is no such device, or the share is too small for a CUDA context.
    """

    def __init__(self, memory_fraction: float, queue_depth: int = IN_FLIGHT) -> None:
        self._queue_depth = queue_depth
        if not torch.cuda.is_available():
            raise SideDeviceError(
                'this PyTorch finds no CUDA device; allowed: kind = "cpu" in [device], or --device cpu'
            )
        _sleep_while_waiting()
        self._device = torch.device("cuda", 0)
        torch.cuda.set_device(self._device)
        properties = torch.cuda.get_device_properties(self._device)
        total = properties.total_memory
        self._uuid = uuid_number(getattr(properties, "uuid", None))
        share, what = int(memory_fraction * total), f"device.memory_fraction = {memory_fraction}"
        named = os.environ.get(memory_cap.VARIABLE, "")
        cap = memory_cap.cap_bytes(named, {"0"})
        if cap is not None and (cap < share or total <= cap):  # a driver may call that the whole device
            share, what = min(cap, total), f"{what}, capped by {memory_cap.VARIABLE}={named},"
        self._limit = share - CONTEXT_BYTES
        if self._limit <= 0:
            raise SideDeviceError(
                f"{what} is {share / 2**20:.0f} MiB; a CUDA context alone takes {CONTEXT_BYTES >> 20} MiB"
            )
        torch.cuda.set_per_process_memory_fraction(self._limit / total, self._device)
        self._stream = torch.cuda.Stream(self._device, priority=0)
        torch.cuda.set_stream(self._stream)
        torch.empty(1, device=self._device)  # the context, before anything waits
        wake_promptly()

    def adopt(self, study: Study) -> None:
        """Move models here once they are built, and pin batches."""
        build_on(study, self._device)
        own, batches, validation = vars(study), study.batches, study.validation
        own["batches"] = lambda *which: Pinned(batches(*which))
        own["validation"] = lambda: Pinned(validation())

    def gate(self, page: Page, records: UnitRecords, on_overrun: Callable[[int, int], None]) -> Gate:
        """See `CudaGate`."""
        try:
            driver = CudaDriver()
        except DriverError as error:
            raise SideDeviceError(f"the device cannot wait for bubbles: {error}") from None
        stream = self._stream.cuda_stream
        gate = CudaGate(page, driver, stream, records, device_uuid=self._uuid, on_overrun=on_overrun)
        gate.limit_queue(self._queue_depth)
        die_with_parent(wanted=False)  # the stream may be waiting then; the gate ends this process
        return gate

    def rehearse(self, study: Study, page: Page | None, gate: Gate, known: Known | None = None) -> MostFused:
        """Train one trial, then two, for some steps in bubbles. Their peaks of memory show how many fit."""
        peaks = []
        for trials in (1, 2):
            torch.cuda.reset_peak_memory_stats(self._device)
            try:
                try_out(study, gate, trials)
            except torch.OutOfMemoryError:
                return MostFused(trials - 1)
            peaks.append(torch.cuda.max_memory_allocated(self._device))
        one, two = peaks
        limit = 0 if page is None else page.words[Field.SIDE_LIMIT_BYTES]  # set by now, because a main job has come
        return MostFused(most_trials(one, two, min(self._limit, limit) if limit else self._limit))

    def offload(self, page: Page, gate: Gate, report: Callable[[Status], None]) -> Offload | None:
        """See `Offload`."""
        return Offload(page.words, gate, CudaMeter(), lambda: tensors_on("cuda"), report)


def make_side_device(kind: str, memory_fraction: float, queue_depth: int = IN_FLIGHT) -> SideDevice:
    """Return the side task's device of `kind`, "cpu" or "cuda".

    Raises:
        SideDeviceError: it cannot be used.
    """
    return CudaSideDevice(memory_fraction, queue_depth) if kind == "cuda" else CpuSideDevice()


def _sleep_while_waiting() -> None:
    """Have the host sleep, not spin, while it waits for device 0. Call it before there is a context.

    PyTorch has no option for this.

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
        log.warning("the host spins while it waits for the device: driver error %d", failed)
