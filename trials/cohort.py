"""Cohorts, and what is known of how many trials fit the bubbles when they are fused."""

from collections.abc import Iterator, Sequence
from math import ceil

from torch import Tensor

from trials.gate import PageGate, Starved
from trials.group import TrialGroup
from trials.member import Member
from trials.study import Study


class Fit:
    """How long the units of one structure are, as far as they were too long.

    Attributes:
        most: the trials that a group may have.
    """

    def __init__(self, most: int) -> None:
        """So far nothing is known against groups of `most` trials."""
        self.most = most
        self._needs_ns: dict[str, dict[int, int]] = {}
        self._told: set[str] = set()

    def may_halve(self, found: Starved) -> bool:
        """Whether fewer trials may make the unit short enough: not, if what it took with more trials says otherwise."""
        known_ns = self._needs_ns.setdefault(found.unit, {})
        known_ns[found.trials] = found.needs_ns
        if found.trials == 1:
            return False
        more = min((trials for trials in known_ns if trials > found.trials), default=None)
        if more is None:
            return True
        per_trial_ns = (known_ns[more] - found.needs_ns) / (more - found.trials)
        return found.needs_ns - (found.trials - 1) * per_trial_ns <= found.longest_ns

    def is_news(self, unit: str) -> bool:
        """Whether this is asked for the first time of `unit`."""
        if unit in self._told:
            return False
        self._told.add(unit)
        return True


class Cohort:
    """Trials that started together, and how far they are.

    Attributes:
        groups: their groups: one, or several that take turns with every batch.
        fit: what is known of their structure.
        epoch: how many epochs all have behind them.
    """

    def __init__(self, study: Study, members: Sequence[Member], gate: PageGate, fit: Fit) -> None:
        """Fuse `members`, no more of them in a group than fit.

        Raises:
            FuseError: they cannot be fused.
        """
        self.fit = fit
        self.epoch = 0
        self.groups: list[TrialGroup] = []
        count = ceil(len(members) / fit.most)
        for first in range(count):
            chosen = members[first::count]
            gate.trials = len(chosen)
            self.groups.append(TrialGroup(study, chosen, gate))

    @property
    def numbers(self) -> list[int]:
        """The trials that are left."""
        return [number for group in self.groups for number in group.numbers]

    def batches(self) -> Iterator[tuple[TrialGroup, Tensor, Tensor, bool]]:
        """This epoch's batches, each for all groups in turn, and what else `TrialGroup.train_step` takes.

        They are read once. A group may be split meanwhile: both halves go on with the next batch.
        """
        numbers = self.numbers
        first, *others = self.groups
        for inputs, targets, per_trial in first.batches(self.epoch, others):
            for group in tuple(self.groups):
                rows = [numbers.index(number) for number in group.numbers]
                if per_trial and len(rows) < len(numbers):
                    yield group, inputs[rows], targets[rows], True
                else:
                    yield group, inputs, targets, per_trial

    def halve(self, group: TrialGroup, gate: PageGate) -> None:
        """Make two groups of `group`; each trial gives what it would have given. The gate uses neither's units yet."""
        half = group.size // 2
        self.fit.most = min(self.fit.most, group.size - half)
        gate.trials = half
        self.groups.append(group.split(range(group.size - half, group.size)))

    def drop_empty(self) -> None:
        """Forget groups without trials."""
        self.groups = [group for group in self.groups if group.size]
