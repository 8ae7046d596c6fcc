"""Whether a process has the page in its memory. A program that it has become (`exec`) lacks it until it attaches."""

from contextlib import suppress
from pathlib import Path


class MappedPage:
    """The page as the kernel lists it among the files in a process's memory.

    Args:
        path: the page's file.
    """

    def __init__(self, path: Path) -> None:
        self._inode = ""
        with suppress(OSError):  # it has just been removed
            self._inode = str(path.stat().st_ino)

    def is_in(self, pid: int) -> bool:
        """Whether process `pid` has mapped it, as far as the kernel says. It takes about a millisecond."""
        # on some file systems the kernel lists other numbers
        return not self._is_listed("self") or self._is_listed(str(pid))

    def _is_listed(self, process: str) -> bool:
        try:
            lines = Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return True  # the process lets nobody look
        return any(line.split(maxsplit=5)[4] == self._inode for line in lines)
