"""What a side task asks of the kernel for the processes that it forks: real ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import make_private_dir, page_path

FORKS = """
import ctypes, json, os, signal, sys, threading
from pathlib import Path
from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.page.file import Page
from trials.gate.base import block_signals
from trials.gate.process import has_children, keep_forks

block_signals()
os.setpgid(0, 0)
page = Page.open(Path(sys.argv[1]))
words = page.words
keep_forks(words)
found = {"children before": has_children()}


def fork(name, then=lambda: None):
    says, hears = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal_number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(signal_number))
        facts = {
            "class": os.sched_getscheduler(0),
            "dies": signal_number.value,
            "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "named": os.getpid() in words[Field.FORKED_PROCESSES : Field.FOUND_PROCESSES].tolist(),
        }
        os.write(hears, json.dumps(facts).encode())
        then()
        os.read(lives, 1)
        os._exit(0)
    found[name] = json.loads(os.read(says, 1000))
    return pid


lives, ends = os.pipe()
pids = [fork("main thread")]
found["children"] = has_children()
thread = threading.Thread(target=lambda: pids.append(fork("thread")))
thread.start()
thread.join()
found["forks"], found["stopped with them"] = words[Field.SIDE_FORKS], words[Field.SIDE_CHILDREN]
os.write(ends, b"..")
for pid in pids:
    os.waitpid(pid, 0)
found["children after"] = has_children()
page.close()
if os.fork() == 0:
    os._exit(0)
found["without a page"] = os.waitstatus_to_exitcode(os.wait()[1])
print(json.dumps(found))
"""


def test_what_is_forked_has_idle_time_only_ends_with_it_and_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKS, str(page_path(make_private_dir(tmp_path / "pages"), 0))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    kept = {"class": 5, "dies": 9, "blocked": 0, "named": True}  # SCHED_IDLE, SIGKILL
    assert found.pop("main thread") == kept
    assert found.pop("thread") == {**kept, "dies": 0}, "that thread may end long before the process"
    assert found == {
        "children before": False,
        "children": True,
        "forks": 2,
        "stopped with them": 1,
        "children after": False,
        "without a page": 0,
    }


PRIORITY = """
import os, sys, threading
from trials.gate.process import PRIORITIES

before, asked, later = threading.Event(), threading.Event(), threading.Event()
ids = [os.getpid()]


def be_there(until):
    ids.append(threading.get_native_id())
    before.set()
    until.wait()


threading.Thread(target=be_there, args=(later,)).start()
before.wait()
PRIORITIES[sys.argv[1]]()
before.clear()
threading.Thread(target=be_there, args=(later,)).start()
before.wait()
print([(os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)) for thread in ids])
later.set()
"""


OWN_NICENESS = os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize(
    ("priority", "expected"), [("idle", (os.SCHED_IDLE, OWN_NICENESS)), ("nice", (os.SCHED_OTHER, 19))]
)
def test_a_priority_holds_for_all_threads_whenever_they_started(priority: str, expected: tuple[int, int]) -> None:
    command = [sys.executable, "-c", PRIORITY, priority]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str([expected] * 3)


LIMITED = """
import os
from pathlib import Path
from trials.gate.process import limit_memory

(held_kb,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line[:7] == "VmData:")
limit_memory((int(held_kb) << 10) + (64 << 20))


def fits(megabytes):
    try:
        return bool(bytearray(megabytes << 20))
    except MemoryError:
        return False


print(fits(16), fits(128), flush=True)
if os.fork() == 0:
    print(fits(16), fits(128), flush=True)
    os._exit(0)
os.wait()
"""


def test_beyond_its_limit_it_and_what_it_forks_get_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["True False"] * 2
