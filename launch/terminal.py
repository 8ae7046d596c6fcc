"""Whom a terminal's Ctrl-C reaches."""

import os


def is_in_foreground() -> bool:
    """Whether Ctrl-C on this process's terminal reaches it, and so all that it has started in its process group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False  # it has none
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False  # that has hung up
    finally:
        os.close(terminal)
