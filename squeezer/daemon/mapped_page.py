"""Whether a process has the page in its memory. A program that it has become (`exec`) lacks it until it attaches."""

from contextlib import suppress
from pathlib import Path


class MappedPage:
    """The page as the kernel lists it among the files in a process's memory.

    Args:
        path: the page's file.
    """

    def __init__(self, path: Path) -> None:
        self._inode = b""
        with suppress(OSError):  # it has just been removed
            self._inode = b"%d" % path.stat().st_ino

    def is_in(self, pid: int) -> bool:
        """Whether process `pid` has mapped it, as far as the kernel says. It takes about a millisecond."""
        ours, theirs = self._listed("self"), self._listed(str(pid))
        # on some file systems the kernel lists other numbers, and some processes let nobody look
        return not ours or theirs is None or not ours.isdisjoint(theirs)

    def _listed(self, process: str) -> set[tuple[bytes, bytes]] | None:
        """The device and number of what a process has mapped of this number; None: it lets nobody look."""
        try:
            lines = Path(f"/proc/{process}/maps").read_bytes().split(b"\n")  # all else may be in the name of a file
        except OSError:
            return None
        fields = [line.split(maxsplit=5) for line in lines if self._inode in line]
        return {(each[3], each[4]) for each in fields if each[4:5] == [self._inode]}
