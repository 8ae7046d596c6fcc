"""CPU cores: the side task shares the rank's cores, and SIGSTOP halts it within microseconds."""

import os
import signal
from collections.abc import Sequence

from squeezer.device.base import SideProcess

END_SIGNAL = signal.SIGTERM


class CpuDevice:
    """The cores that one rank is bound to."""

    name = "cpu"

    def join(self, main_pid: int) -> None:
        """Take the affinity of `main_pid`; a process that is gone by now changes nothing."""
        try:
            os.sched_setaffinity(0, os.sched_getaffinity(main_pid))
        except ProcessLookupError:
            return

    def environment(self, threads: int) -> dict[str, str]:
        """As many threads as asked for, and none that spins while it has nothing to do."""
        return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}

    def stop(self, side: SideProcess) -> None:
        """SIGSTOP."""
        _send(side, [signal.SIGSTOP])

    def resume(self, side: SideProcess) -> None:
        """SIGCONT."""
        _send(side, [signal.SIGCONT])

    def end(self, side: SideProcess, *, force: bool) -> None:
        """SIGTERM, which it sees at the gate, also when it was stopped; SIGKILL by force."""
        _send(side, [signal.SIGKILL] if force else [END_SIGNAL, signal.SIGCONT])


def _send(side: SideProcess, signals: Sequence[signal.Signals]) -> None:
    try:
        for number in signals:
            signal.pidfd_send_signal(side.pidfd, number)
    except ProcessLookupError:
        return  # it has ended; its pidfd tells the loop so
