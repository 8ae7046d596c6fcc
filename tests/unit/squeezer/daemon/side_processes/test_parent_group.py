"""Which directory is this process's control group, by the kernel's own words."""

import os
from pathlib import Path

import pytest

from squeezer.daemon.side_processes.parent_group import NoGroupError, _cpu_group, _limiting_groups, _own_group

MOUNT = "41 31 0:38 {root} {point} rw,relatime - cgroup2 cgroup2 rw\n"
OLD = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu\n"


def group(path: Path, *pids: int) -> Path:
    path.mkdir(parents=True)
    (path / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    return path


@pytest.mark.parametrize(
    ("root", "own", "inside"),
    [
        ("/", "/", ""),
        ("/", "/user.slice/run-1.scope", "user.slice/run-1.scope"),
        ("/docker/abc", "/docker/abc/jobs", "jobs"),
    ],
)
def test_it_is_below_the_mount_that_shows_it(tmp_path: Path, root: str, own: str, inside: str) -> None:
    point = tmp_path / "a mount"
    found = group(point / inside, os.getpid())
    mounts = OLD + MOUNT.format(root=root, point=str(point).replace(" ", "\\040"))
    assert _own_group(f"9:name=systemd:/\n0::{own}\n", mounts) == found


def test_of_several_mounts_it_is_the_one_that_shows_this_process(tmp_path: Path) -> None:
    group(tmp_path / "other" / "x", 1, 10 * os.getpid())
    found = group(tmp_path / "own" / "x", os.getpid())
    mounts = "".join(MOUNT.format(root="/", point=tmp_path / name) for name in ("other", "gone", "own"))
    assert _own_group("0::/x\n", mounts) == found


@pytest.mark.parametrize(
    ("own", "mounts", "says"),
    [
        ("0::/\n", OLD, "cgroup v2 is not mounted here"),
        ("9:name=systemd:/\n", MOUNT.format(root="/", point="/none"), "cgroup v2 is not mounted here"),
        (
            "0::/\n",
            MOUNT.format(root="/..", point="/none"),
            "/none does not show this process's group /: it belongs to",
        ),
        ("0::/../x\n", MOUNT.format(root="/", point="/none"), "/none does not show this process's group /../x"),
    ],
)
def test_else_there_is_none_and_why(own: str, mounts: str, says: str) -> None:
    with pytest.raises(NoGroupError, match=says):
        _own_group(own, mounts)


@pytest.mark.parametrize(
    ("of", "found"),
    [
        ("4:memory:/m\n2:cpu,cpuacct:/jobs/one\n0::/\n", "/jobs/one"),
        ("3:cpuset:/s\n0::/slice/job.scope/part\n", "/slice/job.scope"),
        ("0::/slice\n", "/"),
        ("0::/../elsewhere\n", "/"),
        ("", "/"),
    ],
)
def test_cpu_time_is_shared_by_the_nearest_group_with_that_controller(tmp_path: Path, of: str, found: str) -> None:
    group(tmp_path / "slice" / "job.scope" / "part")
    (tmp_path / "slice" / "job.scope" / "cpu.weight").touch()
    assert _cpu_group(of, MOUNT.format(root="/", point=tmp_path)) == found


@pytest.mark.parametrize(
    ("of", "root", "found"),
    [
        ("8:pids:/a/b\n4:memory:/m\n", "/", ["v1/a/b", "v1/a", "v1"]),
        ("8:cpu,pids:/docker/abc/x\n", "/docker/abc", ["v1/x", "v1"]),
        ("0::/s/t\n", "/", ["v2/s/t", "v2/s", "v2"]),
        ("8:pids:/a\n0::/\n", "/", ["v1/a", "v1", "v2"]),
        ("8:pids:/elsewhere\n", "/docker", []),
        ("4:memory:/m\n", "/", []),
        ("", "/", []),
    ],
)
def test_a_limit_holds_for_all_groups_below(tmp_path: Path, of: str, root: str, found: list[str]) -> None:
    old = f"39 31 0:36 {root} {tmp_path}/v1 rw,relatime - cgroup cgroup rw,cpu,pids\n"
    mounts = OLD + old + MOUNT.format(root="/", point=tmp_path / "v2")
    assert list(_limiting_groups("pids", of, mounts)) == [tmp_path / each for each in found]
