"""What a side task has trained of a trial before it hears that the trial has ended."""

from collections.abc import Collection, Mapping
from typing import Any

from trials.search.storage.claims import Claim, Claims
from trials.search.storage.database import patiently


class LateEpochs:
    """Counts such epochs as lost: no trial has them, but they were trained.

    Args:
        claims: those of the study.
    """

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._ended: dict[int, tuple[Claim, int]] = {}

    def end(self, claim: Claim, trained: int) -> None:
        """A trial has ended here, and so many epochs of it have been counted."""
        self._ended[claim.trial] = claim, trained

    def note(self, epochs: Mapping[int, int]) -> None:
        """The side task has trained these numbers of epochs, by trial."""
        for number in self._ended.keys() & epochs.keys():
            claim, counted = self._ended[number]
            if epochs[number] > counted:
                self._count(claim, counted, epochs[number])
                self._ended[number] = claim, epochs[number]

    def keep(self, here: Collection[int]) -> None:
        """Forget all trials but those that the side task has."""
        self._ended = {number: ended for number, ended in self._ended.items() if number in here}

    def _count(self, *lost: Any) -> None:
        patiently(lambda again: self._claims.add_lost(*lost))
