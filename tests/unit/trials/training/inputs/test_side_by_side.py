"""Epochs that are read side by side have the batches that they have alone, or it is noticed that they do not."""

import io
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset, random_split

from tests.support.fused_and_solo import Batch, ToyStudy
from trials import FuseError
from trials.gate.base import OpenGate
from trials.training.inputs import batches as batches_module
from trials.training.inputs.batches import Reader, rounds
from trials.training.inputs.side_by_side import DisturbedError, SideBySide
from trials.training.inputs.turns import Turns

DATA = TensorDataset(torch.arange(40.0).view(20, 2), torch.arange(20.0))
EPOCHS = 2, 7
READERS = [Reader(number, {}, epoch) for number, epoch in enumerate(EPOCHS)]

Open = Callable[[int], Iterable[Any]]


class Loads(ToyStudy):
    """Its batches are what a function of the epoch gives; it keeps in attributes what that reads."""

    def __init__(self, of: "Callable[[Loads], Open]", **kept: Any) -> None:
        super().__init__(lambda n: nn.Linear(2, 1))
        vars(self).update(kept)
        self.open = of(self)

    def batches(self, epoch: int) -> Iterable[Batch]:
        return self.open(epoch)


class OfTrials(Loads):
    """The same for each trial, whose number stands for the epoch."""

    def trial_batches(self, params: dict[str, Any], number: int, epoch: int) -> Iterable[Batch]:
        return self.open(number)


def drawn(seed: Callable[[int], object], draw: Callable[[], Any]) -> Open:
    """Seeds when an epoch begins, and draws for each batch."""

    def batches(epoch: int) -> Iterator[Batch]:
        seed(epoch)
        for _ in range(6):
            yield torch.as_tensor(draw(), dtype=torch.float64).view(1, 1), torch.zeros(1)

    return batches


def always(given: Iterable[Any]) -> Callable[[Loads], Open]:
    """Gives each epoch the same object."""
    return lambda loads: lambda epoch: given


def noisy(batch: list[Any]) -> Batch:
    """A transform that draws from PyTorch's global stream."""
    inputs, targets = torch.utils.data.default_collate(batch)
    return inputs + torch.rand(1), targets


def seeded(epoch: int, loader: "DataLoader[Any]") -> "DataLoader[Any]":
    torch.manual_seed(epoch)
    return loader


def shuffled(loads: Loads) -> Open:
    """A sampler's generator, in the study, is seeded again for each epoch."""
    draws = torch.Generator()
    sampler = RandomSampler(DATA, generator=draws)
    loads.loader = DataLoader(DATA, batch_sampler=BatchSampler(sampler, 3, drop_last=False), collate_fn=noisy)  # type: ignore[attr-defined]

    def batches(epoch: int) -> Iterator[Batch]:
        torch.manual_seed(epoch)
        draws.manual_seed(epoch)
        yield from loads.loader  # type: ignore[attr-defined]

    return batches


FIXED: dict[str, Callable[[Any], Open]] = {
    "PyTorch's stream": lambda s: drawn(torch.manual_seed, lambda: torch.rand(1)),
    "NumPy's": lambda s: drawn(np.random.seed, lambda: np.random.rand()),
    "NumPy's stream of pairs": lambda s: drawn(np.random.seed, lambda: np.random.randn()),
    "Python's": lambda s: drawn(random.seed, random.random),
    "a generator of the study's": lambda s: drawn(s.torch.manual_seed, lambda: torch.rand(1, generator=s.torch)),
    "a RandomState of the study's": lambda s: drawn(s.numpy.seed, lambda: s.numpy.rand()),
    "a Random of the study's": lambda s: drawn(s.python.seed, lambda: s.python.random()),
    "a loader whose transform draws": lambda s: lambda e: seeded(e, DataLoader(DATA, 3, True, collate_fn=noisy)),
    "a sampler's generator": shuffled,
    "a part of the data": lambda s: (
        lambda e: iter(DataLoader(random_split(DATA, [15, 5], torch.Generator().manual_seed(e))[0], 3))
    ),
    "lists": lambda s: lambda e: [(torch.full((1, 2), float(e)), torch.zeros(1))] * (e % 3),
    "a generator over a list": lambda s: lambda e: ((torch.full((1, 2), e + n), torch.zeros(1)) for n in range(e)),
    "one list": always([(torch.ones(1, 2), torch.zeros(1))] * 5),
    "one loader": always(DataLoader(DATA, 3)),
}
"""What gives an epoch the same batches each time."""


def make(of: Callable[[Any], Open], kind: type[Loads] = Loads) -> Loads:
    return kind(of, torch=torch.Generator(), numpy=np.random.RandomState(), python=random.Random())


def read(study: Loads, readers: Iterable[Reader]) -> dict[int, list[Batch]]:
    found: dict[int, list[Batch]] = {}
    for batches in rounds(study, list(readers)):
        for number, batch in batches.items():
            found.setdefault(number, []).append((batch[0].clone(), batch[1].clone()))
    return found


def assert_equal(one: list[Batch], other: list[Batch]) -> None:
    assert len(one) == len(other)
    for ours, theirs in zip(one, other, strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("name", FIXED)
def test_epochs_side_by_side_are_as_alone(name: str) -> None:
    study = make(FIXED[name])
    assert not SideBySide(study, OpenGate()).disturbed(READERS)
    together = read(study, READERS)
    for reader in READERS:
        assert_equal(together[reader.number], read(study, [reader])[reader.number])


@pytest.mark.parametrize("drawn_before", [0, 1])
def test_numpy_may_have_the_second_of_a_pair_left(drawn_before: int) -> None:
    np.random.seed(0)
    np.random.randn(drawn_before)
    turns = Turns(ToyStudy(lambda n: nn.Linear(2, 1)))
    takes = [turns.new() for _ in range(2)]
    found = [(which, np.random.randn()) for _ in range(3) for which in range(2) if takes[which]() is None]
    alone = np.random.RandomState(0).randn(drawn_before + 4)[drawn_before:]
    assert [value for which, value in found if not which] == alone[:3].tolist()
    assert [value for which, value in found if which] == alone[1:4].tolist(), "it begins where the other was"


@pytest.mark.parametrize("name", [name for name in FIXED if "stream" in name or "study's" in name])
def test_so_are_those_of_each_trial(name: str) -> None:
    study, readers = make(FIXED[name], OfTrials), [Reader(number, {}, 0) for number in range(3)]
    assert not SideBySide(study, OpenGate()).disturbed(readers)
    together = read(study, readers)
    for reader in readers:
        assert_equal(together[reader.number], read(study, [reader])[reader.number])


def test_an_epoch_that_continues_beside_one_that_begins_is_as_alone() -> None:
    study = make(FIXED["PyTorch's stream"])
    together = read(study, [READERS[0], READERS[1]._replace(place=2)])
    assert_equal(together[0], read(study, [READERS[0]])[0])
    assert_equal(together[1], read(study, [READERS[1]])[1][2:])


UNSEEDED: dict[str, Callable[[Any], Open]] = {
    "a loader that shuffles": lambda s: lambda e: DataLoader(DATA, 3, shuffle=True, collate_fn=noisy),
    "one with a generator": lambda s: lambda e: DataLoader(DATA, 3, shuffle=True, generator=s.torch),
}


@pytest.mark.parametrize("name", UNSEEDED)
def test_what_differs_each_time_by_what_it_draws_may_be_read_side_by_side(name: str) -> None:
    assert not SideBySide(make(UNSEEDED[name]), OpenGate()).disturbed(READERS)


class OneIterator(IterableDataset[Any]):
    """It is its own iterator, which begins anew when it is asked for."""

    def __iter__(self) -> "OneIterator":
        self.at = 0
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self.at == 6:
            raise StopIteration
        self.at += 1
        return torch.full((2,), float(self.at)), torch.zeros(())


def from_file(study: Any) -> Open:
    study.file = io.BytesIO(bytes(range(100)))

    def batches(epoch: int) -> Iterator[Batch]:
        study.file.seek(10 * epoch)
        for _ in range(5):
            yield torch.tensor([[float(study.file.read(1)[0])]]), torch.zeros(1)

    return batches


def set_anew(study: Any) -> Open:
    def batches(epoch: int) -> Iterator[Batch]:
        study.draws = np.random.default_rng(epoch)
        for _ in range(5):
            yield torch.tensor([[study.draws.random()]]), torch.zeros(1)

    return batches


def persisting(study: Any) -> Open:
    study.loader = DataLoader(DATA, 3, num_workers=1, persistent_workers=True)

    def batches(epoch: int) -> Iterator[Batch]:
        yield from study.loader

    return batches


def one_stream(study: Any) -> Open:
    study.stream = cycle([(torch.full((1, 2), float(n)), torch.zeros(1)) for n in range(100)])
    return lambda epoch: islice(study.stream, 10)


def refusing(study: Any) -> Open:
    study.is_open = False

    def batches(epoch: int) -> Iterator[Batch]:
        assert not study.is_open, "it is open"
        study.is_open = True
        try:
            yield from DataLoader(DATA, 3)
        finally:
            study.is_open = False

    return batches


SHARED: dict[str, Callable[[Any], Open]] = {
    "a loader whose workers persist": persisting,
    "a dataset that is its iterator": always(DataLoader(OneIterator(), 2)),
    "a file": from_file,
    "a generator that is set anew": set_anew,
    "one stream of batches": one_stream,
    "what is open once": refusing,
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("kind", [Loads, OfTrials])
def test_what_is_shared_is_noticed(name: str, kind: type[Loads]) -> None:
    study, readers = make(SHARED[name], kind), READERS if kind is Loads else [Reader(n, {}, 0) for n in range(2)]
    cause = SideBySide(study, OpenGate()).disturbed(readers)
    assert "gives other batches where" in cause and ("it is open" in cause) == (name == "what is open once")
    vars(study).clear()  # workers that are left to the garbage collector end after seconds


def test_it_is_tried_once_for_all_that_are_read_alike() -> None:
    opened: list[int] = []

    def of(study: Any) -> Open:
        def batches(epoch: int) -> list[Batch]:
            opened.append(epoch)
            return [(torch.ones(1, 2), torch.zeros(1))]

        return batches

    beside = SideBySide(make(of), OpenGate())
    for epoch in range(3):
        assert not beside.disturbed([Reader(n, {}, epoch) for n in range(3)]), "all at one epoch are no reason"
    assert not opened
    for _ in range(3):
        assert not beside.disturbed(READERS)
    assert sorted(opened) == [2, 2, 7, 7]


def test_errors_of_the_study_pass_through() -> None:
    with pytest.raises(FuseError, match=r"Study\.batches returned None"):
        SideBySide(make(lambda s: lambda e: None), OpenGate()).disturbed(READERS)  # type: ignore[arg-type, return-value]


def late(study: Any) -> Open:
    """From the fifth on, batches come from what epochs share."""

    def batches(epoch: int) -> Iterator[Batch]:
        own = [(torch.full((1, 2), 10.0 * epoch + n), torch.zeros(1)) for n in range(8)]
        yield from own[:4]
        study.left = own[4:]
        while study.left:
            yield study.left.pop(0)

    return batches


def train(study: Loads, beside: SideBySide, readers: list[Reader]) -> None:
    """Read the batches of `readers` as a cohort does."""
    marks: dict[int, str] = {}
    assert not beside.disturbed(readers)
    for _ in rounds(study, readers, marks=marks):
        pass
    beside.note(readers, marks)


@pytest.mark.parametrize("name", [*FIXED, *UNSEEDED])
def test_epochs_that_are_read_again_and_again_are_the_same_or_differ_each_time(name: str) -> None:
    study = make({**FIXED, **UNSEEDED}[name])
    beside = SideBySide(study, OpenGate())
    for readers in (READERS[:1], READERS, READERS[1:], READERS):
        train(study, beside, readers)


@pytest.mark.parametrize(("kind", "is_first_alone"), [(Loads, True), (Loads, False), (OfTrials, False)])
def test_an_epoch_that_is_another_than_alone_is_noticed_at_its_end(
    kind: type[Loads], is_first_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "AHEAD", 1)
    study = make(late, kind)
    beside = SideBySide(study, OpenGate())
    if is_first_alone:
        train(study, beside, READERS[:1])
    with pytest.raises(DisturbedError, match=r"trials \[0, 1\] .* epoch \d had other batches than alone: Study"):
        train(study, beside, READERS)
    assert "gives other batches where" in beside.disturbed(READERS)


@pytest.mark.parametrize("is_later_alone", [True, False])
def test_so_is_one_that_others_disturb_later(
    is_later_alone: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From epoch 10 on, batches come from what epochs share."""
    monkeypatch.setattr(batches_module, "AHEAD", 1)
    study = make(lambda s: lambda e: late(s)(e) if e >= 10 else list(late(s)(e)))
    beside = SideBySide(study, OpenGate())
    train(study, beside, READERS)
    later = [Reader(0, {}, 10), Reader(1, {}, 11)]
    train(study, beside, later)
    if is_later_alone:
        train(study, beside, later[:1])
        assert "Trials that have trained on epoch 11 then may differ" in caplog.text
    else:
        with pytest.raises(DisturbedError, match="epoch 11 had other batches than alone"):
            train(study, beside, [later[0], Reader(1, {}, 0)])
    assert "gives other batches where several epochs" in beside.disturbed(READERS)


def test_a_whole_epoch_is_read_again_once() -> None:
    opened: list[int] = []

    def of(study: Any) -> Open:
        def batches(epoch: int) -> list[Batch]:
            opened.append(epoch)
            return [(torch.full((1, 2), float(epoch)), torch.zeros(1))]

        return batches

    study = make(of)
    beside = SideBySide(study, OpenGate())
    train(study, beside, READERS[:1])
    for _ in range(3):
        train(study, beside, READERS)
    assert (opened.count(2), opened.count(7)) == (1 + 2 + 3, 2 + 3 + 1), "epoch 3 was known already"
