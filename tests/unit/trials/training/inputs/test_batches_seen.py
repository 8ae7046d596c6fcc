"""Batches are known again by a mark, in whatever form they come, and no others are taken for them."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from trials.training.inputs.batches_seen import BatchesSeen


def mark(*batches: Any) -> str:
    seen = BatchesSeen()
    for batch in batches:
        seen.add(batch)
    return seen.mark


def batch(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (8, 40), generator=stream), torch.randint(0, 9, (8,), generator=stream)


def test_the_same_batches_have_the_same_mark_wherever_they_lie() -> None:
    x, y = batch(1)
    assert mark((x, y), batch(2)) == mark((x.clone(), y), batch(2)) == mark((x.t().contiguous().t(), y), batch(2))
    assert mark() == mark() != mark((x, y))


DATA = batch(0, 8, 40)
OTHERS: dict[str, list[Any]] = {
    "in another order": [batch(1), batch(0)],
    "fewer": [batch(0)],
    "more": [batch(0), batch(1), batch(1)],
    "a label": [batch(0), (batch(1)[0], batch(1)[1].roll(1))],
    "a type": [batch(0), (batch(1)[0].double(), batch(1)[1])],
    "a shape": [batch(0), (batch(1)[0].view(40, 8), batch(1)[1])],
    "rows in another order": [batch(0), tuple(each.flip(0) for each in batch(1))],
    "a plain value": [batch(0), ({"x": batch(1)[0], "n": 1}, batch(1)[1])],
}


@pytest.mark.parametrize("what", OTHERS)
def test_others_have_another(what: str) -> None:
    assert mark(*OTHERS[what]) != mark(batch(0), batch(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (63,), (65,), (3, 50, 7)])
def test_tensors_of_all_kinds(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = torch.ones(shape, dtype=dtype)
    other = given.clone()
    if other.numel():
        other.view(-1)[0] = 0
    assert (mark((given, None)) == mark((other, None))) == (not given.numel())
    assert mark((given.conj(), None)) == mark((given.conj().resolve_conj(), None))


@pytest.mark.parametrize(
    "given",
    [
        torch.ones(1, 2, dtype=torch.bfloat16)[:, 0],  # a step of two numbers leads to none
        torch.full((), 1j).conj().imag,
        torch.full((1,), 1j).conj().imag,
        torch.full((3, 50, 7), 1j).conj().imag,
    ],
    ids=["a column of one", "a negative", "one negative", "negatives"],
)
def test_views_that_numpy_cannot_take(given: Tensor) -> None:
    plain = torch.tensor(given.tolist(), dtype=given.dtype)
    assert mark((given, None)) == mark((plain, None)) != mark((-plain, None))


def test_a_mark_in_a_checkpoint_of_an_earlier_version_still_holds() -> None:
    batch = torch.arange(6.0).view(2, 3), torch.tensor([1, 0])
    assert mark(batch) == mark([*batch]) == "71907375420f5d64938e626a835bb933"
    assert mark({"x": batch[0]}) == "06c882e4f0e1b141afae5bc91ea8eb99"


def test_images_that_differ_only_in_their_middle() -> None:
    """As those of digits do: a regular pattern of places would see their margins alone."""
    one, other = torch.zeros(128, 28, 28), torch.zeros(128, 28, 28)
    one[:, 8:20, 8:20], other[:, 8:20, 8:20] = batch(0, 128, 12, 12)[0], batch(1, 128, 12, 12)[0]
    assert mark((one, None)) != mark((other, None))


def test_what_cannot_be_seen_has_no_mark() -> None:
    x, y = batch(0)
    assert mark((x.to_sparse(), y)) == mark((torch.empty(3, device="meta"), y), (x, y)) == ""


def test_another_process_finds_the_same() -> None:
    code = """
import torch
from trials.training.inputs.batches_seen import BatchesSeen
seen = BatchesSeen()
seen.add(({"b": torch.arange(200.0), "a": "text"}, None))
print(seen.mark)"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == mark(({"b": torch.arange(200.0), "a": "text"}, None))
