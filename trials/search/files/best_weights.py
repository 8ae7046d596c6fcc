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
from ds_hooks.shared.trial_attributes import PARAMS
from trials.search.choice.constraints import breaks
from trials.search.files.checkpoint_files import best_directory, publish, weights_path


class Best:
    """Keeps the files of the best completed trials; of several objectives, those that none beats in all: the front.

    Args:
        study: Optuna's.
        directory: the study's; None: there are no files.
        most: how many trials; of a front all, unless it is 0.

    Attributes:
        bar: the score above which a further trial is among the best; None: any may be. It is that of the last look at
            all trials, which takes long. Where others have completed better ones since, it is too low, and weights are
            written that `take` drops.
    """

    def __init__(self, study: optuna.Study, directory: Path | None, most: int) -> None:
        self._study, self._directory, self._most = study, directory, most
        self._has_several = len(study.directions) > 1
        self.bar: float | None = None
        self._known: set[int] = set()

    def adopt(self) -> None:
        """Take what a worker has left that died after a trial's end. Call it under the study's lock."""
        self._known = {trial.number for trial in self._most_ranked()}
        if self._directory is None:
            return
        ended = {trial.number: trial for trial in self._ranked()}
        if not best_directory(self._directory).is_dir():
            return
        files = [file for file in best_directory(self._directory).glob("trial-*.tmp") if _number(file) in ended]
        for file in sorted(files, key=lambda file: -file.stat().st_mtime_ns):  # of a trial's files the last is whole
            path = self._path(ended[_number(file)])
            if not path.exists():
                publish(file, path)
            file.unlink(missing_ok=True)
        self._drop_others()

    def missing(self) -> list[int]:
        """The best trials whose weights are not in the directory, because other hosts have theirs elsewhere."""
        return [trial.number for trial in self._most_ranked() if self._directory and not self._path(trial).exists()]

    def take(self, number: int, written: Path) -> set[int]:
        """Take the weights of a trial that has completed. Call it under the study's lock.

        Returns:
            The trials that are no longer among the best, as far as this worker knew; this one, if it never was.
        """
        assert self._directory is not None
        mine = next((trial for trial in self._most_ranked() if trial.number == number), None)
        if mine is not None and written.exists():  # else it was taken, and the storage's answer was cut off
            publish(written, self._path(mine))
        for file in best_directory(self._directory).glob(f"trial-{number}.*.tmp"):  # those of dead workers too
            file.unlink(missing_ok=True)
        self._drop_others()
        found = [trial.number for trial in self._ranked()]
        others = {number, *self._known, *found[self._most :][:1]}  # others may have known the one that is dropped
        self._known = {trial.number for trial in self._most_ranked()}
        return others - self._known

    def files(self) -> list[Path]:
        """The index and the weights that it names; none if there are none."""
        index = None if self._directory is None else best_directory(self._directory) / "best.json"
        if index is None or not index.is_file():
            return []
        entries = json.loads(index.read_text(encoding="utf-8"))
        return [index, *(index.with_name(entry["weights"]) for entry in entries)]

    def _ranked(self) -> list[FrozenTrial]:
        found = ranked(self._study)
        if 0 < self._most <= len(found) and not self._has_several:
            are_ordered = not any(trial.constraints for trial in found)  # else one may be better with a worse score
            self.bar = found[self._most - 1].value if are_ordered else None
        return found

    def _most_ranked(self) -> list[FrozenTrial]:
        return self._first(self._ranked())

    def _first(self, found: list[FrozenTrial]) -> list[FrozenTrial]:
        return found if self._has_several and self._most else found[: self._most]

    def _drop_others(self) -> None:
        """Write the index, and remove what is not in it."""
        assert self._directory is not None
        folder = best_directory(self._directory)
        there = {_number(file) for file in folder.glob("trial-*.pt")}
        # where a full disk has cost one of the best its weights, those of the next are still the best that there are
        best = self._first([trial for trial in self._ranked() if trial.number in there])
        self._write_index(best)
        kept = {self._path(trial).name for trial in best}
        for file in (*folder.glob("best.*.tmp"), *folder.glob("trial-*.pt")):
            if file.name not in kept:
                with suppress(OSError):
                    file.unlink()

    def _path(self, trial: FrozenTrial) -> Path:
        assert self._directory is not None
        return weights_path(self._directory, trial.number)

    def _write_index(self, best: list[FrozenTrial]) -> None:
        assert self._directory is not None
        entries: list[dict[str, Any]] = [
            {
                "number": trial.number,
                "score": score_of(trial),
                "params": params_of(trial),
                "weights": self._path(trial).name,
            }
            for trial in best
        ]
        written = best_directory(self._directory) / f"best.{os.getpid()}.tmp"
        with open(written, "w", encoding="utf-8", opener=open_private) as file:
            json.dump(entries, file, indent=2)
        publish(written, best_directory(self._directory) / "best.json")


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """The completed trials, the best first; with several objectives, those that none beats in all.

    Those that break a constraint of the study's sampler come last, or are not on the front.
    """
    if len(study.directions) > 1:
        front: list[FrozenTrial] = study.best_trials
        return front
    completed = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    is_best_high = study.direction is StudyDirection.MAXIMIZE
    by_score = sorted(completed, key=lambda trial: trial.value or 0.0, reverse=is_best_high)
    return sorted(by_score, key=breaks)


def why_none(study: optuna.Study) -> str:
    """Why a study has no best trial: see `ranked`."""
    if study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        return f"every completed trial of study {study.study_name} breaks a constraint"
    return f"no trial of study {study.study_name} has completed yet"


def score_of(trial: FrozenTrial) -> float | list[float] | None:
    """A trial's score, or one for each objective."""
    values: list[float] | None = trial.values
    return values[0] if values is not None and len(values) == 1 else values


def describe_score(score: float | list[float]) -> str:
    """In words."""
    return f"scores {', '.join(f'{each:.6g}' for each in score)}" if isinstance(score, list) else f"score {score:.6g}"


def params_of(trial: FrozenTrial) -> dict[str, Any]:
    """What the user's `suggest` returned for a trial; of one that others added, what Optuna knows."""
    return dict(json.loads(trial.user_attrs[PARAMS])) if PARAMS in trial.user_attrs else trial.params


def _number(file: Path) -> int:
    """Of the trial whose weights it has."""
    return int(file.name.partition(".")[0].removeprefix("trial-"))
