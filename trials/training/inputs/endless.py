"""Says when batches seem never to end: trials are scored, pruned and promoted only where they do."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakKeyDictionary

from trials.own_logger import own_logger
from trials.study import Study

LONG_S, MANY = 300.0, 1000
"""Batches that have an end seldom go on for so long, and are seldom so many."""

CHECKED_S = 20.0
"""The same where somebody waits for them."""

FAR_MORE = 3
"""So many times as many as ever before are worth a word."""

log = own_logger(__name__)

_Batch = TypeVar("_Batch")


@dataclass(slots=True)
class _Patience:
    """With a study's batches.

    Attributes:
        long_s: how long they may go on without a word.
        many: how many there may be.
        most: a method of the study -> how many it has given at most before they ended.
    """

    long_s: float
    many: int
    most: dict[str, int] = field(default_factory=dict)


_PATIENCE: WeakKeyDictionary[Study, _Patience] = WeakKeyDictionary()


def expect_to_be_watched(study: Study) -> None:
    """Somebody waits for the batches of `study`."""
    _PATIENCE[study] = _Patience(CHECKED_S, 0)


def with_an_end(study: Study, given: Iterable[_Batch], source: str, where: str = "") -> Iterator[_Batch]:
    """Yield what is `given`, and say so if it seems to have no end; again when there are twice as many.

    Args:
        study: the user's.
        given: batches.
        source: the method that gave them.
        where: such as an epoch, for a message.
    """
    known = _PATIENCE.setdefault(study, _Patience(LONG_S, MANY))
    began_s, count, expected = time.monotonic(), 0, max(known.many, FAR_MORE * known.most.get(source, 0))
    for batch in given:
        count += 1
        if count > expected and time.monotonic() >= began_s + known.long_s:
            expected = 2 * count
            _say(source, where, count, time.monotonic() - began_s)
        yield batch
    known.most[source] = max(count, known.most.get(source, 0))


def _say(source: str, where: str, count: int, took_s: float) -> None:
    log.warning(
        "%s has given %d batches%s in %s, and goes on; trials are scored only when it ends. Of a loader without an "
        "end, take a part: itertools.islice(loader, 1000)",
        source,
        count,
        where,
        f"{took_s:.0f} seconds" if took_s < 120 else f"{took_s / 60:.0f} minutes",
    )
