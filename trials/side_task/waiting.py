"""Trials that wait for rows, by structure, so that those which can be fused begin together."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from trials.training.member import Member, group_key

Asked = dict[str, Any]
"""A trial as the search worker sends it: its number and hyperparameters."""


class Waiting:
    """Trials in the order in which they came.

    A trial's structure is known once it has been built. It is built once more when it begins, unless that is at once:
    models of trials that wait would take memory.

    Args:
        build: builds a trial; None if that fails, and the trial is over.
    """

    def __init__(self, build: Callable[[Asked], Member | None]) -> None:
        self._build = build
        self._trials: list[Asked] = []
        self._structures: dict[int, Hashable] = {}
        self._arrived: dict[int, int] = {}
        self._built: dict[int, Member] = {}
        self._begun = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._trials)

    @property
    def numbers(self) -> list[int]:
        """Those of the trials that wait."""
        return [trial["number"] for trial in self._trials]

    @property
    def structures(self) -> set[Hashable]:
        """Those of trials that have been built and wait."""
        return set(self._structures.values())

    def add(self, trials: Sequence[Asked], first: bool = False) -> None:
        """Let `trials` wait behind all others, or `first`."""
        self._arrived.update({trial["number"]: self._begun for trial in trials})
        self._trials = [*trials, *self._trials] if first else [*self._trials, *trials]

    def sort(self, enough: int) -> dict[Hashable, int]:
        """Count the trials of each structure, the oldest first, until there are `enough` of one."""
        found: Counter[Hashable] = Counter()
        for trial in tuple(self._trials):
            number = trial["number"]
            if number not in self._structures:
                member = self._build(trial)
                if member is None:
                    self._drop([trial])
                    continue
                self._structures[number], self._built[number] = group_key(member), member
            found[self._structures[number]] += 1
            if found[self._structures[number]] >= enough:
                break
        return dict(found)

    def overdue(self, patience: int) -> Hashable | None:
        """Return the structure of a trial that has seen `patience` others begin since it came, if there is one."""
        for trial in self._trials:
            number = trial["number"]
            if number in self._structures and self._begun - self._arrived[number] >= patience:
                return self._structures[number]
        return None

    def take(self, structure: Hashable, most: int) -> list[Member]:
        """Return up to `most` trials of `structure`, which begin now."""
        alike = [trial for trial in self._trials if self._structures.get(trial["number"]) == structure][:most]
        members = [self._built.pop(trial["number"], None) or self._build(trial) for trial in alike]
        self._drop(alike)
        self._begun += len(alike)
        return [member for member in members if member is not None]

    def drop(self, structure: Hashable) -> list[int]:
        """Forget all trials that are known to be of `structure`. Returns their numbers."""
        alike = [trial for trial in self._trials if self._structures.get(trial["number"]) == structure]
        self._drop(alike)
        return [trial["number"] for trial in alike]

    def free(self) -> None:
        """Forget the models of trials that still wait."""
        self._built.clear()

    def _drop(self, trials: Sequence[Asked]) -> None:
        numbers = {trial["number"] for trial in trials}
        self._trials = [trial for trial in self._trials if trial["number"] not in numbers]
        for number in numbers:
            self._structures.pop(number, None)
            self._arrived.pop(number, None)
            self._built.pop(number, None)
