"""How the trials of a run's studies have ended so far, from Optuna's storage."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import unquote

from ds_hooks.shared.secrets import HIDDEN, STORAGE_VARIABLE, hide_password, hide_passwords, without_hidden
from ds_hooks.shared.study_paths import journal_path
from ds_hooks.shared.trial_attributes import MILESTONE
from squeezer.records.layout import study_directory
from squeezer.records.reader import RankRun

ANSWERS_WITHIN_S = 30.0
"""A server that has stopped, or that the network has lost, may say nothing for ever; a job that has ended must end."""

TRIAL_STATES = "completed", "pruned", "failed", "running", "paused", "waiting"

NO_TRIALS: Mapping[str, Any] = {**dict.fromkeys(TRIAL_STATES, 0), "best": None, "studies": {}, "problem": None}

_Read = TypeVar("_Read")


def trial_figures(run: Path, ranks: Sequence[RankRun]) -> dict[str, Any]:
    """How many trials are in which state, in all and by study, and which is the best of a study of one objective.

    An unreadable storage is named in "problem"; the rest of the report stands.
    """
    sides = [side for rank in ranks if (side := rank.records["run"][0]["config"].get("side"))]
    side = sides[0] if sides else {}
    studies = side.get("queue") or side.get("study_directory") or study_directory(run)
    recorded = str(side.get("storage") or journal_path(Path(studies)))
    named = recorded
    if HIDDEN in recorded:
        named = os.environ.get(STORAGE_VARIABLE) or without_hidden(recorded)
    is_sqlite = named.startswith("sqlite:///")
    file = unquote(named.removeprefix("sqlite:///").split("?")[0]) if is_sqlite else named
    names = _served(ranks) if side.get("queue") else [side.get("study_name")]
    if not names or ("://" not in file and not Path(file).exists()):
        return dict(NO_TRIALS)  # opening it would create it

    import optuna  # takes a second, and only a study needs it
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    def read() -> dict[str, dict[str, Any]]:
        storage = named if "://" in named else JournalStorage(JournalFileBackend(named))
        begun = optuna.get_all_study_names(storage)  # a job may end before its side task has begun any
        known = [str(name) for name in names if name in begun]
        return {name: _of_study(optuna.load_study(study_name=name, storage=storage)) for name in known}

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        found = _soon(read)
    except Exception as error:  # any of many database drivers
        problem = hide_passwords(f"{hide_password(named)}: {type(error).__name__}: {error}")
        if HIDDEN in recorded:
            problem += f"; passwords are not recorded: put the storage's full URL in ${STORAGE_VARIABLE}"
        return {**dict.fromkeys(NO_TRIALS), "studies": {}, "problem": problem}
    finally:
        optuna.logging.set_verbosity(verbosity)
    totals = {state: sum(of[state] for of in found.values()) for state in TRIAL_STATES}
    best = next(iter(found.values()))["best"] if len(found) == 1 else None
    return {**totals, "best": best, "studies": found, "problem": None}


def _soon(read: Callable[[], _Read]) -> _Read:
    """What `read` returns. If it takes too long, it is left to a thread that ends with this process.

    Raises:
        TimeoutError: it does.
        Exception: what `read` raises.
    """
    answer: Future[_Read] = Future()

    def run() -> None:
        try:
            answer.set_result(read())
        except Exception as error:
            answer.set_exception(error)

    Thread(target=run, name="study", daemon=True).start()
    if not wait([answer], ANSWERS_WITHIN_S).done:
        raise TimeoutError(f"no answer within {ANSWERS_WITHIN_S:.0f} s")
    return answer.result()


def _served(ranks: Sequence[RankRun]) -> list[str]:
    """The submitted studies that took turns, the first first."""
    begun = (side for rank in ranks for side in rank.records["side"] if side["event"] == "serving")
    return list(dict.fromkeys(side["name"] for side in sorted(begun, key=lambda side: side["t_ns"])))


def _of_study(study: Any) -> dict[str, Any]:
    from optuna.trial import TrialState

    found = study.get_trials(deepcopy=False)
    states = Counter(trial.state for trial in found)
    paused = sum(
        trial.state is TrialState.WAITING and trial.user_attrs.get(MILESTONE) in trial.intermediate_values
        for trial in found
    )
    best = None
    if len(study.directions) == 1 and states[TrialState.COMPLETE]:
        with suppress(ValueError):  # every one breaks a constraint
            best = study.best_trial
    return {
        "completed": states[TrialState.COMPLETE],
        "pruned": states[TrialState.PRUNED],
        "failed": states[TrialState.FAIL],
        "running": states[TrialState.RUNNING],
        "paused": paused,
        "waiting": states[TrialState.WAITING] - paused,
        "best": best and {"number": best.number, "value": best.value, "params": best.params},
    }
