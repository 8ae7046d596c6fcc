"""Studies that take turns: which is next, and what is kept of each."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hooks.shared.study_queue import Submission, SubmissionError, Submissions, Used
from squeezer.queue_commands import main_queue

NOW_S, TURN_S = 1e9, 600.0
FILE = Path("/somewhere/study.py")


def submitted(folder: Path, *studies: Submission) -> Submissions:
    submissions = Submissions(folder)
    for study in studies:
        submissions.submit(study)
    return submissions


def study(name: str, priority: int = 0, share: float = 1.0) -> Submission:
    return Submission(name=name, study=FILE, priority=priority, share=share)


def named(submissions: Submissions, name: str) -> Submission:
    return next(each for each in submissions.submissions() if each.name == name)


def following(submissions: Submissions, worker: str = "w") -> str | None:
    found = submissions.next(worker, TURN_S, NOW_S)
    return None if found is None else found.name


def test_what_is_submitted_is_kept_and_the_first_is_first(tmp_path: Path) -> None:
    submissions = submitted(tmp_path / "new" / "queue", study("../b c", share=0.5), study("a", 3))
    assert [each.name for each in submissions.waiting()] == ["../b c", "a"]
    kept = submissions.waiting()[0]
    assert (kept.study, kept.priority, kept.share) == (FILE, 0, 0.5)
    assert not (tmp_path / "new" / "b c").exists(), "a name is no path"


def test_an_empty_or_missing_queue_has_nothing(tmp_path: Path) -> None:
    assert following(Submissions(tmp_path / "nowhere")) is None
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "note.txt").touch()
    (tmp_path / "queue" / "half").mkdir()
    assert following(Submissions(tmp_path)) is None


def test_a_name_waits_once_until_it_has_ended(tmp_path: Path) -> None:
    submissions = submitted(tmp_path, study("a"))
    with pytest.raises(SubmissionError, match="'a' is already waiting; allowed: another --study-name"):
        submissions.submit(study("a"))
    submissions.note(named(submissions, "a"), "w", Used(used_s=5.0))
    submissions.end(named(submissions, "a"), "done")
    assert following(submissions) is None and submissions.ended(named(submissions, "a")) == "done"
    submissions.submit(study("a"))
    assert following(submissions) == "a" and submissions.used(named(submissions, "a")) == {}


def test_a_study_is_withdrawn(tmp_path: Path) -> None:
    submissions = submitted(tmp_path, study("a"), study("b"))
    submissions.withdraw("a")
    assert following(submissions) == "b" and submissions.ended(named(submissions, "a")) == "withdrawn"
    with pytest.raises(SubmissionError, match="no study 'a' waits"):
        submissions.withdraw("a")


def test_the_highest_priority_goes_first(tmp_path: Path) -> None:
    submissions = submitted(tmp_path, study("low"), study("high", 5), study("middle", 3))
    submissions.note(named(submissions, "high"), "w", Used(used_s=1e6))
    assert following(submissions) == "high"
    submissions.end(named(submissions, "high"), "done")
    assert following(submissions) == "middle"


@settings(max_examples=8, deadline=None)
@given(shares=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=4), workers=st.integers(1, 5))
def test_turns_add_up_to_the_shares(
    shares: list[float], workers: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However many workers take turns, each study is within one round of its share."""
    names = [f"s{number}" for number in range(len(shares))]
    folder = tmp_path_factory.mktemp("queue")
    submissions = submitted(folder, *(study(n, share=share) for n, share in zip(names, shares, strict=True)))
    turns: Counter[str] = Counter()
    used: Counter[tuple[str, int]] = Counter()
    rounds = 12
    for _ in range(rounds):
        chosen = []
        for worker in range(workers):
            name = following(submissions, f"w{worker}")
            assert name is not None
            before = used[name, worker] * TURN_S
            submissions.note(named(submissions, name), f"w{worker}", Used(used_s=before, until_s=NOW_S + 1))
            chosen.append(name)
        for worker, name in enumerate(chosen):
            used[name, worker] += 1
            turns[name] += 1
            submissions.note(named(submissions, name), f"w{worker}", Used(used_s=used[name, worker] * TURN_S))
    for name, share in zip(names, shares, strict=True):
        fair = rounds * workers * share / sum(shares)
        assert abs(turns[name] - fair) <= workers + max(shares) / min(shares)


def test_a_turn_that_others_are_having_counts(tmp_path: Path) -> None:
    submissions = submitted(tmp_path, study("a"), study("b"))
    submissions.note(named(submissions, "a"), "other", Used(until_s=NOW_S + 60))
    assert following(submissions) == "b"
    assert following(submissions, "other") == "a", "its own does not"
    submissions.note(named(submissions, "a"), "other", Used(until_s=NOW_S - 1))
    assert following(submissions) == "a", "the other one has died"


def test_a_study_without_work_is_left_to_others_for_a_while(tmp_path: Path) -> None:
    submissions = submitted(tmp_path, study("a", 1), study("b"))
    submissions.note(named(submissions, "a"), "w", Used(idle_until_s=NOW_S + 60))
    assert following(submissions) == "b" and following(submissions, "other") == "a"
    submissions.note(named(submissions, "a"), "w", Used(idle_until_s=NOW_S - 1))
    assert following(submissions) == "a"


def test_a_new_study_does_not_catch_up_on_what_others_had_before_it(tmp_path: Path) -> None:
    submissions = submitted(tmp_path, study("old", share=2.0))
    submissions.note(named(submissions, "old"), "w", Used(used_s=2 * 86400.0))
    submissions.submit(study("new"))
    submissions.note(named(submissions, "new"), "w", Used(used_s=TURN_S))
    assert following(submissions) == "old"


def test_what_another_user_has_laid_is_not_run(tmp_path: Path) -> None:
    submissions = submitted(tmp_path, study("a"))
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    tmp_path.chmod(0o777)
    os.chown(tmp_path / "queue", 12345, 12345)
    with pytest.raises(OSError, match="belongs to user 12345"):
        following(submissions)


def test_what_an_old_worker_notes_does_not_count_for_a_study_that_was_submitted_again(tmp_path: Path) -> None:
    submissions = submitted(tmp_path, study("a"))
    before = named(submissions, "a")
    submissions.withdraw("a")
    submissions.submit(study("a"))
    submissions.note(before, "w", Used(used_s=9.0))
    submissions.end(before, "done")
    again = named(submissions, "a")
    assert submissions.ended(again) is None and submissions.used(again) == {}
    assert following(submissions) == "a"


@pytest.mark.parametrize(
    "name", ["a.tmp", "x.json", "a/b", ".hidden", "größe 日本", "%2F", "a" * 200, "日本" * 100, "-x y"]
)
def test_a_study_may_be_called_almost_anything(name: str, tmp_path: Path) -> None:
    submissions = submitted(tmp_path, study(name))
    assert following(submissions) == name
    submissions.withdraw(name)
    assert following(submissions) is None


@pytest.mark.parametrize("name", ["", ".", "..", "queue", "study.journal"])
def test_no_study_is_called_like_what_lies_in_the_directory(name: str, tmp_path: Path) -> None:
    studies = tmp_path / "studies"
    with pytest.raises(SubmissionError, match="a study cannot be called"):
        Submissions(studies).submit(study(name))
    assert list(tmp_path.iterdir()) == []


def test_a_worker_may_have_a_long_name(tmp_path: Path) -> None:
    submissions = submitted(tmp_path, study("a"), study("b"))
    worker = "node7:/" + "scratch/größe/" * 20 + ":rank0"
    submissions.note(named(submissions, "a"), worker, Used(used_s=5.0))
    assert submissions.used(named(submissions, "a")) == {worker: Used(used_s=5.0)}
    assert following(submissions, worker) == "b"


@pytest.mark.parametrize(
    "content", ["", "[]", "7", "{}", '{"name": "a"}', '{"share": 0}', "\x00\x00", '{"used_s": "much"}']
)
def test_foreign_and_torn_files_are_passed_over(content: str, tmp_path: Path) -> None:
    submissions = submitted(tmp_path, study("a"), study("b"))
    folder = tmp_path / "queue" / "a"
    (folder / "used").mkdir()
    (folder / "used" / "w.json").write_text(content)
    (folder / "ended.json").write_text(content)
    assert following(submissions) == "a"
    (folder / "study.json").write_text(content)
    (tmp_path / "queue" / "c" / "study.json").mkdir(parents=True)
    assert following(submissions) == "b"


def test_a_copied_directory_is_no_study(tmp_path: Path) -> None:
    submissions = submitted(tmp_path, study("a"))
    shutil.copytree(tmp_path / "queue" / "a", tmp_path / "queue" / "copy of a")
    assert [each.name for each in submissions.submissions()] == ["a"]


@pytest.mark.parametrize("key", ["share", "behind_s", "submitted_s", "priority"])
@pytest.mark.parametrize("value", [None, "x", float("nan"), float("inf"), []])
def test_a_record_with_a_senseless_value_is_passed_over(key: str, value: object, tmp_path: Path) -> None:
    submissions = submitted(tmp_path, study("a"))
    file = tmp_path / "queue" / "a" / "study.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    assert submissions.submissions() == []


def test_a_clock_that_was_set_back_leaves_no_study_untrained(tmp_path: Path) -> None:
    submissions = submitted(tmp_path, study("a"), study("b"))
    a = named(submissions, "a")
    submissions.note(a, "w", Used(idle_until_s=NOW_S + 3600.0))
    assert following(submissions) == "a"
    submissions.note(a, "w", Used())
    submissions.note(a, "died", Used(until_s=NOW_S + 3600.0))
    assert following(submissions) == "a"
    submissions.note(a, "lives on a host whose clock is ahead", Used(until_s=NOW_S + 400.0))
    assert following(submissions) == "b"


def test_a_queue_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(SubmissionError, match=r"there is no directory .*typo"):
        main_queue(tmp_path / "typo")
