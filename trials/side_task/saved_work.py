"""How much of what a side task has trained is safe, in trial-samples."""

from collections import Counter, defaultdict

Point = tuple[int, int]
"""Where a trial is: how many epochs it has trained, and on how many batches of the next one."""


class SavedWork:
    """The work of one side task, trial by trial, until the search worker has taken it.

    Attributes:
        lost: what was trained in vain, since its trials went back, or were another worker's by then.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._trained: Counter[int] = Counter()
        self._kept: Counter[int] = Counter()
        self._at: defaultdict[int, dict[Point, int]] = defaultdict(dict)  # trained when it was written there

    def trained(self, number: int, samples: int) -> None:
        """A trial has trained on so many samples."""
        self._trained[number] += samples

    def written(self, number: int, point: Point) -> None:
        """A trial, as it is now, is in a file or in memory. The search worker has not taken it yet."""
        self._at[number][point] = self._trained[number]

    def is_written(self, number: int) -> bool:
        """Whether a trial has trained nothing since `written`."""
        return self._trained[number] == max(self._at[number].values(), default=0)

    def taken(self, number: int, point: Point) -> None:
        """The search worker has made durable what was written there."""
        self._kept[number] = max(self._kept[number], self._at[number].get(point, 0))

    def continues(self, number: int, point: Point | None) -> None:
        """A trial continues from what was written there, by this side task or an earlier one; None: it begins anew."""
        written = self._at.pop(number, {})
        trained = 0 if point is None else written.get(point, 0)
        self.lost += self._trained[number] - trained
        self._trained[number], self._kept[number] = trained, min(trained, self._kept[number])
        self._at[number] = {each: samples for each, samples in written.items() if samples <= trained}

    def ended(self, number: int) -> None:
        """A trial has ended: there is nothing left of it to lose."""
        for of in (self._trained, self._kept, self._at):
            of.pop(number, None)

    def left(self, number: int) -> None:
        """A trial is another worker's, which continues from what was taken."""
        self.lost += self._trained[number] - self._kept[number]
        self.ended(number)

    def all_ended(self) -> None:
        """The study is over."""
        for number in tuple(self._trained):
            self.ended(number)

    def in_vain(self) -> int:
        """What is lost, with all that would be if this process died now."""
        return self.lost + self._trained.total() - self._kept.total()
