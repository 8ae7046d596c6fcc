"""The best trials' weights, as ordinary `state_dict` files."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared.private_file import open_private
from trials.search.attributes import PARAMS
from trials.search.checkpoint_files import best_directory, publish, weights_path


class Best:
    """Keeps the files of the best completed trials.

    Args:
        study: Optuna's.
        directory: the study's; None: there are no files.
        most: how many trials.
    """

    def __init__(self, study: optuna.Study, directory: Path | None, most: int) -> None:
        self._study, self._directory, self._most = study, directory, most

    def bar(self) -> float | None:
        """The score above which a further trial is among the best; None: any is."""
        if self._directory is None or not self._most:
            return None
        completed = ranked(self._study)
        return completed[self._most - 1].value if len(completed) >= self._most else None

    def take(self, number: int, written: Path) -> None:
        """Take the weights of a trial that has completed. Call it under the study's lock."""
        assert self._directory is not None
        most = ranked(self._study)[: self._most]
        best = [trial for trial in most if trial.number == number or self._path(trial).exists()]
        mine = next((trial for trial in best if trial.number == number), None)
        if mine is None:
            written.unlink(missing_ok=True)
            return
        publish(written, self._path(mine))
        self._write_index(best)
        kept = {self._path(trial).name for trial in best}
        for file in best_directory(self._directory).glob("trial-*.pt"):
            if file.name not in kept:
                with suppress(OSError):
                    file.unlink()

    def _path(self, trial: FrozenTrial) -> Path:
        assert self._directory is not None
        return weights_path(self._directory, trial.number)

    def _write_index(self, best: list[FrozenTrial]) -> None:
        assert self._directory is not None
        entries: list[dict[str, Any]] = [
            {"number": t.number, "score": t.value, "params": params_of(t), "weights": self._path(t).name} for t in best
        ]
        written = best_directory(self._directory) / f"best.{os.getpid()}.tmp"
        with open(written, "w", encoding="utf-8", opener=open_private) as file:
            json.dump(entries, file, indent=2)
        publish(written, best_directory(self._directory) / "best.json")


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """The completed trials, the best first."""
    completed = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    is_best_high = study.direction is StudyDirection.MAXIMIZE
    return sorted(completed, key=lambda trial: trial.value or 0.0, reverse=is_best_high)


def params_of(trial: FrozenTrial) -> dict[str, Any]:
    """What the user's `suggest` returned for a trial; of one that others added, what Optuna knows."""
    return dict(json.loads(trial.user_attrs[PARAMS])) if PARAMS in trial.user_attrs else trial.params
