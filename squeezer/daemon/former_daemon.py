"""Where a job begins again in the same run: its new daemon waits until the one of its former process has left."""

import os
import time

from ds_hooks.shared.page.file import Page
from ds_hooks.shared.page.layout import Field, Role

LEAVES_WITHIN_S = 40.0
"""At its end a daemon lets the side task save, and releases its trials."""
LOOK_EVERY_S = 0.1


def await_former(page: Page, job_pid: int) -> None:
    """Wait for the page's daemon to leave, and let it know, so that it measures nothing beside the job.

    A standing daemon does not leave, nor does one whose job lives; then the role stays taken.

    Args:
        page: of the device.
        job_pid: the process of the job that has begun.
    """
    words = page.words
    if not page.holder(Role.DAEMON) or words[Field.SERVES_ANY_JOB] or page.holder(Role.MAIN) not in (0, job_pid):
        return
    end_s = time.monotonic() + LEAVES_WITHIN_S
    words[Field.NEXT_DAEMON] = os.getpid()
    while page.holder(Role.DAEMON) and time.monotonic() < end_s:
        time.sleep(LOOK_EVERY_S)
    words[Field.NEXT_DAEMON] = 0
