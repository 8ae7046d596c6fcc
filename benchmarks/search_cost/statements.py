"""How many statements of SQL per second a server takes from N search workers that never rest."""

import multiprocessing
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import optuna
import sqlalchemy as sa

from benchmarks.search_cost.simulated import FUSED, NAME, RANDOM, search_worker, searched, train_one
from trials.search.storage.claims import Claims, Sign
from trials.search.storage.database import connect

_ENDLESS = 10**9
_EPOCHS = 2, 4, 7, 10
"""After which a trial is scored."""


class Statements:
    """Counts what this process sends to databases: those of claims, and all."""

    def __init__(self) -> None:
        self.of_claims = self.count = 0

    def __enter__(self) -> Self:
        sa.event.listen(sa.Engine, "before_cursor_execute", self._counted)
        return self

    def __exit__(self, *_: object) -> None:
        sa.event.remove(sa.Engine, "before_cursor_execute", self._counted)

    def _counted(self, _connection: object, _cursor: object, statement: str, *_: object) -> None:
        self.count += 1
        self.of_claims += "squeezer_" in statement


def sustained(storage: str, directory: Path, workers: int, seconds: float, *, are_whole: bool) -> dict[str, Any]:
    """Let `workers` workers of one study train simulated trials, as fast as they can.

    Each holds as many trials as it would fuse, and gives signs of life.

    Args:
        storage: an empty database.
        directory: the study's.
        workers: how many processes.
        seconds: for how long.
        are_whole: whether they are search workers; else each makes the same claims, and nothing else.

    Returns:
        Per second: statements, those of them that are the claims', trials and reports.
    """
    fresh = multiprocessing.get_context("spawn")  # after a fork, PyTorch may wait for threads that are not there
    ready, results = fresh.Barrier(workers), fresh.SimpleQueue()
    arguments = (storage, directory, seconds, ready, results)
    with ExitStack() as stack:
        for index in range(workers):
            process = fresh.Process(target=_work if are_whole else _claim, args=(f"w{index}", *arguments), daemon=True)
            process.start()
            stack.callback(process.join)
        found = [results.get() for _ in range(workers)]
    return {"workers": workers, **{key: round(sum(each[key] for each in found), 1) for key in found[0]}}


def claim_one(claims: Claims, number: int, since: int = 0) -> int:
    """Claim a trial, and end it after four scores. Returns its fence, which is the next one's `since`."""
    with claims.alone() as held:
        held.fences(since)
        claim = held.begin(number)
    assert claim is not None
    for epoch in _EPOCHS:
        is_last = epoch == _EPOCHS[-1]
        with claims.owned(claim, uuid.uuid4().hex, writes=is_last) as mine:
            assert mine is not None
            mine.count(None, None, epoch if is_last else None, epoch)
    return claim.fence


def _claim(name: str, storage: str, directory: Path, seconds: float, ready: Any, results: Any) -> None:
    claims = Claims(connect(storage, directory), NAME, name)
    numbers = iter(range(int(name.removeprefix("w")) * 10**6, _ENDLESS))
    ready.wait()
    trials = fence = 0
    with Statements() as statements:
        begun_s = sign_s = time.monotonic()
        while (now_s := time.monotonic()) < begun_s + seconds:
            if now_s > sign_s + 10:
                claims.renew(Sign({}))
                sign_s = now_s
            fence = claim_one(claims, next(numbers), fence)
            trials += 1
        took_s = time.monotonic() - begun_s
    claims.close()
    counts = {"statements": statements.count, "of_claims": statements.of_claims}
    counts |= {"trials": trials, "reports": trials * len(_EPOCHS)}
    results.put({f"{key}_per_s": count / took_s for key, count in counts.items()})


def _work(name: str, storage: str, directory: Path, seconds: float, ready: Any, results: Any) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = searched(RANDOM, _ENDLESS)
    with search_worker(study, storage, directory, name) as worker:
        worker.ask(FUSED - 1)
        ready.wait()
        trials, reports = 0, 0
        with Statements() as statements:
            begun_s = sign_s = time.monotonic()
            while (now_s := time.monotonic()) < begun_s + seconds:
                if now_s > sign_s + 10:
                    worker.renew()
                    sign_s = now_s
                reports += train_one(study, worker)
                trials += 1
            took_s = time.monotonic() - begun_s
        counts = {"statements": statements.count, "of_claims": statements.of_claims}
        counts |= {"trials": trials, "reports": reports}
        results.put({f"{key}_per_s": count / took_s for key, count in counts.items()})
