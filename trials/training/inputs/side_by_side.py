"""Whether a study's batches stay what they are where several iterators of them are read in turns.

They do not where these share something, such as a loader whose workers persist, or a file and its position. That is
tried with a few batches before it is relied on, and then proven once with whole epochs. And as epochs are read again
and again, for one trial after another, each must always be what it was the first time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trials.gate.base import HOST_UNIT, Gate
from trials.own_logger import own_logger
from trials.study import Study
from trials.training.inputs.batches import (
    BATCHES,
    OWN,
    Batch,
    Reader,
    ReplayError,
    as_batch,
    batch_params_of,
    batches_of,
    by_place,
)
from trials.training.inputs.batches_seen import BatchesSeen
from trials.training.inputs.trees import mapped, tensors
from trials.training.inputs.turns import States, Turns

log = own_logger(__name__)

DISTURBED = {
    BATCHES: f"{BATCHES} gives other batches where several epochs are read side by side",
    OWN: f"{OWN} gives other batches where those of several trials are read side by side",
}
"""A method of a study -> what is wrong with it."""

TRIED = 3
"""So many batches are read of each iterator. Two show that one is shared, if it is so from the first on."""

SOURCES = 2
"""So many iterators are read of each of the two methods."""


class DisturbedError(ReplayError):
    """Epochs that were read side by side had other batches than alone."""


class _Found(NamedTuple):
    """What trying has shown.

    Attributes:
        disturbed: what is wrong; empty: nothing.
        is_settled: whether an epoch's batches are the same each time that it is asked for.
    """

    disturbed: str
    is_settled: bool


class _First(NamedTuple):
    """The mark of an epoch that was read for the first time, and whether other epochs were read beside it."""

    mark: str
    is_beside: bool


class _Source(NamedTuple):
    """An iterator of batches: of which trial's epoch, by which method, and a function that opens it."""

    reader: Reader
    method: str
    opened: Callable[[], Iterable[Any]]


class SideBySide:
    """Tries, once for each way in which trials are read, whether a study's batches can be read side by side.

    Args:
        study: the user's.
        gate: asked before each batch.
    """

    def __init__(self, study: Study, gate: Gate) -> None:
        """Nothing has been read so far."""
        self._study, self._gate = study, gate
        self._found: dict[tuple[bool, str], _Found] = {}
        self._firsts: dict[tuple[int, str], _First] = {}
        self._proven: set[tuple[bool, str]] = set()

    def disturbed(self, readers: Sequence[Reader]) -> str:
        """Return what is wrong if the batches of `readers` are read side by side; empty: nothing.

        Exceptions of the study's code pass through.
        """
        several = len(by_place(readers)) > 1
        if not several and (len(readers) < 2 or not self._study.has_own_batches):
            return ""
        key = several, self._params(readers)
        if key not in self._found:
            self._found[key] = self._tried(readers)
        return self._found[key].disturbed

    def note(self, readers: Sequence[Reader], marks: dict[int, str]) -> None:
        """Compare epochs that were read to their ends with what they were before; the first time, with them alone.

        Args:
            readers: the trials that were read side by side.
            marks: of all that each has got, by its number; see `BatchesSeen`.

        Raises:
            DisturbedError: one is another, though it is the same each time as far as that has been tried.
        """
        several, params = len(by_place(readers)) > 1, self._params(readers)
        if not self._study.has_own_batches:
            self._compare(readers, marks, several, params)
        key = several, params
        if key not in self._found or not self._found[key].is_settled or key in self._proven:
            return
        self._proven.add(key)
        for reader, method, opened in self._sources(readers):
            first, mark = self._firsts.get((reader.epoch, params)), marks.get(reader.number)
            is_known = first is not None and not first.is_beside
            if mark and not is_known and self._mark_alone(opened) != mark:
                raise self._fault(key, readers, reader.epoch, method)

    def _compare(self, readers: Sequence[Reader], marks: dict[int, str], several: bool, params: str) -> None:
        for (epoch, _), (reader, *_) in by_place(readers).items():
            mark = marks.get(reader.number)
            if not mark:
                continue
            first = self._firsts.setdefault((epoch, params), _First(mark, several))
            found = self._found.get((True, params))
            if mark == first.mark or found is None or not found.is_settled or not (several or first.is_beside):
                continue
            fault = self._fault((True, params), readers, epoch, BATCHES)
            if several:
                raise fault
            log.warning("%s. Trials that have trained on epoch %d then may differ", DISTURBED[BATCHES], epoch + 1)

    def _fault(self, key: tuple[bool, str], readers: Sequence[Reader], epoch: int, method: str) -> DisturbedError:
        self._found[key] = _Found(DISTURBED[method], False)
        what = f"epochs of which epoch {epoch + 1} had other batches than alone: {DISTURBED[method]}"
        return DisturbedError([reader.number for reader in readers], what)

    def _mark_alone(self, opened: Callable[[], Iterable[Any]]) -> str:
        seen = BatchesSeen()
        for batch in opened():
            self._gate.enter(HOST_UNIT)
            seen.add(as_batch(batch))
        return seen.mark

    def _params(self, readers: Sequence[Reader]) -> str:
        return repr(batch_params_of(self._study, readers[0].params))

    def _tried(self, readers: Sequence[Reader]) -> _Found:
        sources = self._sources(readers)
        if len(sources) < 2:
            return _Found("", True)
        each, cause = range(len(sources)), ""
        alone, starts = self._read(sources, [which for which in each for _ in range(TRIED)])
        beside = [which for _ in range(TRIED) for which in each]
        try:
            if self._read(sources, beside)[0] == alone:
                return _Found("", True)
            if self._read(sources, beside, starts)[0] == alone:  # they differ each time, but only by what is drawn
                return _Found("", False)
        except Exception as error:
            cause = f" ({type(error).__name__}: {error})"
        return _Found(DISTURBED[sources[0].method] + cause, False)

    def _sources(self, readers: Sequence[Reader]) -> list[_Source]:
        """Return some of the iterators that `readers` need, those of `Study.batches` first."""
        study, found = self._study, list[_Source]()
        for here in by_place(readers).values():
            owners = [each for each in here if self._own(each) is not None] if study.has_own_batches else []
            found += [_Source(each, OWN, partial(self._own, each)) for each in owners]  # type: ignore[arg-type]
            if not owners:
                shared = partial(batches_of, study, here[0].params, here[0].epoch)
                found.append(_Source(here[0], BATCHES, shared))
        return [source for method in (BATCHES, OWN) for source in _of(method, found)[:SOURCES]]

    def _own(self, reader: Reader) -> Iterable[Any] | None:
        return self._study.trial_batches(reader.params, reader.number, reader.epoch)

    def _read(
        self, sources: Sequence[_Source], order: Sequence[int], starts: Sequence[States] = ()
    ) -> tuple[list[list[object]], list[States]]:
        """Read one batch after another, each of the iterator whose turn it is.

        Args:
            sources: the iterators.
            order: whose turn it is.
            starts: the random streams' states when each is opened; none: as they are.

        Returns:
            What each iterator has given, to be compared, and the states when it was opened.
        """
        turns, given = Turns(self._study), [list[object]() for _ in sources]
        takes, began, left = [turns.new() for _ in sources], [turns.states() for _ in sources], list(order)
        reading: dict[int, Iterator[Any]] = {}
        while left:
            which = left.pop(0)
            self._gate.enter(HOST_UNIT)
            takes[which]()
            if which not in reading:
                if starts:
                    turns.put_back(starts[which])
                began[which] = turns.states()
                reading[which] = iter(sources[which].opened())
            given[which] += [self._content(as_batch(each)) for each in islice(reading[which], 1)]
            if which not in left:
                del reading[which]  # as alone, where it has ended when the next begins
        return given, began

    def _content(self, batch: Batch) -> object:
        """Return what is equal for batches that are equal, bit by bit; for what cannot be compared, for none."""
        if not all(tensor.is_cpu for tensor in tensors(batch)):
            self._gate.settle()
        seen = BatchesSeen(in_full=True)
        seen.add(mapped(_on_host, batch))
        return seen.mark or object()


def _of(method: str, sources: Sequence[_Source]) -> list[_Source]:
    return [source for source in sources if source.method == method]


def _on_host(tensor: Tensor) -> Tensor:
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).cpu()
