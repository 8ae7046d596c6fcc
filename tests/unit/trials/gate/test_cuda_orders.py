"""The gate of a device with streams in any order: bubbles, permits, slow hosts, refusals, ends. All is made up."""

import os
import signal
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_hooks.shared.forced_gate import force_gate
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.plan import plan_slot, plan_steps
from tests.support.cuda_world import MS, US, World, learn
from trials.gate.base import HOST_UNIT, GateError, StopRequested
from trials.gate.cuda import NEARLY_ALL

COSTS_NS = (1 * MS, 5 * MS, 10 * MS)
LATE_NS = 1_300 * US
"""How late a host may show what is left of a permit: the other thread looks every millisecond."""
FORCED_EVERY_NS = 5 * MS


@dataclass(frozen=True)
class Bubble:
    gap_ns: int
    permit_ns: int
    length_ns: int
    renews: bool


@dataclass(frozen=True)
class Unit:
    number: int
    part: float
    """of its forecast that it takes"""
    before_ns: int
    """the host needs this long to launch its first kernel, and again for the second"""
    waits: bool
    """its host then waits in the driver for all that is queued, as `.item()` does"""


def times(*of_ms: float) -> st.SearchStrategy[int]:
    return st.sampled_from([round(ms * MS) for ms in of_ms])


# few values each, so that what matters comes together often
BUBBLES = st.lists(
    st.builds(
        Bubble, times(0.2, 5, 20), times(12, 30, 3, 0.001), times(40, 13, 4, 0.1), st.sampled_from([False, False, True])
    ),
    min_size=1,
    max_size=6,
)
AGAIN = st.sampled_from([1, 1, 1, 1, 12])
"""How often the same bubbles come."""
UNITS = st.lists(
    st.builds(
        Unit,
        st.sampled_from([1, 2, 0, HOST_UNIT]),
        st.sampled_from([1.0, 4.0, 1.0, 0.5]),
        times(0, 0, 0, 0, 1, 15),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=6,
)
REFUSED = ("record", "is_done", "elapsed_ns", "wait_for_words")
REFUSALS = st.one_of(st.none(), st.none(), st.tuples(st.sampled_from(REFUSED), st.integers(0, 60)))
ENDS = st.sampled_from(["the daemon asks", "the daemon is killed"])


class Orders:
    """Plays them.

    Attributes:
        bubbles: (begin, permit's end, end) of each that began.
        begun: (forecast of its length, when it began) of each unit.
        forced_ns: since when the gate is forced by others, if it is.
        is_hopeless: whether the gate was forced by itself, because of a unit for which bubbles had become too short.
    """

    def __init__(self, world: World, depth: int) -> None:
        self.world = world
        self.gate = world.gate()
        self.gate.limit_queue(depth)
        learn(world, self.gate, *COSTS_NS)
        self.bubbles: list[list[int]] = []
        self.forced_ns = 2**63
        self.is_hopeless = False
        self._parent = os.getppid()

    def plan(self, bubbles: list[Bubble]) -> int:
        """Returns how long they take."""
        at_ns = 0
        for epoch, bubble in enumerate(bubbles, 1):
            self.world.at(at_ns, partial(self._due, epoch, bubble))
            at_ns += bubble.gap_ns
            self.world.at(at_ns, partial(self._open, epoch, bubble))
            at_ns += bubble.length_ns
            self.world.at(at_ns, partial(self._close, epoch))
        return at_ns

    def _due(self, epoch: int, bubble: Bubble) -> None:
        renewals = ((2 * bubble.permit_ns, 3 * bubble.permit_ns),) if bubble.renews else ()
        plan_slot(self.world.words, 3, bubble.permit_ns, renewals)
        plan_steps(self.world.words, epoch, epoch + 1)

    def _open(self, epoch: int, bubble: Bubble) -> None:
        now_ns = self.world.now_ns
        self.bubbles.append([now_ns, now_ns + bubble.permit_ns * (3 if bubble.renews else 1), 2**63])
        self.world.open(epoch, bubble.permit_ns)

    def _close(self, epoch: int) -> None:
        self.bubbles[-1][2] = self.world.now_ns
        self.world.close(epoch)

    def end(self, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the daemon does, or its `ParentWatch` if it is gone."""
        self.forced_ns = self.world.now_ns
        for number in range(400):
            self.world.at(number * FORCED_EVERY_NS, partial(force_gate, self.world.words))
        if how == "the daemon asks":
            self.world.signals.append(signal.SIGTERM)
        else:
            monkeypatch.setattr(os, "getppid", lambda: 1)

    def away(self, ns: int) -> None:
        """The host is elsewhere, and another thread looks."""
        end_ns = self.world.now_ns + ns
        while self.world.now_ns < end_ns:
            seconds = self.gate.look_for_host()
            nap_ns = end_ns if seconds is None else round(seconds * 1e9)
            self.world.pass_time(min(nap_ns, end_ns - self.world.now_ns))

    def run(self, unit: Unit) -> None:
        world = self.world
        self.gate.enter(unit.number)
        forecast_ns = self.gate._cost_ns(unit.number)
        world._work.append((f"begins {round(forecast_ns)}", 0, 0))
        cost_ns = round(unit.part * (COSTS_NS[unit.number] if unit.number >= 0 else 100 * US))
        for _ in range(2):
            self.away(unit.before_ns)
            world._work.append((f"computes {unit.number} {world.now_ns}", cost_ns // 2, 0))
        if unit.waits:
            while world._work:
                self.away(1 * MS)

    @property
    def begun(self) -> list[tuple[int, int]]:
        return [(int(name.split()[1]), at) for name, at, _ in self.world.kernels if name.startswith("begins")]

    @property
    def computed(self) -> list[tuple[int, int]]:
        """(when it was launched, when it began) of each kernel, those of host work aside: PyTorch's operations wait."""
        found = [(name.split(), at) for name, at, _ in self.world.kernels if name.startswith("computes")]
        return [(int(words[2]), at) for words, at in found if words[1] != str(HOST_UNIT)]


def played(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    bubbles: list[Bubble],
    units: list[Unit],
    refusal: tuple[str, int] | None,
    end: str,
    depth: int,
) -> Orders:
    orders = Orders(world, depth)
    lasts_ns = orders.plan(bubbles)
    world.at(lasts_ns + 1 * MS, lambda: orders.end(end, monkeypatch))
    if refusal is not None:
        world.fails[refusal[0]] = refusal[1]
    try:
        for number in range(400):
            orders.run(units[number % len(units)])
    except StopRequested:
        assert world.now_ns >= orders.forced_ns
        asked = len(orders.begun)
        assert orders.gate.close() or refusal is not None
        assert len(orders.begun) <= asked + 2, "nothing but what was queued"
    except GateError as error:
        orders.is_hopeless = "too long for every bubble" in str(error)
        assert refusal is not None or orders.is_hopeless
        orders.gate.close()
        for ask in (partial(orders.gate.enter, 0), orders.gate.settle):
            with pytest.raises(GateError):
                ask()
    return orders


LATE = [Unit(1, 4.0, 0, False), Unit(1, 1.0, 0, False)]
"""The first takes longer than forecast, so for the second too little is left of a bubble that goes on, or it misses it.
"""
LONG, USELESS = Bubble(5 * MS, 12 * MS, 40 * MS, False), Bubble(5 * MS, 1 * US, 20 * MS, False)


@settings(max_examples=100, deadline=None)
@example([LONG], 3, LATE, None, "the daemon asks", 2)
@example([LONG, USELESS], 2, LATE, None, "the daemon is killed", 2)
@given(BUBBLES, AGAIN, UNITS, REFUSALS, ENDS, st.sampled_from([2, 2, 1]))
def test_no_unit_begins_outside_a_bubble_or_with_too_little_of_it_left_and_everything_ends(
    tmp_path_factory: pytest.TempPathFactory,
    bubbles: list[Bubble],
    again: int,
    units: list[Unit],
    refusal: tuple[str, int] | None,
    end: str,
    depth: int,
) -> None:
    world = World(Page.open(page_path(tmp_path_factory.mktemp("orders") / "pages", 0)))
    with pytest.MonkeyPatch.context() as monkeypatch:
        try:
            orders = played(world, monkeypatch, bubbles * again, units, refusal, end, depth)
        finally:
            monkeypatch.undo()
            world.leave()
    for forecast_ns, at_ns in orders.begun[: -2 if orders.is_hopeless else None]:
        if at_ns >= orders.forced_ns:
            continue
        inside = [each for each in orders.bubbles if each[0] <= at_ns <= each[2]]
        assert inside, "it began outside of every bubble"
        begin_ns, permit_end_ns, _ = inside[-1]
        # at a bubble's begin its permit counts, of which a unit that has missed one needs half; later what is left does
        share = 0.5 if at_ns - begin_ns < LATE_NS else NEARLY_ALL
        assert permit_end_ns - at_ns >= share * forecast_ns - LATE_NS, "it began late in its bubble"
    if orders.is_hopeless or refusal is not None:
        return  # it is let through; or what the device refuses cannot hold what a host launches before it asks again
    for launched_ns, at_ns in orders.computed:
        _, _, end_ns = [each for each in orders.bubbles if each[0] <= at_ns][-1]
        if at_ns < orders.forced_ns:
            assert at_ns <= end_ns or launched_ns <= end_ns + LATE_NS, "a slow host's kernel began between bubbles"
