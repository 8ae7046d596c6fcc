"""Trials leave, part and join with little memory beside their groups': never a second copy of a group."""

import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.common_bits import frozen, trained
from tests.support.fused_and_solo import OPTIMIZERS, ToyStudy, members
from tests.support.live_bytes import most_added
from tests.support.own_optimizers import OWN_OPTIMIZERS
from tests.support.slow_cases import others_slow
from tests.support.states import states
from trials import TrialGroup
from trials.gate.base import OpenGate
from trials.optim.vector import VectorOptimizer

WIDTH, SIZE = 128, 8
BATCH = torch.ones(2, WIDTH), torch.zeros(2)

Make = Callable[[int, Iterable[Any]], torch.optim.Optimizer]

OWN: dict[str, Make] = {
    "plain": lambda n, ps: torch.optim.SGD(ps, 0.01),
    "momentum": lambda n, ps: torch.optim.SGD(ps, 0.01, momentum=0.9),
    "adamw": lambda n, ps: OPTIMIZERS["adamw"](n % 3, ps),
    "rprop": lambda n, ps: torch.optim.Rprop(ps, 0.001),
    "in attributes": OWN_OPTIMIZERS["in attributes"],
    "two modes": lambda n, ps: OWN_OPTIMIZERS["two modes"](n % 3, ps),
    "loses": lambda n, ps: torch.optim.AdamW(ps, 1e30 if n % 3 == 1 else 0.01),
}


class Shared(nn.Module):
    """A large frozen base, and a small adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = frozen(lambda: nn.Linear(WIDTH, WIDTH))
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "deep": lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3 * SIZE)]),
    "one tensor": lambda: nn.Linear(WIDTH, 4 * WIDTH),
    "statistics": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)),
    "shared": Shared,
}


@pytest.fixture(autouse=True)
def own_objects() -> Iterator[None]:
    """Hide what lives already: another test's tensors may be of any kind, and need not be measured."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def study_of(model: str, optimizer: str) -> ToyStudy:
    return ToyStudy(lambda n: MODELS[model](), lambda n, ps: OWN[optimizer](n, trained(ps)), [BATCH])


def group_of(study: ToyStudy, numbers: Iterable[int]) -> TrialGroup:
    group = TrialGroup(study, members(study, numbers), OpenGate())
    for _ in range(2):
        group.train_step(*BATCH)
    group.end_epoch()
    group._fused.rows.forget_gradients()  # else they would hide as much
    return group


def tensor_bytes(value: Any) -> int:
    """Of all tensors in what goes to disk."""
    if isinstance(value, Tensor):
        return value.nbytes
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(tensor_bytes, inner))


def same(one: Any, other: Any) -> bool:
    return repr(_with_bits(one)) == repr(_with_bits(other))


def _with_bits(value: Any) -> Any:
    """The same with all bits of each tensor in its place."""
    if isinstance(value, Tensor):
        bits = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return value.dtype, value.shape, hashlib.sha256(bits).digest()
    if isinstance(value, dict):
        return {key: _with_bits(each) for key, each in value.items()}
    return type(value)(map(_with_bits, value)) if type(value) in (list, tuple) else value


def split_off(study: ToyStudy, rows: list[int]) -> None:
    """Split a group, and compare all that its trials are, and become, with what they were, and would have become."""
    group, undivided = group_of(study, range(SIZE)), group_of(study, range(SIZE))
    before = states(group)
    other = group.split(rows)
    stay = [row for row in range(SIZE) if row not in rows]
    assert (group.numbers, other.numbers) == (stay, rows)
    assert same(states(other), [before[row] for row in rows])
    assert same(states(group), [before[row] for row in stay])
    assert group.finite_K().tolist() == [undivided.finite_K().tolist()[row] for row in stay]
    for each in (undivided, group, other):
        each.use_units()
        each.train_step(*BATCH)
    for part in (group, other):
        for row, number in enumerate(part.numbers):
            for name, tensor in undivided.export(number).tensors.items():
                torch.testing.assert_close(part.export(row).tensors[name], tensor, equal_nan=True)
    del before, undivided
    gc.collect()
    living = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    plain = [each for each in living if each.layout is torch.strided and each.device.type == "cpu"]
    # by shape: to print one would end the process
    assert not [each.shape for each in plain if each.numel() and not each.untyped_storage().nbytes()]


CASES = [*product(["statistics"], OWN), *product(["one tensor", "shared"], ["adamw", "in attributes"])]


@pytest.mark.parametrize("rows", [[4, 5, 6, 7], pytest.param([6, 1, 3], marks=pytest.mark.slow)])
@pytest.mark.parametrize(("model", "optimizer"), others_slow(CASES, [("statistics", "loses"), *CASES[-4:]]))
def test_trials_of_split_groups_are_as_they_were(model: str, optimizer: str, rows: list[int]) -> None:
    split_off(study_of(model, optimizer), rows)


def bytes_of(group: TrialGroup) -> tuple[int, int]:
    """Of one trial in a group, with what all hold once, and of what its optimizers need to compute."""
    rows, size = group._fused.rows, group.size
    own = sum(t.nbytes for n, t in {**rows.parameters, **rows.buffers}.items() if n not in rows.once) // size
    scratch = 0
    for optimizer in group._optimizers:
        state, once = group.export(0).optimizers, sum(t.nbytes for _, t in rows.once.items())
        if isinstance(optimizer, VectorOptimizer):
            own += sum(t.nbytes for kinds in optimizer._tables().values() for t in kinds.values()) // size
            scratch += sum(t.nbytes for t in optimizer._scratch.values())
        else:
            own += sum(tensor_bytes(each.plain()) for each in state.values())
    return own + once, scratch


QUICK = [("one tensor", "plain"), ("deep", "adamw"), ("statistics", "two modes"), ("shared", "loses")]


@pytest.mark.parametrize(("model", "optimizer"), others_slow(product(MODELS, OWN), QUICK))
def test_splitting_takes_no_second_copy(model: str, optimizer: str) -> None:
    group = group_of(study_of(model, optimizer), range(SIZE))
    trial, scratch = bytes_of(group)
    code = sum(p.nbytes for p in MODELS[model]().parameters())
    most, more = most_added(lambda: group.split([6, 1, 3, 4]))
    assert more <= 1.1 * code  # each group has a model of its own, for its code
    copied = 1 if scratch else 2  # an optimizer without a rule may keep state from its beginning, and is copied then
    assert most <= 1.1 * (copied * trial + code) + scratch


@pytest.mark.parametrize("optimizer", others_slow(OWN, ["two modes"]))
def test_joining_and_leaving_take_the_room_of_one_tensor(optimizer: str) -> None:
    study = study_of("deep", optimizer)
    tensor, joins = WIDTH * WIDTH * 4, 3

    group, other = group_of(study, range(SIZE)), group_of(study, range(SIZE, SIZE + joins))
    most, more = most_added(lambda: group.merge(other))
    assert most <= 1.25 * (SIZE + joins) * tensor
    assert more <= tensor
    most, more = most_added(lambda: group.keep([0, 9, 5, 3]))
    assert most <= 1.25 * 4 * tensor
    assert more < 0


class FullAt(TorchDispatchMode):
    """A device whose memory is full at one operation."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("full")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["momentum", pytest.param("two modes", marks=pytest.mark.slow)])
def test_a_split_that_fails_leaves_all_trials_with_their_group(optimizer: str) -> None:
    """So that whoever continues from checkpoints knows of all."""
    study, failed, number = study_of("statistics", optimizer), 0, 1
    while True:
        group = group_of(study, range(4))
        try:
            with FullAt(number):
                other = group.split([2, 0])
        except torch.OutOfMemoryError:
            failed += 1
            number += 1 + failed // 12
            assert group.numbers == [0, 1, 2, 3]
            continue
        assert (group.numbers, other.numbers) == ([1, 3], [2, 0])
        assert failed > 12
        return
