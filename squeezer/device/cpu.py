"""CPU cores: the side task shares the rank's cores, and SIGSTOP halts it within microseconds."""

import select
import signal
from math import ceil

from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.processes.signals import END_SIGNAL
from ds_hooks.shared.processes.strays import Strays
from squeezer.config import DeviceTable
from squeezer.device.base import (
    SideProcess,
    has_ended,
    run_when_idle,
    run_where,
    send,
    send_to_group,
    weighed_by_session,
)

CONTINUE_EVERY_S = 0.05
APART = "this daemon may not use the main job's cores; start both in one cpuset (a control group, container or slice)"


class CpuDevice:
    """The cores that one rank is bound to."""

    name = "cpu"
    stops = True
    needs_job = False
    recovers = False

    def __init__(self, words: "memoryview[int]", config: DeviceTable, local_rank: int) -> None:
        """Only the page's words matter here."""
        self._words = words
        self.own_session = False
        self._bars = ""
        self._strays = Strays(words)

    def join(self, main_pid: int, side: SideProcess | None) -> bool:
        """See `Device`. A process can always follow, but not to another session."""
        self._bars = "" if run_where(main_pid, side) else APART
        return side is None or self.own_session or not weighed_by_session(main_pid)

    def meters(self) -> None:
        """See `Device`. There are none."""

    def bars_side_task(self) -> str:
        """See `Device`. Cores are for all who may use them."""
        return self._bars

    def least_margin_ns(self) -> int:
        """See `Device`. A signal halts it at once."""
        return 0

    def least_bubble_ns(self) -> int:
        """See `Device`; `min_bubble_ms` says enough."""
        return 0

    def prepare(self, main_pid: int) -> None:
        """See `Device`. Cores can always be shared."""
        self.own_session = bool(main_pid) and weighed_by_session(main_pid)

    def arguments(self) -> list[str]:
        """It runs where it is started."""
        return ["--device", "cpu"]

    def environment(self, threads: int) -> dict[str, str]:
        """As many threads as asked for, and none that spins while it has nothing to do."""
        return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}

    def stop(self, side: SideProcess) -> None:
        """SIGSTOP."""
        send_to_group(side, signal.SIGSTOP)
        self._strays.stop()

    def resume(self, side: SideProcess) -> None:
        """SIGCONT."""
        send_to_group(side, signal.SIGCONT)
        self._strays.resume()

    def end(self, side: SideProcess, timeout_s: float, *, beside_main: bool) -> None:
        """SIGTERM, which it sees at the gate; SIGKILL by force.

        A living main job may stop it once more, at the end of the open bubble, so it is continued again and again. From
        then on only the idle class keeps it from that job's core.
        """
        if timeout_s and beside_main:
            run_when_idle(side.pid)
        send(side, END_SIGNAL)
        for _ in range(ceil(timeout_s / CONTINUE_EVERY_S)):
            self.resume(side)
            if has_ended(side.pidfd, CONTINUE_EVERY_S):
                return
        send_to_group(side, signal.SIGKILL)
        select.select([side.pidfd], [], [])

    def main_ended(self) -> None:
        """See `Device`."""
        self._words[Field.PERMIT_UNTIL_NS] = 0
