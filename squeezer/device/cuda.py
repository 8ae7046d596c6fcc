"""A CUDA device: kernels that are queued cannot be halted, so the plan alone keeps the side task within bubbles.

The side task's stream waits on the device for the page's `DEVICE_GATE`. A process whose stream waits must not be ended
before the gate has been forced open.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from uuid import UUID

from ds_hooks.shared import memory_cap
from ds_hooks.shared.device_uuid import read_device_uuid
from ds_hooks.shared.forced_gate import force_gate
from ds_hooks.shared.page.layout import DeviceGate, Field
from ds_hooks.shared.page.plan import plan_steps
from ds_hooks.shared.processes.signals import END_SIGNAL
from squeezer.calibration import mps
from squeezer.calibration.verdict import Verdict
from squeezer.config import DeviceTable
from squeezer.device import sharing
from squeezer.device.base import CannotShareError, SideProcess, has_ended, run_when_idle, run_where, send, send_to_group
from squeezer.device.nvml import MIG, ComputeMode, Meters, Nvml

FORCE_EVERY_S = 0.005
"""The main job's device may shut the gate again at any bubble's end."""
KILLED_TIMEOUT_S = 10.0
"""How long a killed process may take to leave the device, before the gate is shut all the same."""
TERMINATED_TIMEOUT_S = 1.0
"""How long a client that its MPS server has dropped may take to notice, before it is killed."""
BELOW_NORMAL = "1"
"""Of `CUDA_MPS_CLIENT_PRIORITY`."""
NO_MPS = "/dev/null"
"""As `CUDA_MPS_PIPE_DIRECTORY`: there is no server."""


class CudaDevice:
    """One CUDA device, which the rank and its side task use with a context each.

    Args:
        words: the page's.
        config: how the device is shared.
        local_rank: the rank's number on its machine.
        environment: of the rank; this process's by default.
        nvml: NVIDIA's management library.
    """

    name = "cuda"
    stops = False
    needs_job = True
    own_session = False
    """The way to share the device is the main job's. In EXCLUSIVE_PROCESS mode the first context shuts out all others,
    the main job's included."""

    def __init__(
        self,
        words: "memoryview[int]",
        config: DeviceTable,
        local_rank: int,
        environment: Mapping[str, str] = os.environ,
        nvml: Nvml | None = None,
    ) -> None:
        self._words, self._config = words, config
        self._nvml = Nvml() if nvml is None else nvml
        self._meters: tuple[str, Meters | None] = "", None
        self._mode_of: tuple[Meters | None, ComputeMode | None] = None, None
        self._visible = visible_device(environment, local_rank)
        number = own_number(environment, local_rank)
        self._named_cap = memory_cap.cap_bytes(environment.get(memory_cap.VARIABLE, ""), {str(number), self._visible})
        self._side_sees = ""
        self._server: mps.Server | None = None
        self._at_server = -1  # a main job that was found at a server, so its control program is not asked again
        if words[Field.DEVICE_GATE] == DeviceGate.FORCED:  # left by a daemon that was killed
            words[Field.DEVICE_GATE] = DeviceGate.CLOSED

    def join(self, main_pid: int, side: SideProcess | None) -> bool:
        """See `Device`; the rank's cores are near the device. A context cannot move to another device or server."""
        run_where(main_pid, side)
        named = named_device(self._words, self._nvml, self._visible)
        return side is None or ((not named or named == self._side_sees) and self._is_at_server(main_pid))

    def prepare(self, main_pid: int) -> None:
        """See `Device`."""
        named = named_device(self._words, self._nvml, self._visible)
        self._server = sharing.way_to_share(self._config.mps, main_pid, sharing.why_no_turns(named))
        if self._server is not None:
            sharing.refuse_unsound(named)

    def least_margin_ns(self) -> int:
        """See `Device`; the larger one of the two ways to share it, as which one is used is not known yet."""
        return max((each.margin_ns for each in self._verdicts()), default=0)

    def least_bubble_ns(self) -> int:
        """See `Device` and `least_margin_ns`."""
        return max((each.least_bubble_ns for each in self._verdicts()), default=0)

    def _verdicts(self) -> list[Verdict]:
        """Those that let a side task share the device."""
        named = named_device(self._words, self._nvml, self._visible)
        both = (sharing.verdict_of(named, mps=mps) for mps in (False, True))
        return [each for each in both if each is not None and each.sound]

    @property
    def recovers(self) -> bool:
        """See `Device`; an MPS server accepts nobody until it has cleared up after a client."""
        return self._server is not None

    def meters(self) -> Meters | None:
        """See `Device`. They are NVML's; it knows the device by the name on the page only."""
        named = named_device(self._words, self._nvml, self._visible)
        if named != self._meters[0]:
            self._meters = named, self._nvml.open(named)
        return self._meters[1]

    def bars_side_task(self) -> str:
        """See `Device`. Clients of an MPS server are one process to the device."""
        meters = self.meters()
        mode = None if meters is None else meters.compute_mode()
        if mode is None and meters is self._mode_of[0]:
            mode = self._mode_of[1]  # a device that is not to be asked now is not open for that
        self._mode_of = meters, mode
        reason = "" if mode is None else shut_to_others(mode)
        main_pid = self._words[Field.MAIN_PID]
        if not reason or main_pid == self._at_server:
            return ""
        if not self._has_server(main_pid):
            return reason
        self._at_server = main_pid
        return ""

    def _has_server(self, main_pid: int) -> bool:
        """Whether that rank is the client of an MPS server that a side task would use."""
        with suppress(CannotShareError):
            return sharing.way_to_share(self._config.mps, main_pid, "") is not None
        return False

    def arguments(self) -> list[str]:
        """The only device that it sees, and how many units it may queue there, if that was measured."""
        found = ["--device", "cuda", "--memory-fraction", str(self._config.memory_fraction)]
        named = named_device(self._words, self._nvml, self._visible)
        verdict = sharing.verdict_of(named, mps=self._server is not None)
        return found if verdict is None else [*found, "--queue-depth", str(verdict.queue_depth)]

    def environment(self, threads: int) -> dict[str, str]:
        """No other device than the rank's, so that no context is made elsewhere; its MPS server, or none.

        A server also keeps the side task from taking the main job's memory, whatever its code does.
        """
        count = str(threads)
        self._side_sees = named_device(self._words, self._nvml, self._visible) or self._visible
        found = {
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": self._side_sees,
            "CUDA_MODULE_LOADING": "LAZY",
        }
        if self._server is None:
            return {**found, mps.PIPE_VARIABLE: NO_MPS}
        found |= {mps.PIPE_VARIABLE: str(self._server.directory), "CUDA_MPS_CLIENT_PRIORITY": BELOW_NORMAL}
        cap = self._cap_bytes()
        if cap is not None:
            found[memory_cap.VARIABLE] = memory_cap.cap_text(cap)
        percent = self._config.mps_thread_percent
        return found if percent is None else {**found, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}

    def _cap_bytes(self) -> int | None:
        """The most memory that the side task's process may ever hold, its context included; None: unknown.

        It is its share or what the user has set for the rank, whichever is less; not what is free now, which a process
        that has just ended may not have given back yet.
        """
        meters = self.meters()
        memory = None if meters is None else meters.memory()
        share = None if memory is None else int(self._config.memory_fraction * memory[0])
        return min((cap for cap in (share, self._named_cap) if cap is not None), default=None)

    def stop(self, side: SideProcess) -> None:
        """Nothing: a stopped process's kernels would run on."""

    def resume(self, side: SideProcess) -> None:
        """Nothing."""

    def end(self, side: SideProcess, timeout_s: float, *, beside_main: bool) -> None:
        """SIGTERM behind a gate that is forced open; after `timeout_s` SIGKILL; the gate is shut again at the end.

        Its MPS server, if it has one, drops it before SIGKILL.
        """
        if timeout_s and beside_main:
            run_when_idle(side.pid)
        force_gate(self._words)
        send(side, END_SIGNAL)
        if not self._ends_within(side, timeout_s) and not self._is_dropped(side):
            send_to_group(side, signal.SIGKILL)
            self._ends_within(side, KILLED_TIMEOUT_S)
        self._words[Field.DEVICE_GATE] = DeviceGate.CLOSED

    def main_ended(self) -> None:
        """See `Device`."""
        words = self._words
        words[Field.DEVICE_GATE] = DeviceGate.CLOSED
        words[Field.BUBBLE] &= ~1
        plan_steps(words, 0, 0)

    def _is_at_server(self, main_pid: int) -> bool:
        """Whether that rank uses the side task's MPS server; or none that it could use, if it takes turns."""
        if self._server is None:
            return not self._has_server(main_pid)
        try:
            return mps.server_of(main_pid).is_same(self._server)
        except mps.MpsError:
            return False

    def _is_dropped(self, side: SideProcess) -> bool:
        """Let the MPS server drop the side task, if it has one; whether it has ended by that."""
        if self._server is None:
            return False
        asked = mps.terminate_client(self._server, side.pid, partial(force_gate, self._words))
        return self._ends_within(side, TERMINATED_TIMEOUT_S if asked else 0.0)

    def _ends_within(self, side: SideProcess, timeout_s: float) -> bool:
        looks = max(1, round(timeout_s / FORCE_EVERY_S))
        for _ in range(looks):
            force_gate(self._words)
            if has_ended(side.pidfd, FORCE_EVERY_S):
                return True
        return False


def named_device(words: "memoryview[int]", nvml: Nvml, visible: str) -> str:
    """The device that the main job's hooks have named on the page; nothing if they have not.

    Args:
        words: the page's.
        nvml: recognizes a MIG instance, whose number PyTorch gives without a word that it is one.
        visible: what the rank's `CUDA_VISIBLE_DEVICES` calls its device. Where it names an instance, that is believed
            unless NVML knows better.
    """
    number = read_device_uuid(words)
    if not number:
        return ""
    uuid = UUID(int=number)
    if nvml.open(f"{MIG}{uuid}") is not None:
        return f"{MIG}{uuid}"
    whole = f"GPU-{uuid}"
    if visible.startswith(MIG):
        meters = nvml.open(whole)
        if meters is None or meters.is_split() is not False:
            return visible
    return whole


def shut_to_others(mode: ComputeMode) -> str:
    """Why a device in this mode has no place for a second process that is not a client of the same MPS server."""
    if mode is ComputeMode.DEFAULT:
        return ""
    return (
        f"the device is in {mode.name} mode, so without MPS no second process can open it: "
        f"`nvidia-smi -c DEFAULT` (as root) lets it in, and so does mps = true in [device] with an MPS server"
    )


def visible_device(environment: Mapping[str, str], local_rank: int) -> str:
    """What `CUDA_VISIBLE_DEVICES` calls the device of a rank; with a list of one for each rank, that one."""
    devices = _visible_devices(environment)
    return devices[own_number(environment, local_rank)] if devices else str(local_rank)


def own_number(environment: Mapping[str, str], local_rank: int) -> int:
    """The number by which the rank itself calls its device: among those that it sees."""
    devices = _visible_devices(environment)
    return local_rank if not devices or local_rank < len(devices) else 0


def _visible_devices(environment: Mapping[str, str]) -> list[str]:
    return [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
