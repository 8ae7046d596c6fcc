"""Where in the tree of control groups (cgroup v2) this process may make its own.

The kernel says in which group a process is, and where the tree is mounted. Both are as seen from the process's cgroup
namespace, and a container may see a part of the tree only. Beside the old controllers (v1) the tree is often mounted
elsewhere and has no controllers; without them a group still lists, counts and kills its processes.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_DELEGATED = ("user.delegate", "trusted.delegate")
"""systemd marks so a group with `Delegate=yes`."""


class NoGroupError(Exception):
    """There can be no control group; the text says why."""


def parent_of_groups() -> Path:
    """The group in which this process may make others.

    It is this process's own. If that is a part of a delegated one that holds no process itself (systemd's
    `DelegateSubgroup=`), it is that one, because only there controllers can be had.

    Raises:
        NoGroupError: it cannot be found, or is not for this user.
    """
    try:
        own = _own_group(_kernel_says("cgroup"), _kernel_says("mountinfo"))
        parent = own.parent if _is_delegated(own.parent) and not _read(own.parent / "cgroup.procs") else own
        is_read_only = os.statvfs(parent).f_flag & os.ST_RDONLY
    except OSError as error:  # a kernel without control groups, say
        raise NoGroupError(reason(error)) from error
    if is_read_only:
        raise NoGroupError(f"{parent} is mounted read-only")
    if not os.access(parent, os.W_OK):
        raise NoGroupError(f"{parent} is not delegated to this user")
    return parent


def cpu_group(pid: int | str = "self") -> str:
    """The control group by which the kernel shares CPU time with process `pid`; "/": none but the root.

    Classes and niceness count only within one such group. With cgroup v2 it is the nearest one with the cpu controller.
    """
    try:
        return _cpu_group(_kernel_says("cgroup", pid), _kernel_says("mountinfo"))
    except OSError:  # it has ended, or the kernel knows no groups
        return "/"


def limiting_groups(controller: str) -> list[Path]:
    """The directories of the groups by which the kernel limits this process: its own, and those above as far as shown.

    Args:
        controller: of the limit, such as "pids".
    """
    try:
        return list(_limiting_groups(controller, _kernel_says("cgroup"), _kernel_says("mountinfo")))
    except OSError:  # the kernel knows no groups
        return []


def reason(error: Exception) -> str:
    """An error without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _kernel_says(name: str, pid: int | str = "self") -> str:
    """About a process; the names in it may be of any bytes."""
    return os.fsdecode(Path(f"/proc/{pid}/{name}").read_bytes())


def _own_group(own: str, mounts: str) -> Path:
    """The directory of this process's group.

    Args:
        own: the text of /proc/self/cgroup.
        mounts: that of /proc/self/mountinfo.
    """
    named = [line[3:] for line in own.splitlines() if line.startswith("0::")]
    mounted = list(_mounted(mounts))
    if not named or not mounted:
        raise NoGroupError("cgroup v2 is not mounted here")
    path = PurePosixPath(named[0])
    for root, mount in mounted:
        with suppress(ValueError):  # that mount shows another part of the tree
            found = mount / path.relative_to(root)
            if str(os.getpid()) in _read(found / "cgroup.procs").split():
                return found
    where = ", ".join(str(mount) for _, mount in mounted)
    raise NoGroupError(f"{where} does not show this process's group {path}: it belongs to another cgroup namespace")


def _cpu_group(of: str, mounts: str) -> str:
    named = dict(line.split(":", 2)[1:] for line in of.splitlines())
    for controllers, of_v1 in named.items():
        if "cpu" in controllers.split(","):
            return of_v1
    path = PurePosixPath(named.get("", "/"))
    mounted = list(_mounted(mounts))
    for group in (path, *path.parents):
        for root, mount in mounted:
            with suppress(ValueError):  # that mount shows another part of the tree
                if (mount / group.relative_to(root) / "cpu.weight").exists():
                    return str(group)
    return "/"


def _limiting_groups(controller: str, of: str, mounts: str) -> Iterator[Path]:
    for line in of.splitlines():
        controllers, group = line.split(":", 2)[1:]
        if controllers and controller not in controllers.split(","):
            continue
        for root, mount in _mounted(mounts, controller if controllers else None):
            with suppress(ValueError):  # that mount shows another part of the tree
                inside = PurePosixPath(group).relative_to(root)
                yield from (mount / each for each in (inside, *inside.parents))


def _mounted(mounts: str, controller: str | None = None) -> Iterator[tuple[PurePosixPath, Path]]:
    """For each mount of cgroup v2, or of a controller of v1, the group that is its root, and where it is."""
    for line in mounts.splitlines():
        mount, _, about = line.partition(" - ")
        kind, _, options = about.split(" ", 2)
        is_it = kind == "cgroup2" if controller is None else kind == "cgroup" and controller in options.split(",")
        if is_it:
            root, point = mount.split(" ")[3:5]
            yield PurePosixPath(_plain(root)), Path(_plain(point))


def _plain(name: str) -> str:
    """The kernel writes blanks and the like as octal numbers."""
    return name.encode("ascii", "backslashreplace").decode("unicode_escape") if "\\" in name else name


def _is_delegated(group: Path) -> bool:
    for name in _DELEGATED:
        with suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
