"""Studies that wait for devices: `squeezer submit` puts them into a directory, and side tasks take turns at them.

STUDIES/queue/NAME/study.json           what was submitted
STUDIES/queue/NAME/used/WORKER.json     how long a worker has computed for it
STUDIES/queue/NAME/ended.json           that it is done, or why it has failed

Each file is replaced as a whole by one process, so hosts may share the directory without locks. WORKER is a hash: names
of workers are longer than those of files may be. What is noted names its submission by a key, so what a worker notes
late does not count for a study that was submitted again.
"""

import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_hooks.shared.private_file import check_ours, make_dir, write_text
from ds_hooks.shared.study_paths import directory_name, journal_path, trials_directory

SERVES_S = 180.0
"""A worker that has noted nothing for this long no longer serves the study."""

IDLE_S = 300.0
"""How long a worker leaves a study that has nothing to do for it, if another one waits, or whose storage is away."""

APART_S = 300.0
"""Clocks of hosts may be so far apart. What lies further ahead was noted before a clock was set back."""


class SubmissionError(Exception):
    """A study cannot be submitted or withdrawn; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A study that was submitted.

    Attributes:
        name: Optuna's name of it.
        study: the file.
        priority: of the studies that wait, only those of the highest priority are served.
        share: of the devices' time among studies of one priority, in proportion.
        submitted_s: when, in seconds since 1970.
        behind_s: how much time for each unit of share the others had had by then, so that it does not catch up on that.
        key: distinguishes it from others submitted under the same name.
    """

    name: str
    study: Path
    priority: int = 0
    share: float = 1.0
    submitted_s: float = 0.0
    behind_s: float = 0.0
    key: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """What one worker has done for a study.

    Attributes:
        used_s: how long its device has computed.
        until_s: when it will have noted more, if it lives, in seconds since 1970; 0: it serves others now.
        reason: why its last process could not train the study; empty: it could.
        idle_until_s: until then it leaves the study, which had nothing to do for it, to others.
    """

    used_s: float = 0.0
    until_s: float = 0.0
    reason: str = ""
    idle_until_s: float = 0.0

    def serves(self, now_s: float) -> bool:
        """Whether the worker trains the study now."""
        return now_s < self.until_s <= now_s + SERVES_S + APART_S

    def is_idle(self, now_s: float) -> bool:
        """Whether the worker leaves it to others now."""
        return now_s < self.idle_until_s <= now_s + IDLE_S


class Submissions:
    """The studies in a directory.

    Args:
        studies: the directory.
    """

    def __init__(self, studies: Path) -> None:
        self._studies, self._directory = studies, studies / "queue"

    def submit(self, submission: Submission) -> None:
        """Add a study. One that has ended may be added again.

        Raises:
            SubmissionError: a study of that name is already waiting, or the name is not allowed.
            OSError: the directory cannot be written.
        """
        name = submission.name
        taken = {self._studies, self._studies.parent, self._directory, journal_path(self._studies)}
        if not name.strip(".") or Path(os.path.normpath(trials_directory(self._studies, name))) in taken:
            raise SubmissionError(f"a study cannot be called '{name}'; allowed: another --study-name")
        if any(each.name == name for each in self.waiting()):
            raise SubmissionError(f"a study '{name}' is already waiting; allowed: another --study-name")
        for directory in (self._studies, self._directory, self._of(name)):
            make_dir(directory)
        others = [each for each in self.waiting() if each.priority == submission.priority]
        record = asdict(submission) | {
            "study": str(submission.study),
            "submitted_s": time.time(),
            "behind_s": min((self._time_per_share_s(each, self.used(each)) for each in others), default=0.0),
            "key": uuid.uuid4().hex,
        }
        self._write(name, "study.json", record)

    def withdraw(self, name: str) -> None:
        """End a study. Its trials so far are kept.

        Raises:
            SubmissionError: none of that name waits.
        """
        found = next((each for each in self.waiting() if each.name == name), None)
        if found is None:
            raise SubmissionError(f"no study '{name}' waits in {self._directory}")
        self.end(found, "withdrawn")

    def end(self, submission: Submission, how: str) -> None:
        """Note that no process need serve a study any more: "done", "withdrawn", or why it has failed."""
        self._write(submission.name, "ended.json", {"key": submission.key, "how": how})

    def ended(self, submission: Submission) -> str | None:
        """How a study has ended; None: it waits, or is served."""
        ended = self._read(submission.name, "ended.json")
        return None if ended is None or ended.get("key") != submission.key else str(ended.get("how"))

    def submissions(self) -> list[Submission]:
        """All studies, the first submitted first."""
        return sorted(self._all(), key=lambda each: each.submitted_s)

    def waiting(self) -> list[Submission]:
        """Those that have not ended."""
        return [each for each in self.submissions() if self.ended(each) is None]

    def used(self, submission: Submission) -> dict[str, Used]:
        """What each worker has done for a study."""
        folder = self._of(submission.name) / "used"
        found = [self._read(submission.name, f"used/{file.name}") for file in _files(folder) if file.suffix == ".json"]
        ours = [record for record in found if record is not None and record.get("key") == submission.key]
        return {str(record.get("worker")): used for record in ours if (used := _as_used(record)) is not None}

    def note(self, submission: Submission, worker: str, used: Used) -> None:
        """Write what this worker has done for a study."""
        make_dir(self._of(submission.name) / "used")
        file = f"used/{hashlib.sha256(worker.encode()).hexdigest()[:32]}.json"
        self._write(submission.name, file, asdict(used) | {"key": submission.key, "worker": worker})

    def next(self, worker: str, turn_s: float, now_s: float | None = None) -> Submission | None:
        """Return the study that `worker` should serve; None: none waits for it.

        Of those with the highest priority it is the one that has had the least time, measured by its share. A turn
        that another worker is having at it counts as if it were over.

        Args:
            worker: its name.
            turn_s: how long a turn takes.
            now_s: the time, in seconds since 1970.
        """
        now_s = time.time() if now_s is None else now_s
        used = {each: self.used(each) for each in self.waiting()}
        free = [each for each, by in used.items() if not by.get(worker, Used()).is_idle(now_s)]
        highest = [each for each in free if each.priority == max(other.priority for other in free)]

        def time_per_share_s(each: Submission) -> float:
            serving = sum(of.serves(now_s) for other, of in used[each].items() if other != worker)
            return self._time_per_share_s(each, used[each], serving * turn_s)

        return min(highest, key=time_per_share_s, default=None)

    @staticmethod
    def _time_per_share_s(submission: Submission, used: dict[str, Used], further_s: float = 0.0) -> float:
        return submission.behind_s + (sum(of.used_s for of in used.values()) + further_s) / submission.share

    def _all(self) -> Iterator[Submission]:
        for file in _files(self._directory):
            record = self._read(file, "study.json")
            found = None if record is None else _as_submission(record)
            if found is not None and self._of(found.name) == file:  # no copy of another one
                yield found

    def _of(self, name: str) -> Path:
        return self._directory / directory_name(name)

    def _read(self, of: str | Path, file: str) -> dict[str, Any] | None:
        path = (of if isinstance(of, Path) else self._of(of)) / file
        try:
            check_ours(path)  # what is in it is run
            record = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):  # whatever else lies there
            return None
        return record if isinstance(record, dict) else None

    def _write(self, name: str, file: str, record: dict[str, Any]) -> None:
        path = self._of(name) / file
        written = path.with_name(f"{uuid.uuid4().hex}.tmp")
        try:
            write_text(written, json.dumps(record))
            os.replace(written, path)
        except OSError:
            with suppress(OSError):
                written.unlink(missing_ok=True)
            raise


def _as_submission(record: dict[str, Any]) -> Submission | None:
    """What a file says; None: no process of ours has written it."""
    try:
        share, submitted_s, behind_s = (float(record[each]) for each in ("share", "submitted_s", "behind_s"))
        found = Submission(
            name=str(record["name"]),
            study=Path(record["study"]),
            priority=int(record["priority"]),
            share=share,
            submitted_s=submitted_s,
            behind_s=behind_s,
            key=str(record["key"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return found if share > 0 and all(map(math.isfinite, (share, submitted_s, behind_s))) else None


def _as_used(record: dict[str, Any]) -> Used | None:
    """The same for what a worker has noted."""
    try:
        return Used(
            used_s=float(record["used_s"]),
            until_s=float(record["until_s"]),
            reason=str(record["reason"]),
            idle_until_s=float(record["idle_until_s"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
