"""Which page a main job takes: its local rank's, or a spare one of a standing daemon."""

import os
from pathlib import Path

from ds_hooks.engine import AttachError
from ds_hooks.shared.device_uuid import read_device_uuid
from ds_hooks.shared.page.file import Page, PageError, page_path
from ds_hooks.shared.page.layout import Field, Role


def take_page(directory: Path, local_rank: int) -> Page:
    """Open the page of `local_rank` and become its main job.

    Two jobs on one machine both have a local rank 0. Where another job has that page already, any other page will do
    that a standing daemon serves and no job uses: a daemon follows its job to that job's device and cores.

    Raises:
        AttachError: another engine of this process uses it.
        PageError: the page must not be used; or another main job does, and no daemon is spare.
    """
    path = page_path(directory, local_rank)
    page = Page.open(path)
    try:
        page.claim(Role.MAIN)
        return page
    except PageError:
        holder = page.holder(Role.MAIN)
        page.close()  # its words are another job's: leave them alone
        if holder == os.getpid():
            raise AttachError("another engine of this process is squeezed, and only one can be at a time") from None
        if holder:
            for other in sorted(directory.glob(page_path(Path(), "*").name), key=_number):
                spare = _take_spare(other) if other != path else None
                if spare is not None:
                    return spare
        raise


def check_spare(page: Page, *, follows_host: bool) -> None:
    """Make sure that the daemon of a spare page finds the device of this job, which its own number does not identify.

    Raises:
        AttachError: it does not: the device has no name, as with an old PyTorch.
    """
    if not follows_host and not read_device_uuid(page.words):
        raise AttachError("another job has this local rank, and a spare daemon could not find this job's device")


def _take_spare(path: Path) -> Page | None:
    try:
        page = Page.open(path, create=False)
    except PageError:
        return None
    try:
        if page.words[Field.SERVES_ANY_JOB] and page.holder(Role.DAEMON):
            page.claim(Role.MAIN)
            return page
    except PageError:
        pass
    page.close()
    return None


def _number(path: Path) -> tuple[int, str]:
    """Pages in the order of their devices, 10 behind 9."""
    return len(path.name), path.name
