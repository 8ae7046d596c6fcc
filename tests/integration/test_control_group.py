"""Control groups on this machine's own tree: nothing escapes, everything is counted, nothing is left behind."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from squeezer.daemon.side_processes.control_group import SideGroup, enable, make_side_group, remove_dead_groups
from tests.support.control_groups import a_parent_group, a_subtree, shell
from tests.support.paths import ROOT
from tests.support.sandbox import is_alive, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.alone]

LEAVES = """
import os, signal, sys, time

def child():
    if os.fork():
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return True

burn_s, then_ends = float(sys.argv[1]), sys.argv[2:] == ["ends"]
if child():
    until = time.process_time() + burn_s
    while time.process_time() < until:
        pass
    print(os.getpid(), flush=True)
    if then_ends:
        os._exit(0)
time.sleep(600)
"""
"""Leaves a process in a session of its own, whose parent has ended, and which ignores SIGTERM."""

BOMB = """
import os, time
most = len(os.listdir("/proc")) + 150
print("x", flush=True)
while True:
    try:
        if len(os.listdir("/proc")) < most:
            if os.fork() == 0 and os.fork() == 0:
                os.setsid()
        time.sleep(0.02)
    except OSError:
        pass
"""
"""Each of its processes forks more, as long as the machine has few more."""

MANY = """
import os, time
for _ in range(900):
    if os.fork() == 0:
        time.sleep(600)
print(1, flush=True)
time.sleep(600)
"""

OWNER = """
import os, subprocess, sys, time
from squeezer.daemon.side_processes.control_group import make_side_group
group = make_side_group()
code = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
if sys.argv[1] == "busy":
    subprocess.Popen([sys.executable, "-c", code, *sys.argv[2:]], preexec_fn=group.enter)
print(group.path, flush=True)
time.sleep(600)
"""


SHARES = """
import os, signal
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
shared = SharedMemory(create=True, size=1)
os.kill(resource_tracker._resource_tracker._pid, signal.SIGSTOP)  # as at a bubble's end
print(shared.name, flush=True)
signal.pause()
"""


@pytest.fixture
def place() -> Path:
    return a_parent_group()


@pytest.fixture
def group(place: Path) -> Iterator[SideGroup]:
    made = make_side_group()
    yield made
    if made.path.exists():
        made.close()


def start(group: SideGroup, code: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, preexec_fn=group.enter
    )


def first_line(process: "subprocess.Popen[str]") -> str:
    """What it says next; processes that it has left may hold its output open for ever."""
    assert process.stdout is not None
    said = b""
    while not said.endswith(b"\n"):
        assert select.select([process.stdout], [], [], 60)[0], "it says nothing"
        byte = os.read(process.stdout.fileno(), 1)
        if not byte:
            break
        said += byte
    return said.decode().strip()


def test_a_process_that_left_parent_group_and_session_and_ignores_sigterm_ends_with_the_group(group: SideGroup) -> None:
    side = start(group, LEAVES, "0")
    left = int(first_line(side))
    os.kill(left, signal.SIGTERM)
    assert os.getsid(left) != os.getsid(side.pid) and group.processes() == {side.pid, left}
    os.kill(left, signal.SIGSTOP)
    assert group.has(side.pid)
    group.close()
    wait_for(lambda: not is_alive(left), "its end")  # a moment after the group is empty
    assert side.wait(10) == -signal.SIGKILL
    assert not group.path.exists()


def test_its_time_is_counted_even_once_it_has_ended_unseen(group: SideGroup) -> None:
    side = start(group, LEAVES, "0.4", "ends")
    left = int(first_line(side))
    wait_for(lambda: not is_alive(left), "its end")
    cpu_ns = group.cpu_ns()
    assert cpu_ns is not None and cpu_ns > 0.4e9
    time.sleep(0.1)
    after_ns = group.cpu_ns()
    assert after_ns is not None and after_ns - cpu_ns < 0.05e9, "all that live sleep"
    group.close()
    side.wait()
    assert group.cpu_ns() is None and group.processes() is None, "it is gone"


def test_a_fork_bomb_ends_as_a_whole(group: SideGroup) -> None:
    bomb = start(group, BOMB)
    wait_for(lambda: len(group.processes() or ()) > 100, "its explosion")
    group.close()
    assert not group.path.exists()
    bomb.wait(10)


def test_what_they_have_in_shared_memory_is_removed_by_those_whose_task_that_is(group: SideGroup) -> None:
    side = start(group, SHARES)
    left = Path("/dev/shm", first_line(side))
    assert left.is_file()
    group.close()
    assert not left.exists()
    side.wait()


def test_all_processes_are_listed(group: SideGroup) -> None:
    many = [subprocess.Popen(["sleep", "600"], preexec_fn=group.enter) for _ in range(40)]
    side = start(group, MANY)  # their numbers take more than the 4 KiB that the kernel gives at once
    assert first_line(side) == "1"
    processes = group.processes()
    assert processes is not None and len(processes) == 941 and {each.pid for each in many} < processes
    group.close()
    assert side.wait() == -signal.SIGKILL and {each.wait() for each in many} == {-signal.SIGKILL}


def test_groups_that_the_side_task_makes_in_its_own_go_with_it(group: SideGroup) -> None:
    inner = group.path / "side" / "inner"
    (inner / "deeper").mkdir(parents=True)
    sleeper = subprocess.Popen(["sleep", "600"], preexec_fn=group.enter)
    (inner / "deeper" / "cgroup.procs").write_text(str(sleeper.pid))
    group.close()
    assert sleeper.wait(10) == -signal.SIGKILL and not group.path.exists()


def test_one_that_is_frozen_by_others_ends_too(group: SideGroup) -> None:
    sleeper = subprocess.Popen(["sleep", "600"], preexec_fn=group.enter)
    (group.path / "cgroup.freeze").write_text("1")
    group.close()
    assert sleeper.wait(10) == -signal.SIGKILL and not group.path.exists()


@pytest.mark.parametrize("kind", ["busy", "empty"])
def test_a_killed_owners_group_goes_with_the_next_start_and_a_living_ones_stays(place: Path, kind: str) -> None:
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER, kind], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for _ in range(2)
    ]
    told = [{first_line(owner) for _ in range(2 if kind == "busy" else 1)} for owner in owners]
    try:
        _check(owners, told)
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
        remove_dead_groups()


def _check(owners: "list[subprocess.Popen[str]]", told: list[set[str]]) -> None:
    (dead, *dead_child), (lives, *living_child) = (sorted(each, key=str.isdecimal) for each in told)
    owners[0].kill()
    owners[0].wait()
    made = make_side_group()
    assert made.path.exists() and not Path(dead).exists() and Path(lives).exists()
    wait_for(lambda: not any(is_alive(int(pid)) for pid in dead_child), "its end")
    assert all(is_alive(int(pid)) for pid in living_child)
    made.close()
    owners[1].kill()
    owners[1].wait()
    remove_dead_groups()
    assert not Path(lives).exists()
    wait_for(lambda: not any(is_alive(int(pid)) for pid in living_child), "its end")


@contextmanager
def a_killed_owners_gpu_side_task() -> Iterator[None]:
    """It lives on and keeps its group, whatever is done meanwhile; once it has ended, the group can be removed."""
    command = [sys.executable, "-c", OWNER, "busy", "--page", "x", "--device", "cuda"]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    path, side = sorted((first_line(owner) for _ in range(2)), key=str.isdecimal)
    try:
        owner.kill()
        owner.wait()
        yield
        assert is_alive(int(side)) and Path(path).exists()
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(side), signal.SIGKILL)
    wait_for(lambda: not is_alive(int(side)), "its end")
    remove_dead_groups()
    assert not Path(path).exists()


def test_a_killed_owners_side_task_on_a_gpu_is_left_to_end_by_itself(place: Path) -> None:
    with a_killed_owners_gpu_side_task():
        make_side_group().close()  # as the daemon of another device does


def test_a_container_that_shares_the_tree_leaves_side_tasks_alone_whose_numbers_it_cannot_see(place: Path) -> None:
    unshare = ("unshare", "--pid", "--fork", "--mount-proc")
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this user may make no PID namespace, so nothing is shown")
    with a_killed_owners_gpu_side_task():
        make = "from squeezer.daemon.side_processes.control_group import make_side_group; make_side_group().close()"
        subprocess.run([*unshare, sys.executable, "-c", make], check=True, cwd=ROOT)


def test_two_owners_that_start_at_once_do_not_remove_each_others(place: Path) -> None:
    make = "from squeezer.daemon.side_processes.control_group import make_side_group"
    code = f"{make}\nfor _ in range(60): make_side_group().close()"
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE) for _ in range(3)]
    assert [each.communicate()[1] for each in both] == [b""] * 3
    assert [each.returncode for each in both] == [0] * 3


def test_another_user_gets_none_and_is_told_why(place: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user, so the refusal is NOT shown")
    # all that it imports is read as root: the other user may not be let into this checkout
    module = "squeezer.daemon.side_processes.control_group"
    first = f"import os; from {module} import make_side_group; make_side_group().close()"
    drops = f"{first}; os.setgroups([]); os.setresuid(65534, 65534, 65534)"
    done = shell(f'exec "$PYTHON" -c "{drops}$MAKE"')
    assert done.stdout == f"{place} is not delegated to this user\n", done.stderr


def mount_of(place: Path) -> Path:
    while not place.is_mount():
        place = place.parent
    return place


def test_a_read_only_tree_gives_none(place: Path) -> None:
    mount = mount_of(place)
    done = shell(f'mount -o remount,bind,ro {mount}; exec "$PYTHON" -c "$MAKE"', "unshare", "-m")
    assert done.stdout == f"{place} is mounted read-only\n", done.stderr


def test_without_a_mount_there_is_none(place: Path) -> None:
    done = shell(f'umount -l {mount_of(place)}; exec "$PYTHON" -c "$MAKE"', "unshare", "-m")
    assert done.stdout == "cgroup v2 is not mounted here\n", done.stderr


def test_a_container_with_a_cgroup_namespace_makes_them_in_its_own_part_of_the_tree(place: Path) -> None:
    mount = mount_of(place)
    with a_subtree(place) as top:
        enter = f"echo $$ > {top}/cgroup.procs; exec unshare -C bash -ec "
        inside = f'umount -l {mount}; mount -t cgroup2 none {mount}; exec "$PYTHON" -c "$MAKE"'
        done = shell(f"{enter} '{inside}'", "unshare", "-m")
        assert done.stdout == f"made in {mount}\n", done.stderr
        assert not list(top.glob("squeezer-side-*"))


def test_a_mount_from_outside_of_the_cgroup_namespace_gives_none(place: Path) -> None:
    with a_subtree(place) as top:
        done = shell(
            f'echo $$ > {top}/cgroup.procs; exec unshare -C bash -ec \'exec "$PYTHON" -c "$MAKE"\'', "unshare", "-m"
        )
        assert "belongs to another cgroup namespace" in done.stdout, done.stdout + done.stderr


VANISHES = """
import subprocess, sys
from squeezer.daemon.side_processes.control_group import make_side_group
group = make_side_group()
sleeper = subprocess.Popen(["sleep", "600"], preexec_fn=group.enter, stdout=subprocess.DEVNULL)
subprocess.run(["umount", "-l", sys.argv[1]], check=True)
print(group.path, group.processes() in ({sleeper.pid}, None), group.cpu_ns() is None or group.cpu_ns() >= 0)
group.close()
sleeper.kill()
sleeper.wait()
"""


def test_a_tree_that_disappears_breaks_nothing(place: Path) -> None:
    done = shell(f'exec "$PYTHON" -c {VANISHES!r} {mount_of(place)}'.replace("\\n", "\n"), "unshare", "-m")
    path, *others = done.stdout.split()
    remove_dead_groups()
    assert others == ["True", "True"] and done.stderr == "" and not Path(path).exists()


IN_PART = """
echo $$ > {own}/cgroup.procs
exec "$PYTHON" -c "$MAKE"
"""


def test_where_systemd_delegates_a_group_that_holds_no_process_itself_they_are_made_there(place: Path) -> None:
    with a_subtree(place) as top:
        own = top / "daemon"
        own.mkdir()
        assert shell(IN_PART.format(own=own)).stdout == f"made in {own}\n"
        os.setxattr(top, "user.delegate", b"1")
        assert shell(IN_PART.format(own=own)).stdout == f"made in {top}\n"
        sleeper = subprocess.Popen(["sleep", "600"])
        (top / "cgroup.procs").write_text(str(sleeper.pid))
        assert shell(IN_PART.format(own=own)).stdout == f"made in {own}\n", "it holds a process"
        sleeper.kill()
        sleeper.wait()


def test_controllers_are_for_groups_that_hold_no_process_themselves(place: Path) -> None:
    known = (place / "cgroup.controllers").read_text().split()
    if not known:
        pytest.skip("cgroup v2 has no controllers here, so their delegation is NOT shown")
    with a_subtree(place) as top:
        if not enable(place, known[0]):
            pytest.skip(f"{place} cannot pass on a controller, so delegation is NOT shown")
        sleeper = subprocess.Popen(["sleep", "600"])
        (top / "cgroup.procs").write_text(str(sleeper.pid))
        assert not enable(top, known[0])
        sleeper.kill()
        sleeper.wait()
        assert enable(top, known[0])
        (top / "inner").mkdir()
        assert known[0] in (top / "inner" / "cgroup.controllers").read_text()
    (place / "cgroup.subtree_control").write_text(f"-{known[0]}")


def test_the_sum_of_their_memory_is_limited(place: Path) -> None:
    group = make_side_group(64 << 20)
    try:
        if not group.limits_memory:
            known = (place / "cgroup.controllers").read_text().split()
            pytest.skip(f"no memory controller for groups in {place} (it has {known}), so memory.max is NOT shown")
        code = "import time\nx = bytearray(b'x') * (48 << 20)\nprint(1, flush=True)\ntime.sleep(600)"
        one = start(group, code)
        assert first_line(one) == "1"
        other = start(group, code)
        assert first_line(other) == "" or one.wait(10) == -signal.SIGKILL
    finally:
        group.close()


def test_a_mount_whose_name_is_no_text_is_no_trouble(tmp_path: Path) -> None:
    place = f"{tmp_path}/$'\\xff'"
    done = shell(f'mkdir {place} && mount -t tmpfs none {place} && "$PYTHON" -c "$MAKE"', "unshare", "--mount")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_where_groups_compete_for_the_core_it_yields_as_a_whole(place: Path) -> None:
    group = make_side_group()
    try:
        if not (group.path / "cpu.weight").exists():
            pytest.skip(f"no CPU controller for groups in {place}, so that they yield as a whole is NOT shown")
        assert (group.path / "cpu.idle").read_text() == "1\n"
    finally:
        group.close()
