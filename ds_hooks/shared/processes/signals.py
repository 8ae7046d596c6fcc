"""Which signals mean something between our processes, and what becomes of the others.

A side task blocks the first two before its first thread starts, and waits for them in the gate.
"""

import signal

WAKE_SIGNAL = signal.SIGUSR1
"""The main job opens a bubble; sent only to a side task that sleeps, since an unblocked one would end."""
END_SIGNAL = signal.SIGTERM
"""The daemon asks it to end."""

_NOT_OURS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU)


def asked_to_end() -> set[signal.Signals]:
    """What asks a daemon or a launcher to end: a scheduler, Ctrl-C, and a lost terminal unless `nohup` was used."""
    asked = {signal.SIGTERM, signal.SIGINT}
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else {*asked, signal.SIGHUP}


def ignore_signals_to_others() -> None:
    """Ignore what is meant for the main job, here and in processes started from here.

    A scheduler sends SIGUSR1 or SIGUSR2 to all processes of a job, so that the training saves itself. A terminal stops
    processes in its background that read it, or print with `stty tostop`; ours are always there.
    """
    for number in _NOT_OURS:
        signal.signal(number, signal.SIG_IGN)
