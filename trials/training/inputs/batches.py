"""The batches that trials train on: one loader for all at the same epoch, or each trial's own."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any, NamedTuple, cast

from torch import Tensor

from trials.fusion import FuseError
from trials.pinned_memory import in_pinned_memory
from trials.study import Study
from trials.training.inputs.batches_seen import BatchesSeen
from trials.training.inputs.endless import with_an_end
from trials.training.inputs.study_state import may_set, setting_nothing
from trials.training.inputs.trees import all_pinned, as_plain, copied, examples, form, mapped, row_of, stacked, tensors
from trials.training.inputs.turns import Turns


class ReplayError(Exception):
    """An epoch's batches are not those of which trials have already trained on some.

    Attributes:
        numbers: these trials'.
    """

    def __init__(self, numbers: Sequence[int], what: str) -> None:
        super().__init__(f"trials {list(numbers)} were in the middle of {what}")
        self.numbers = numbers


BATCHES, OWN = "Study.batches", "Study.trial_batches"

_UNWATCHED = nullcontext()

_END = object()
"""Of batches: a loader may give None for one that is of no use."""

Batch = tuple[Any, Any]
"""``(inputs_B, targets_B)`` of B examples: tensors in any containers, with plain values among them."""


class Pinned:
    """Batches in pinned memory. A device copies from there by itself, so the host does not wait for the gate too."""

    def __init__(self, given: Iterable[Batch]) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Batch]:
        """Pin each batch as it is read."""
        for batch in self.given:
            inputs, targets = as_batch(batch)
            yield all_pinned(inputs), all_pinned(targets)


class BatchCopy:
    """A batch as it is before a step, whose loss may change it in place.

    Attributes:
        inputs: a copy.
        targets: likewise.
    """

    def __init__(self, inputs: Any, targets: Any) -> None:
        self._given = tensors((inputs, targets))
        self.inputs, self.targets = copied((inputs, targets))
        self._copies = tensors((self.inputs, self.targets))
        self._versions = [_version(tensor) for tensor in self._given]

    def put_back(self) -> None:
        """Undo what has been changed in place."""
        for tensor, kept, version in zip(self._given, self._copies, self._versions, strict=True):
            if _version(tensor) != version:  # else it may be memory that nobody may write
                tensor.copy_(kept)
        self._versions = [_version(tensor) for tensor in self._given]

    def of(self, row: int | None) -> Batch:
        """Return the copies that the trial in `row` has of its own; None: of all trials."""
        return (self.inputs, self.targets) if row is None else row_of((self.inputs, self.targets), row)


def as_batch(given: Any, source: str = "Study.batches") -> Batch:
    """Return what the study's method `source` gave as a batch.

    Raises:
        FuseError: it is none.
    """
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        what = f" of {len(given)}" if isinstance(given, (tuple, list)) else ""
        raise FuseError(f"{source} gave a {type(given).__name__}{what}; allowed: pairs (inputs, targets)")
    return as_plain(given[0], source), as_plain(given[1], source)


def no_batches(epoch: int) -> FuseError:
    """The error of a study that gives nothing to train on in an epoch: its trials would end untrained."""
    return FuseError(f"the study gave no batches in epoch {epoch}; allowed: at least one, each time that it is asked")


class Reader(NamedTuple):
    """A trial, and the epoch whose batches it reads, counted from 0.

    It has trained on `place` batches of that epoch before. `mark` is their digest, see `BatchesSeen`; empty: unknown.
    """

    number: int
    params: dict[str, Any]
    epoch: int
    place: int = 0
    mark: str = ""


def accumulated(study: Study, batches: Iterator[Batch], alone: bool = True) -> Iterator[Batch]:
    """Return the batches of an epoch as they are taken: one for each step or, if steps accumulate, several.

    Several are one batch, both parts of which are tuples with one entry for each of them. They are copies, because a
    loader may fill the same memory again for its next batch; so are all, if others are read meanwhile.
    """
    if study.accumulate > 1 or not alone:
        batches = map(_copied, batches)
    if study.accumulate == 1:
        return batches
    return (tuple(zip(*own, strict=True)) for own in iter(lambda: tuple(islice(batches, study.accumulate)), ()))  # type: ignore[misc]


AHEAD, SMALL_BYTES = 8, 1 << 16
"""So many batches of at most this size are read at once. That takes a quarter less than to read each before its step,
which leaves little in the caches of what reading needs."""


def _taken(study: Study, batches: Iterator[Batch], seen: BatchesSeen, alone: bool) -> Iterator[tuple[Batch, str]]:
    """Yield `accumulated` batches, each with the mark up to it. Small copies are read ahead, while they stay small.

    Not so if the loss reads attributes: who reads a batch may change them in place for it.
    """
    reading, count = accumulated(study, batches, alone), 1
    may_lead = (study.accumulate > 1 or not alone) and not may_set(study)
    while found := [(batch, seen.mark) for batch in islice(reading, count)]:
        yield from found
        count = AHEAD if may_lead and max(_bytes(batch) for batch, _ in found) <= SMALL_BYTES else 1


def _bytes(batch: Batch) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(batch))


def parts(study: Study, inputs: Any, targets: Any) -> list[Batch]:
    """Return the batches in a step's inputs and targets; see `accumulated`."""
    return [(inputs, targets)] if study.accumulate == 1 else list(zip(inputs, targets, strict=True))


def work_of(study: Study, trials: int, inputs: Any, targets: Any, per_trial: bool) -> int:
    """Return the work of a step of so many trials, in trials × examples."""
    return trials * sum(examples(*part, per_trial) for part in parts(study, inputs, targets))


def batch_params_of(study: Study, params: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a trial on which `Study.batches` depends.

    Raises:
        FuseError: the trial lacks one.
    """
    missing = [name for name in study.batch_params if name not in params]
    if missing:
        raise FuseError(
            f"Study.batch_params names '{missing[0]}', which Study.suggest did not return; it returned {sorted(params)}"
        )
    return {name: params[name] for name in study.batch_params}


def batches_of(study: Study, params: dict[str, Any], epoch: int) -> Iterable[Batch]:
    """Return what the study gives all trials that train alike.

    Raises:
        FuseError: it gives nothing, as a function does that lacks its `return`.
    """
    named, read = batch_params_of(study, params), cast("Callable[..., Iterable[Batch] | None]", study.batches)
    with setting_nothing(study, BATCHES):
        given = read(epoch, named) if study.batch_params else read(epoch)
    if given is None:
        raise FuseError("Study.batches returned None; allowed: pairs (inputs, targets), as in a list or from a loader")
    return given


def own_batches_of(study: Study, reader: Reader, turn: Callable[[], None]) -> Iterable[Batch] | None:
    """Return what the study gives one trial, in its turn; None: the batches of all."""
    turn()
    with setting_nothing(study, OWN):
        return study.trial_batches(reader.params, reader.number, reader.epoch)


def rounds(
    study: Study,
    readers: Sequence[Reader],
    skipped: Callable[[], None] = lambda: None,
    marks: dict[int, str] | None = None,
) -> Iterator[dict[int, Batch]]:
    """Yield the next batch of each trial, by its number, until the epochs of all are over.

    Trials at the same place in an epoch of `Study.batches` get the very same pair. A trial whose epoch is over gets
    none. Batches on which a trial has trained before are read, but not yielded. What is read side by side has random
    streams of its own, see `Turns`.

    Args:
        study: the user's.
        readers: the trials.
        skipped: called after each batch that is not yielded.
        marks: takes the mark of what each trial has got so far, by its number; see `BatchesSeen`.

    Raises:
        FuseError: an epoch has no batches, or trials at the same epoch have some of their own that differ in number or
            shape.
        ReplayError: what was skipped is not what trials have trained on. Raised before any batch.
    """
    places, readings, turns = by_place(readers), list[tuple[list[int], Iterator[tuple[Batch, str]]]](), Turns(study)

    def add(here: Sequence[Reader], given: Iterable[Any] | None, source: str, turn: Callable[[], None]) -> None:
        seen, is_alone = BatchesSeen(), len(readers if source == OWN else places) == 1
        batches = _read(study, given, here[0], source, turn, None if marks is None else seen)
        _skip(here, batches, seen, skipped)
        reading = _taken(study, batches, seen, is_alone)
        # reading the first batch draws the epoch's order, before another epoch is asked for
        readings.append(([reader.number for reader in here], chain(tuple(islice(reading, 1)), reading)))

    owners: list[Reader] = []
    for (epoch, _), here in places.items():
        own = [(reader, turns.new()) for reader in here] if study.has_own_batches else []
        given = [own_batches_of(study, reader, turn) for reader, turn in own]
        if any(batches is not None for batches in given):
            owners += here
            for (reader, turn), batches in zip(own, given, strict=True):
                add([reader], batches, OWN, turn)
            continue
        turn = turns.new()
        turn()
        add(here, batches_of(study, here[0].params, epoch), BATCHES, turn)
    while True:
        found: dict[int, Batch] = {}
        for numbers, reading in readings:
            for batch, mark in islice(reading, 1):
                found.update(dict.fromkeys(numbers, batch))
                if marks is not None:
                    marks.update(dict.fromkeys(numbers, mark))
        if not found:
            return
        _check_own(owners, found)
        yield found


def _copied(batch: Batch) -> Batch:
    found: Batch = mapped(
        lambda tensor: in_pinned_memory(tensor.clone()) if tensor.is_pinned() else tensor.clone(), batch
    )
    return found


def shapes(batch: Batch | None) -> Hashable:
    """Return a key that is equal for batches that can be fused; None for no batch."""
    return None if batch is None else (form(batch[0]), form(batch[1]))


def fuse_batches(batches: Sequence[Batch]) -> tuple[Any, Any, bool]:
    """Return the arguments of `TrialGroup.train_step`, from one batch per trial.

    Raises:
        FuseError: they differ in more than the numbers in their tensors.
    """
    first = batches[0]
    if all(batch is first for batch in batches):
        return (*first, False)
    distinct = {id(batch): batch for batch in batches}.values()  # trials at the same epoch have one
    if len({shapes(batch) for batch in distinct}) > 1:
        raise FuseError(f"the trials' batches {UNLIKE}; allowed: equal ones for all trials of a step")
    inputs, targets = (stacked(given) for given in zip(*batches, strict=True))
    return inputs, targets, True


UNLIKE = "differ in their tensors' shapes or types, in their containers and keys, or in plain values"


def by_place(readers: Sequence[Reader]) -> dict[tuple[int, int], list[Reader]]:
    """Sort trials by epoch and place."""
    found: dict[tuple[int, int], list[Reader]] = {}
    for reader in readers:
        found.setdefault((reader.epoch, reader.place), []).append(reader)
    return found


def _skip(readers: Sequence[Reader], batches: Iterator[Batch], seen: BatchesSeen, skipped: Callable[[], None]) -> None:
    """Read what trials at one place have trained on.

    Raises:
        ReplayError: it is something else, or there is less of it.
    """
    place, count = readers[0].place, 0
    for _ in islice(batches, place):
        count += 1
        skipped()
    others = [r.number for r in readers if r.mark and (count < place or r.mark != seen.mark)]
    if others:
        raise ReplayError(others, f"epoch {readers[0].epoch + 1}, and its batches are others now")


def _read(
    study: Study,
    given: Iterable[Any] | None,
    reader: Reader,
    source: str,
    turn: Callable[[], None],
    seen: BatchesSeen | None,
) -> Iterator[Batch]:
    is_empty = given is not None and not reader.place
    batches = iter(() if given is None else with_an_end(study, given, source, f" of epoch {reader.epoch + 1}"))
    while True:
        turn()
        with setting_nothing(study, source) if may_set(study) else _UNWATCHED:
            each = next(batches, _END)
        if each is _END:
            break
        is_empty, batch = False, as_batch(each, source)
        if seen is not None:
            seen.add(batch)
        yield batch
    if is_empty:
        raise no_batches(reader.epoch)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _check_own(readers: Sequence[Reader], found: dict[int, Batch]) -> None:
    for here in by_place(readers).values():
        kinds = {shapes(found.get(reader.number)) for reader in here}
        if len(kinds) > 1 and None in kinds:
            raise FuseError("Study.trial_batches gave some trials more batches than others; allowed: equally many")
        if len(kinds) > 1:
            raise FuseError(f"Study.trial_batches gave batches that {UNLIKE}; allowed: equal ones for all trials")
