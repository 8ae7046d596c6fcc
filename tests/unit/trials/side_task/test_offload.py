"""Device memory: how many trials fit, and giving way to the main job. The allocator's meter is made up."""

import gc
import itertools
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.statuses import MovedIn, MovedOut, Status
from tests.support.fused_and_solo import OPTIMIZERS
from tests.support.rich_study import RichStudy
from trials import TrialGroup, build_member
from trials.gate.base import HOST_UNIT, OpenGate, StopRequested
from trials.side_task.fit import most_trials
from trials.side_task.offload import CHUNK_BYTES, LOOK_EVERY_NS, Offload, tensors_on


@given(st.integers(0, 10**9), st.integers(1, 10**8), st.integers(1, 10**10))
def test_as_many_trials_as_a_straight_line_allows_and_no_more(fixed: int, each: int, limit: int) -> None:
    most = most_trials(fixed + each, fixed + 2 * each, limit)
    assert most == 0 or fixed + most * each <= limit
    assert most > 0 or fixed + each > 0.9 * limit
    if each > fixed:
        assert fixed + (most + 1) * each > 0.9 * limit - 1


def test_two_trials_that_seem_to_take_no_more_than_one_are_not_taken_at_their_word() -> None:
    assert most_trials(160, 160, 1000) == 75


class CountingGate(OpenGate):
    """Open, and counts who asks."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.rests = 0

    def enter(self, unit: int) -> None:
        self.asked.append(unit)

    def rest(self) -> None:
        self.rests += 1


class FakeMeter:
    """An allocator that keeps what is freed until it is trimmed. The memory in which `tensors` lie now is its own."""

    def __init__(self, tensors: Sequence[Tensor], cached: int = 0) -> None:
        self.storages = list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())
        self._held = cached

    def held_bytes(self) -> int:
        self._held = max(self._held, self._used())
        return self._held

    def trim(self) -> None:
        self._held = self._used()

    def _used(self) -> int:
        return sum(storage.nbytes() for storage in self.storages)


class Home:
    """An offload with some tensors, and a limit that changes while it waits."""

    def __init__(self, page: Page, tensors: Sequence[Tensor], cached: int = 0) -> None:
        self.words, self.gate = page.words, CountingGate()
        self.reported: list[Status] = []
        self.while_out: list[Callable[[], int | None]] = []
        self._clock_ns = itertools.count(0, LOOK_EVERY_NS // 2)
        self.meter = FakeMeter(tensors, cached)
        self.offload = Offload(
            page.words,
            self.gate,
            self.meter,
            lambda: tensors,
            self.reported.append,
            self._wait,
            lambda: next(self._clock_ns),
        )

    def limit(self, limit: int) -> None:
        self.words[Field.SIDE_LIMIT_BYTES] = limit

    def _wait(self, seconds: float) -> int | None:
        return self.while_out.pop(0)()


@pytest.fixture
def page(tmp_path: Path) -> Any:
    made = Page.open(page_path(tmp_path / "pages", 0))
    yield made
    made.close()


@pytest.mark.parametrize("limit", [0, 400, 1 << 40])
def test_whoever_is_within_the_limit_stays(page: Page, limit: int) -> None:
    home = Home(page, [torch.zeros(100)])
    home.limit(limit)
    home.offload.step_ended()
    assert (home.reported, home.gate.asked, page.words[Field.SIDE_BYTES]) == ([], [], 400)


def test_the_allocator_is_asked_now_and_then(page: Page) -> None:
    home = Home(page, [torch.zeros(100)])
    asked = 0

    def held_bytes() -> int:
        nonlocal asked
        asked += 1
        return 400

    home.meter.held_bytes = held_bytes  # type: ignore[method-assign]
    for _ in range(10):
        home.offload.step_ended()
    assert asked == 5


def test_what_is_only_cached_is_given_back_first(page: Page) -> None:
    home = Home(page, [torch.zeros(100)], cached=5000)
    home.limit(1000)
    home.offload.step_ended()
    assert (home.reported, page.words[Field.SIDE_BYTES]) == ([], 400)
    assert home.gate.asked == [HOST_UNIT], "freeing waits for what is queued, so it is done in a bubble"


def test_all_goes_to_the_host_in_pieces_through_the_gate_and_comes_back_when_there_is_room(page: Page) -> None:
    wide = torch.arange(CHUNK_BYTES, dtype=torch.int32)  # four pieces
    views = [wide, wide[5:], torch.randn(3, 4)]
    before = [view.clone() for view in views]
    home = Home(page, views)
    home.limit(4 * CHUNK_BYTES)

    def still_short() -> None:
        assert all(storage.nbytes() == 0 for storage in home.meter.storages)
        assert page.words[Field.SIDE_BYTES] == 0
        home.limit(4 * CHUNK_BYTES + 47)

    def enough() -> None:
        home.limit(4 * CHUNK_BYTES + 48)

    home.while_out = [still_short, enough]
    home.offload.step_ended()
    moved_out, moved_in = home.reported
    assert isinstance(moved_out, MovedOut) and moved_out.left_bytes == 0 and isinstance(moved_in, MovedIn)
    assert all(torch.equal(view, own) for view, own in zip(views, before, strict=True))
    assert home.gate.asked.count(HOST_UNIT) >= 2 * 5 and set(home.gate.asked) == {HOST_UNIT}
    assert home.gate.rests == 2


def test_a_thread_may_read_and_write_what_is_out(page: Page) -> None:
    weight = nn.Parameter(torch.arange(1000.0))
    data = weight.detach()
    table, last = data.view(10, 100), data[990:]
    home = Home(page, [weight, data, table, last])
    home.limit(1)
    read: list[float] = []

    def log() -> None:
        read.extend((weight.sum().item(), float(table[3].mean()), float(last.max())))
        last.zero_()

    def while_out() -> None:
        thread = threading.Thread(target=log)
        thread.start()
        thread.join()
        assert all(storage.nbytes() == 0 for storage in home.meter.storages)
        home.limit(0)

    home.while_out = [while_out]
    home.offload.step_ended()
    assert read == [499500.0, 349.5, 999.0]
    assert weight.sum().item() == sum(range(990))
    assert all(each.untyped_storage() is home.meter.storages[0] for each in (weight, data, table, last))


def test_what_a_thread_has_replaced_while_it_was_out_stays_replaced(page: Page) -> None:
    weight, other = nn.Parameter(torch.zeros(100)), torch.zeros(100)
    home = Home(page, [weight, other])
    home.limit(1)

    def replace() -> None:
        weight.data = torch.ones(100)
        home.limit(0)

    home.while_out = [replace]
    home.offload.step_ended()
    assert weight.sum().item() == 100 and not other.any()


class Labelled(Tensor):
    """A class of the user's."""


@pytest.mark.parametrize("other", [lambda t: t.as_subclass(Labelled), Tensor.conj])
def test_memory_stays_where_it_is_while_something_lies_in_it_that_cannot_be_moved(
    page: Page, other: Callable[[Tensor], Tensor]
) -> None:
    held, free = torch.ones(100, dtype=torch.complex64), torch.ones(50)
    stays = other(held)
    known = [held, free] if isinstance(stays, Labelled) else [held, stays, free]
    home = Home(page, known)
    home.limit(1)

    def while_out() -> None:
        assert [storage.nbytes() for storage in home.meter.storages] == [800, 0]
        assert stays.sum() == 100
        home.limit(0)

    home.while_out = [while_out]
    home.offload.step_ended()
    assert not home.while_out, "it went out"
    held.mul_(2j)
    assert stays.sum() == (200j if isinstance(stays, Labelled) else -200j)


def test_what_is_kept_of_a_vmap_that_is_over_is_no_tensor_of_this_process() -> None:
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x * 2

    torch.vmap(keep)(torch.ones(3, 2))
    (wrapper,) = kept
    assert any(each is wrapper for each in gc.get_objects())
    assert not any(each is wrapper for each in tensors_on("cpu"))
    assert all(each.untyped_storage().nbytes() >= 0 for each in tensors_on("cpu"))


def test_a_view_s_base_is_found_although_only_the_view_refers_to_it(page: Page) -> None:
    view = torch.arange(1000.0)[1:]
    memory = view.untyped_storage()
    home = Home(page, [t for t in tensors_on("cpu") if t.untyped_storage() is memory])
    home.limit(1)

    def while_out() -> None:
        assert (memory.nbytes(), float(view.sum())) == (0, 499500.0)
        home.limit(0)

    home.while_out = [while_out]
    home.offload.step_ended()
    assert not home.while_out, "it went out"
    assert float(view.sum()) == 499500.0


def test_the_end_comes_while_it_is_out(page: Page) -> None:
    weight = torch.ones(100)
    home = Home(page, [weight])
    home.limit(1)
    home.while_out = [lambda: None, lambda: signal.SIGTERM]
    with pytest.raises(StopRequested):
        home.offload.step_ended()
    assert float(weight.sum()) == 100  # as what the study has left to its end may ask


def make_group(seed: int) -> tuple[TrialGroup, list[tuple[Tensor, Tensor]]]:
    stream = torch.Generator().manual_seed(seed)
    data = [(torch.randn(5, 3, dtype=torch.float64, generator=stream), torch.zeros(5)) for _ in range(6)]

    def model(n: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)).double()

    study = RichStudy(model, OPTIMIZERS["adamw"], data)
    return TrialGroup(study, [build_member(study, n, {"n": n}) for n in range(3)], OpenGate()), data


def test_a_group_that_was_out_goes_on_bitwise_as_if_it_had_stayed(page: Page) -> None:
    stays, data = make_group(1)
    for inputs, targets in data:
        stays.train_step(inputs, targets)
    moves, data = make_group(1)
    kept = {inputs.untyped_storage().data_ptr() for inputs, _ in data}
    for step, (inputs, targets) in enumerate(data):
        moves.train_step(inputs, targets)
        if step in (0, 3):
            mine = [t for t in tensors_on("cpu") if t.untyped_storage().data_ptr() not in kept]
            home = Home(page, mine)
            home.limit(1)
            home.while_out = [lambda home=home: home.limit(0)]
            home.offload.step_ended()
            moved_out = home.reported[0]
            assert isinstance(moved_out, MovedOut) and moved_out.left_bytes < moved_out.held_bytes / 10
            del mine, home
    for row in range(3):
        for one, other in zip(stays.extract(row), moves.extract(row), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
