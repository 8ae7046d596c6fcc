"""What of the search worker may run while the main job wants its core, and what it says of errors."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support.logged import logged
from tests.support.simulated import Pretended
from trials.search import worker_process
from trials.search.worker import WorkerConfig
from trials.search.worker_process import leave_the_core


@pytest.mark.parametrize(
    ("storage", "is_idle"),
    [
        ("/tmp/study.journal", True),
        ("sqlite:////tmp/study.db", True),
        ("postgresql+psycopg://one@db/study", False),
        ("mysql+pymysql://one@db/study", False),
    ],
)
def test_only_a_lock_that_other_hosts_wait_for_is_held_outside_idle_time(storage: str, is_idle: bool) -> None:
    usual = os.sched_getscheduler(0)
    with ThreadPoolExecutor(1) as asking, ThreadPoolExecutor(1) as holder:
        holder.submit(int).result()
        asking.submit(leave_the_core, holder, storage).result()
        assert asking.submit(os.sched_getscheduler, 0).result() == os.SCHED_IDLE
        assert holder.submit(os.sched_getscheduler, 0).result() == (os.SCHED_IDLE if is_idle else usual)
    assert os.sched_getscheduler(0) == usual


def test_an_error_of_whatever_kind_is_told_without_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> NoReturn:
        raise RuntimeError("postgresql://me:s3cr3t@host is odd")

    monkeypatch.setattr(worker_process, "SearchWorker", fails)
    monkeypatch.setattr(worker_process, "die_with_parent", lambda: None)
    config = WorkerConfig(storage=str(tmp_path / "study.journal"), study_name="s", worker="w", directory=tmp_path)
    answers = StringIO()
    with logged(), pytest.raises(RuntimeError):
        worker_process.serve(Pretended(2), config, StringIO(), answers, attached=lambda: False)
    assert json.loads(answers.getvalue())["error"].endswith("postgresql://me:***@host is odd")
