"""Real DeepSpeed jobs for tests: two ranks on the CPU, each on a core of its own, with a small model."""

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ds_hooks.shared.page.file import Page, PageError, page_path
from ds_hooks.shared.page.layout import Field, Role
from ds_hooks.shared.unit_record import UNIT_RECORD
from launch.rank import CONFIG, RUN
from squeezer.records.layout import events_path, units_path
from squeezer.records.reader import read_details, read_events
from tests.support.paths import ROOT, STUDIES
from tests.support.sandbox import stat, wait_for

PRETRAIN, DENOISE = (ROOT / "examples" / f"{job}.py" for job in ("pretrain", "denoise"))
PATIENT = str(ROOT / "tests" / "support" / "patient.py")
"""To be put before a training script, whose steps then wait until every rank has been squeezed."""
NARROW = 64
"""A width of the example's model at which most of a step is what the hooks look at: waits and instructions."""
STEPS_ALONE = 40
"""How many steps' losses the fixture `alone` has."""
STARTING_S = 300.0
"""DeepSpeed compiles an operation in its first run on a machine."""

SQUEEZE_ALL = f"""
[squeeze]
alone_share = 0.0
min_bubble_ms = 0.1
[guard]
enabled = false
[side]
study = "{STUDIES / "endless.py"}"
[run]
directory = "run"
calibrate_s = 0.0
"""
"""A configuration with which every step is squeezed, and all bubbles that an endless study can use."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a job left."""

    status: int
    output: str
    losses: list[str]


@dataclass(frozen=True, slots=True)
class SqueezedRun:
    """A squeezed job that has ended well.

    Attributes:
        record: the run's directory.
        ended: what the job left.
    """

    record: Path
    ended: Ended


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def short_directory() -> Iterator[Path]:
    """A private directory whose path is short enough for sockets; it must be empty or gone at the end."""
    path = Path(tempfile.mkdtemp(prefix="bsq-", dir="/tmp"))
    yield path
    left = [str(found) for found in path.rglob("*")] if path.exists() else []
    assert left == [], "left behind"
    if path.exists():
        path.rmdir()


def environment(directory: Path) -> dict[str, str]:
    """The environment of a job whose pages and sockets are in `directory`."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    named = {"DS_ACCELERATOR": "cpu", "SQUEEZER_DIR": str(directory), "PATH": tools, "PYTHONPATH": paths}
    return {**os.environ, **named, "OMP_NUM_THREADS": "1"}


def deepspeed(*arguments: str) -> list[str]:
    """DeepSpeed's own command for two ranks on a free port."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
    return [*launcher, "--master_port", str(free_port()), *arguments]


def two_ranks(*arguments: str) -> list[str]:
    """What DeepSpeed's command does, for the many tests that are not about its launcher: sooner."""
    return [
        sys.executable,
        str(ROOT / "tests" / "support" / "two_ranks.py"),
        "--master_port",
        str(free_port()),
        *arguments,
    ]


def run_squeezed(config: Path, records: Path, directory: Path, losses: Path, *script: str) -> Ended:
    """Run a job and its daemons to their end as `ds_squeeze` does, but sooner: without DeepSpeed's launcher.

    Args:
        config: the squeezer file.
        records: the run's directory.
        directory: of pages and sockets.
        losses: where the script writes them; it runs in that folder.
        script: the training script, and its arguments.
    """
    names = {CONFIG: str(config), RUN: str(records)}
    return run(two_ranks(str(ROOT / "launch" / "rank.py"), *script), directory, losses, **names)


def ds_squeeze(config: Path, *arguments: str) -> list[str]:
    """Our command for two ranks."""
    return [sys.executable, "-m", "launch.ds_squeeze", "--squeezer", str(config), "--num_accelerators", "2", *arguments]


def pretrain(losses: Path, steps: int, width: int = 128) -> list[str]:
    """The example's training script, small."""
    return [str(PRETRAIN), "--steps", str(steps), "--width", str(width), "--losses", str(losses)]


def denoise(losses: Path, steps: int) -> list[str]:
    """The other example's training script, small."""
    return [str(DENOISE), "--steps", str(steps), "--width", "16", "--losses", str(losses)]


def run(command: list[str], directory: Path, losses: Path, **names: str) -> Ended:
    """Run a job to its end, and that of all that writes to its output; `names` are added to its environment."""
    done = subprocess.run(
        command,
        env={**environment(directory), **names},
        cwd=losses.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STARTING_S,
    )
    if "--master_port" in command:  # DeepSpeed leaves 66 MiB per rank and port
        port = command[command.index("--master_port") + 1]
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            left.unlink(missing_ok=True)
    found = losses.read_text().split() if losses.exists() else []
    return Ended(done.returncode, done.stdout, found)


def squeeze_patiently(base: Path, steps: int = 120, width: int = NARROW) -> SqueezedRun:
    """Run a job whose ranks are both squeezed, with some steps left alone; its files are in `base`."""
    config = base / "squeezer.toml"
    config.write_text(
        f"""
[squeeze]
min_bubble_ms = 0.1
alone_share = 0.3
[guard]
enabled = false
[side]
study = "{STUDIES / "endless.py"}"
[run]
directory = "run"
trace_steps = 1000
calibrate_s = 0.5
"""
    )
    with short_directory() as directory:
        ended = run(ds_squeeze(config, PATIENT, *pretrain(base / "losses", steps, width)), directory, base / "losses")
    assert ended.status == 0, ended.output
    return SqueezedRun(base / "run", ended)


def units_outside_bubbles(record: Path, rank: int) -> list[int]:
    """How long before a bubble's start, or after its end, units of `rank`'s side task began, in ns; it ran many.

    Those that began after the main job's end do not count: what goes on is finished then.
    """
    events = [*read_events(events_path(record, rank)), *read_details(record, rank)]
    bubbles = sorted((e["start_ns"], e["end_ns"]) for e in events if e["r"] == "bubble" and e["squeezed"] is not False)
    over_ns = next((e["t_ns"] for e in events if e.get("event") == "asked_to_end" and not e["beside_main"]), math.inf)
    starts_ns = [start_ns for start_ns, *_ in UNIT_RECORD.iter_unpack(units_path(record, rank).read_bytes())]
    assert len(starts_ns) > 50, "the side task ran"
    opened_ns = [start_ns for start_ns, _ in bubbles]
    found = []
    for start_ns in (each for each in starts_ns if each < over_ns):
        index = bisect_right(opened_ns, start_ns) - 1
        late_ns = start_ns - bubbles[index][1] if index >= 0 else start_ns - opened_ns[0]
        if index < 0 or late_ns > 0:
            found.append(late_ns)
    return found


class KillInBubble(threading.Thread):
    """Kills one rank's daemon or side task by SIGKILL in the middle of a bubble in which the side task runs.

    Args:
        directory: where the run's pages are (below it).
        role: whom to kill.
        step: not before this step of the main job.
        device: that of the rank.
    """

    def __init__(self, directory: Path, role: Role, step: int, device: int = 0) -> None:
        super().__init__(daemon=True)
        self._directory, self._role, self._step, self._device = directory, role, step, device
        self.pid = 0
        """Of the one that was killed, in the middle of a bubble; 0: none yet."""

    def run(self) -> None:
        page = self._find_page()
        deadline_s = time.monotonic() + STARTING_S
        while not self.pid and time.monotonic() < deadline_s:
            if self._is_middle(page.words):
                self._kill(page.words)
            time.sleep(0.0005)
        page.close()

    def _is_middle(self, words: memoryview) -> bool:
        running = words[Field.SIDE_ACTIVITY] and time.monotonic_ns() < words[Field.PERMIT_UNTIL_NS]
        return bool(words[Field.BUBBLE] & 1 and running and words[Field.STEP] >= self._step)

    def _kill(self, words: memoryview) -> None:
        """If the bubble is still open when the main job, which would end it, holds still."""
        main, victim = words[Role.MAIN], words[self._role]
        if not main or not victim:
            return  # one of them leaves, and 0 would be all of the test
        os.kill(main, signal.SIGSTOP)
        try:
            wait_for(lambda: stat(main)[:1] in (["T"], []), "the main job to hold still")
            if self._is_middle(words):
                os.kill(victim, signal.SIGKILL)
                self.pid = victim
        finally:
            os.kill(main, signal.SIGCONT)

    def _find_page(self) -> Page:
        while True:
            for path in self._directory.rglob(page_path(Path(), self._device).name):
                try:
                    return Page.open(path, create=False)
                except PageError:
                    continue
            time.sleep(0.05)
