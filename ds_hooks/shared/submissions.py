"""Studies that wait for devices: `squeezer submit` puts them into a directory, and side tasks take turns at them.

STUDIES/queue/NAME/study.json           what was submitted
STUDIES/queue/NAME/used/WORKER.json     how long a worker has computed for it
STUDIES/queue/NAME/ended.json           that it is done, or why it has failed

Each file is replaced as a whole by one process, so hosts may share the directory without locks.
"""

import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ds_hooks.shared.private_file import check_ours, make_dir, write_text

SERVES_S = 180.0
"""A worker that has noted nothing for so long serves the study no more."""

MOST_DEATHS = 3
"""A study has failed once so many of a worker's processes in a row died in it before they noted anything."""


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
    """

    name: str
    study: Path
    priority: int = 0
    share: float = 1.0
    submitted_s: float = 0.0
    behind_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """What one worker has done for a study.

    Attributes:
        used_s: how long its device has computed.
        until_s: when it will have noted more, if it lives, in seconds since 1970; 0: it serves others now.
        deaths: how many of its processes in a row began, and noted nothing.
        reason: what the last of them said.
        idle_until_s: until then it leaves the study, which had nothing to do for it, to others.
    """

    used_s: float = 0.0
    until_s: float = 0.0
    deaths: int = 0
    reason: str = ""
    idle_until_s: float = 0.0


class Submissions:
    """The studies in a directory.

    Args:
        studies: the directory.
    """

    def __init__(self, studies: Path) -> None:
        self._directory = studies / "queue"

    def submit(self, submission: Submission) -> None:
        """Add a study, or one that has ended once more.

        Raises:
            SubmissionError: one of its name waits already.
            OSError: the directory cannot be written.
        """
        for directory in (self._directory.parent, self._directory, self._of(submission.name)):
            make_dir(directory)
        if (self._of(submission.name) / "study.json").exists() and self.ended(submission.name) is None:
            raise SubmissionError(f"a study '{submission.name}' waits already; allowed: another --study-name")
        for file in (self._of(submission.name) / "used").glob("*.json"):  # of the time before it ended
            file.unlink(missing_ok=True)
        others = [each for each in self.waiting() if each.priority == submission.priority]
        behind_s = min((self._time_per_share_s(each, self.used(each.name)) for each in others), default=0.0)
        record = asdict(submission) | {
            "study": str(submission.study),
            "submitted_s": time.time(),
            "behind_s": behind_s,
        }
        self._write(submission.name, "study.json", record)
        (self._of(submission.name) / "ended.json").unlink(missing_ok=True)

    def withdraw(self, name: str) -> None:
        """End a study. Its trials so far are kept.

        Raises:
            SubmissionError: none of that name waits.
        """
        if name not in {each.name for each in self.waiting()}:
            raise SubmissionError(f"no study '{name}' waits in {self._directory}")
        self.end(name, "withdrawn")

    def end(self, name: str, how: str) -> None:
        """Note that no process need serve a study any more: "done", "withdrawn", or why it has failed."""
        self._write(name, "ended.json", {"how": how})

    def ended(self, name: str) -> str | None:
        """How a study has ended; None: it waits, or is served."""
        ended = self._read(name, "ended.json")
        return None if ended is None else str(ended.get("how"))

    def submissions(self) -> list[Submission]:
        """All studies, the first submitted first."""
        return sorted(self._all(), key=lambda each: each.submitted_s)

    def waiting(self) -> list[Submission]:
        """Those that have not ended."""
        return [each for each in self.submissions() if self.ended(each.name) is None]

    def used(self, name: str) -> dict[str, Used]:
        """What each worker has done for a study."""
        folder = self._of(name) / "used"
        found = {file.stem: self._read(name, f"used/{file.name}") for file in _files(folder)}
        return {unquote(worker): Used(**used) for worker, used in found.items() if used is not None}

    def note(self, name: str, worker: str, used: Used) -> None:
        """Write what this worker has done for a study."""
        make_dir(self._of(name) / "used")
        self._write(name, f"used/{quote(worker, safe='')}.json", asdict(used))

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
        used = {each: self.used(each.name) for each in self.waiting()}
        free = [each for each, by in used.items() if by.get(worker, Used()).idle_until_s <= now_s]
        highest = [each for each in free if each.priority == max(other.priority for other in free)]

        def time_per_share_s(each: Submission) -> float:
            serving = sum(of.until_s > now_s for other, of in used[each].items() if other != worker)
            return self._time_per_share_s(each, used[each], serving * turn_s)

        return min(highest, key=time_per_share_s, default=None)

    @staticmethod
    def _time_per_share_s(submission: Submission, used: dict[str, Used], further_s: float = 0.0) -> float:
        return submission.behind_s + (sum(of.used_s for of in used.values()) + further_s) / submission.share

    def _all(self) -> Iterator[Submission]:
        for folder in _files(self._directory):
            record = self._read(unquote(folder.name), "study.json")
            if record is not None:
                yield Submission(**{**record, "study": Path(record["study"])})

    def _of(self, name: str) -> Path:
        return self._directory / quote(name, safe="")

    def _read(self, name: str, file: str) -> dict[str, Any] | None:
        path = self._of(name) / file
        try:
            check_ours(path)  # what is in it is run
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError, ValueError):  # whatever else lies there
            return None

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


def _files(folder: Path) -> list[Path]:
    try:
        return [file for file in folder.iterdir() if not file.name.endswith(".tmp")]
    except (FileNotFoundError, NotADirectoryError):
        return []
