"""Looks at the page while the driver holds the thread that trains, behind what waits for a bubble."""

import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

_NOT_THE_USERS = (f"{Path(__file__).parents[1]}/", "/site-packages/torch/", "<frozen ")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


class HostWatch:
    """A thread that calls `look` again and again.

    Args:
        look: returns in how many seconds it wants to be called again; None: not at all.
    """

    def __init__(self, look: Callable[[], float | None]) -> None:
        self._look = look
        threading.Thread(target=self._watch, name="host watch", daemon=True).start()

    def _watch(self) -> None:
        while (seconds := self._look()) is not None:
            time.sleep(seconds)


def where_is(thread: int) -> str:
    """Where a thread is: the file, line and code of the user's that it runs, or else those in which it is."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "an unknown line"
    stack = traceback.extract_stack(frame)
    found = next((each for each in reversed(stack) if _is_the_users(each.filename)), stack[-1])
    return f"{found.filename}:{found.lineno} ({found.line})"


def _is_the_users(file: str) -> bool:
    """Whether code is the user's, or of a package that the user's code calls."""
    in_library = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return not in_library and not any(part in file for part in _NOT_THE_USERS)
