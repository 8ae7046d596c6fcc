"""`squeezer submit` and `squeezer queue`: studies for daemons that serve a queue, and how far they are."""

import time
from pathlib import Path

from ds_hooks.shared.study_queue import Submission, SubmissionError, Submissions


def main_submit(submission: Submission, studies: Path) -> int:
    """Put a study into the queue in `studies`.

    Raises:
        SubmissionError: one of its name waits there already, or there is no such file.
        OSError: the directory cannot be written.
    """
    Submissions(studies).submit(submission)
    print(f"Study {submission.name} waits for its first turn; see: squeezer queue {studies}")
    return 0


def main_queue(studies: Path, withdraw: str | None = None) -> int:
    """Print the studies in the queue in `studies`, after having withdrawn one.

    Raises:
        SubmissionError: there is no such study, or no such directory.
    """
    if not studies.is_dir():
        raise SubmissionError(f"there is no directory {studies}")
    submissions = Submissions(studies)
    if withdraw is not None:
        submissions.withdraw(withdraw)
    found = submissions.submissions()
    width = max([len(each.name) for each in found] + [len("study")])
    print(f"{'study':<{width}} {'priority':>8} {'share':>6} {'device time':>12}  state")
    for each in found:
        used = submissions.used(each)
        used_s = sum(of.used_s for of in used.values())
        row = f"{each.name:<{width}} {each.priority:>8} {each.share:>6g} {_duration(used_s):>12}"
        serving = sum(of.serves(time.time()) for of in used.values())
        trains = f"trains on {serving} device{'s' * (serving != 1)}" if serving else "waits"
        reason = next((f": {of.reason}" for of in used.values() if of.reason), "")
        print(f"{row}  {submissions.ended(each) or trains + reason}")
    return 0


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
