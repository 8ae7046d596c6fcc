"""Whole jobs in odd places, with little of what a machine has: the losses of any other place, and nothing left."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from squeezer.records.layout import units_path
from tests.support.jobs import (
    NARROW,
    PATIENT,
    SQUEEZE_ALL,
    STARTING_S,
    Ended,
    ds_squeeze,
    environment,
    pretrain,
    short_directory,
)
from tests.support.sandbox import Sandbox, wait_for
from tests.support.slow_cases import others_slow

pytestmark = [pytest.mark.integration, pytest.mark.alone]
STEPS = 24

ODD = "ü 日本 'a' \"b\" $HOME %d %(s)s [c]* \\ ; &"
LONG = Path("long" * 60)
"""SQLite opens no path of more than 512 bytes, so a study could not train in longer ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a job runs.

    Attributes:
        folder: in which it starts, below the test's own.
        before: a shell's commands before it; they may put others before the command, by `set --`.
        environment: added to the usual one; an empty text takes a name out.
        tried: what must be allowed here; else the test is skipped.
        squeezes: whether side tasks can run there.
        says: what the job must say.
    """

    folder: Path = Path()
    before: str = "true"
    environment: Mapping[str, str] = field(default_factory=dict)
    tried: str = "true"
    squeezes: bool = True
    says: str = ""


NO_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NO_HOME = {"HOME": "/proc", "TMPDIR": "/none"}
OTHER = 54321
OTHER_UID = (
    f"setpriv --reuid {OTHER} --regid {OTHER} --clear-groups --inh-caps +dac_override --ambient-caps +dac_override"
)
"""Python may lie in root's home, so that user may read all."""
PLACES = {
    "all at once": Place(folder=LONG / ODD, before="ulimit -n 256 -f 200000", environment={**NO_UTF8, **NO_HOME}),
    "odd names": Place(folder=Path(ODD)),
    "a long name": Place(folder=LONG),
    "no UTF-8": Place(folder=Path(ODD), environment=NO_UTF8),
    "no home, and no folder for temporary files": Place(environment=NO_HOME),
    "few files": Place(before="ulimit -n 128"),
    "short files": Place(before="ulimit -f 100000"),
    "little memory": Place(before="ulimit -v 16000000"),
    "a user without a name": Place(
        before='unset HOME USER LOGNAME && set -- unshare --map-user=54321 --map-group=54321 "$@"',
        tried="unshare --map-user=54321 true",
    ),
    "another user, with few processes": Place(
        before=f'set -- prlimit --nproc=100 {OTHER_UID} "$@"',
        tried=f"{OTHER_UID} true",
        squeezes=False,
        says="more processes and threads (ulimit -u), which the training may need itself; allowed: 128 or more",
    ),
    "a PID namespace": Place(
        before='set -- unshare --pid --fork --mount-proc "$@"', tried="unshare --pid --fork --mount-proc true"
    ),
    "a PID namespace with another one's /proc": Place(
        before='set -- unshare --pid --fork "$@"',
        tried="unshare --pid --fork true",
        squeezes=False,
        says="/proc belongs to another PID namespace",
    ),
    "a small /dev/shm": Place(
        before='mount -t tmpfs -o size=300k,mode=1777 tmpfs /dev/shm && set -- "$@"', tried="unshare -m true"
    ),
}


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as made:
        yield made


def run_in(place: Place, base: Path, directory: Path) -> Ended:
    """Run a squeezed job there, with its files in `base`."""
    allowed = subprocess.run(["bash", "-c", place.tried], capture_output=True, text=True)
    if allowed.returncode:
        pytest.skip(f"{place.tried} is not allowed here, so this is NOT shown: {allowed.stderr.strip()}")
    (base / "squeezer.toml").write_text(SQUEEZE_ALL)
    apart = ["unshare", "-m"] if "mount -t" in place.before else []
    patient = [PATIENT] if place.squeezes else []
    command = ds_squeeze(Path("squeezer.toml"), *patient, *pretrain(Path("losses"), STEPS, NARROW))
    named = {**environment(directory), **place.environment}
    done = subprocess.run(
        [*apart, "bash", "-c", f'{place.before} && exec "$@"', "bash", *command],
        env={name: value for name, value in named.items() if value},
        cwd=base,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=STARTING_S,
    )
    losses = base / "losses"
    return Ended(done.returncode, done.stdout, losses.read_text().split() if losses.exists() else [])


@pytest.mark.parametrize("name", others_slow(PLACES, ["all at once"]))
def test_in_odd_places_a_job_computes_the_same_bits(
    alone: list[str], tmp_path: Path, directory: Path, name: str
) -> None:
    place = PLACES[name]
    base = tmp_path / place.folder
    base.mkdir(parents=True, exist_ok=True)
    if OTHER_UID in place.before:
        for each in (base, directory):
            os.chown(each, OTHER, OTHER)
    ended = run_in(place, base, directory)
    assert (ended.status, ended.losses) == (0, alone[:STEPS]), ended.output
    assert "Traceback" not in ended.output, ended.output
    assert place.says in ended.output
    for rank in (0, 1) if place.squeezes else ():
        path = units_path(base / "run", rank)
        assert path.exists() and path.stat().st_size, f"its side task ran\n{ended.output}"
    wait_for(lambda: not Sandbox(directory, tmp_path).living(), "the end of all processes")
