"""What a trial has made so far: its training loss in each epoch, and its scores."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from trials.training.scores.objectives import Score


@dataclass(slots=True)
class History:
    """One trial's.

    Attributes:
        losses: of each finished epoch, the mean of its batches' training losses.
        scores: epochs done -> the score then.
        metrics: epochs done -> the metrics then, of a study that has some.
        total: the sum of the losses of the epoch under way, if the trial is in no group.
        steps: how many batches of that epoch it has seen: its place in it.
        mark: which they were, if the trial was saved there; see `BatchesSeen`.
    """

    losses: list[float] = field(default_factory=list)
    scores: dict[int, Score] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    total: float = 0.0
    steps: int = 0
    mark: str = ""

    def end_epoch(self, total: float) -> None:
        """Take in the losses of an epoch, whose sum is `total`."""
        self.losses.append(total / self.steps if self.steps else float("nan"))
        self.total, self.steps, self.mark = 0.0, 0, ""

    def note_score(self, epochs: int, score: Score, metrics: Mapping[str, float]) -> None:
        """Keep the score and the metrics after that many epochs."""
        self.scores[epochs] = score
        if metrics:
            self.metrics[epochs] = dict(metrics)

    def plain(self, total: float) -> dict[str, Any]:
        """Return plain containers, from which the class can be made again; `total` is the present one."""
        return {**asdict(self), "total": total}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "History":
        """The reverse of `plain`; of nothing, that of a fresh trial."""
        return cls(**copy.deepcopy(dict(plain)))

    def shown(self) -> dict[str, Any]:
        """Return it for JSON: losses by epoch, and scores and metrics by epochs done. None is no finite number."""
        found: dict[str, Any] = {
            "loss": [_finite(loss) for loss in self.losses],
            "score": {
                str(epochs): [_finite(each) for each in score] if isinstance(score, list) else _finite(score)
                for epochs, score in self.scores.items()
            },
        }
        if self.metrics:
            found["metrics"] = {
                str(epochs): {name: _finite(value) for name, value in own.items()}
                for epochs, own in self.metrics.items()
            }
        return found


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
