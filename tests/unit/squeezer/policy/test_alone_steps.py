"""The draw of alone steps: the same on every rank, of the share that was asked for, and without a rhythm."""

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from squeezer.policy.alone_steps import Draw
from squeezer.policy.events import JobAttached, Side, SideChanged, StepEnded, StepStarted
from squeezer.policy.state import GateMachine
from tests.support.policies import policy

draws = st.builds(
    Draw, observe_steps=st.integers(1, 9), alone_block_steps=st.integers(1, 5), round_blocks=st.integers(2, 30)
)


@given(draws, st.integers(0, 2**16 - 1), st.booleans())
def test_every_round_has_its_share_of_blocks_alone(draw: Draw, seed: int, dense: bool) -> None:
    alone = [draw.is_alone(block, seed, dense=dense) for block in range(20 * draw.round_blocks)]
    rounds = [alone[at : at + draw.round_blocks] for at in range(0, len(alone), draw.round_blocks)]
    if dense:
        assert all(any(each[at : at + 2]) for each in rounds for at in range(0, draw.round_blocks - 1, 2))
        assert {sum(each) for each in rounds} <= {draw.round_blocks // 2, (draw.round_blocks + 1) // 2}
    else:
        assert {sum(each) for each in rounds} == {1}


@given(draws, st.integers(0, 2**16 - 1), st.integers(0, 10_000))
def test_what_all_ranks_leave_alone_a_rank_that_draws_densely_leaves_alone_too(
    draw: Draw, seed: int, block: int
) -> None:
    assert draw.is_alone(block, seed, dense=True) or not draw.is_alone(block, seed, dense=False)


@given(draws, st.integers(0, 2**16 - 1), st.integers(1, 3))
def test_a_halving_spares_half_of_the_blocks_and_leaves_no_long_gap(draw: Draw, seed: int, halvings: int) -> None:
    span = draw.round_blocks << halvings
    fewer = [block for block in range(20 * span) if draw.is_alone(block, seed, halvings=halvings)]
    assert all(draw.is_alone(block, seed, halvings=halvings - 1) for block in fewer)
    assert [block // span for block in fewer] == list(range(20))


@given(draws, st.integers(1, 10_000))
def test_the_first_steps_are_alone_and_blocks_are_as_long_as_asked(draw: Draw, last: int) -> None:
    blocks = [draw.block_of(step) for step in range(1, last + 1)]
    assert blocks[: draw.observe_steps] == [-1] * min(last, draw.observe_steps)
    assert draw.is_alone(-1, 0, dense=False)
    lengths = [len(list(same)) for block, same in groupby(blocks) if block >= 0]
    assert set(lengths[:-1]) <= {draw.alone_block_steps}


def test_another_seed_is_another_draw_and_places_are_spread() -> None:
    draw = Draw(observe_steps=6, alone_block_steps=2, round_blocks=10)
    places = {seed: [block % 10 for block in range(4000) if draw.is_alone(block, seed, dense=False)] for seed in (1, 2)}
    assert places[1] != places[2]
    for found in places.values():
        assert all(20 <= found.count(place) <= 65 for place in range(10)), "of 400, each about 40 times"


def test_the_draw_never_changes() -> None:
    """Ranks may run other releases of Python, and a recorded run must replay."""
    draw = Draw(observe_steps=6, alone_block_steps=2, round_blocks=10)
    alone = [block for block in range(60) if draw.is_alone(block, 29500, dense=False)]
    assert alone == GOLDEN


GOLDEN = [3, 12, 27, 37, 43, 53]


def squeezed_of(machine: GateMachine, steps: range) -> list[bool | None]:
    found = []
    for step in steps:
        machine.handle(StepStarted(step))
        found.append(machine.squeezed)
        machine.handle(StepEnded(step, 200_000_000 + step % 7))
    machine.validate()
    return found


def test_ranks_agree_though_one_joins_late_or_hears_less() -> None:
    """Once each knows the slowdown: until then a rank leaves further blocks alone, and no others."""
    machines = [GateMachine(policy()) for _ in range(3)]
    for machine in machines:
        machine.handle(JobAttached(0, 29500))
        machine.handle(SideChanged(Side.READY))
    all_of_it = squeezed_of(machines[0], range(1, 2000))
    late = squeezed_of(machines[1], range(501, 2000))
    assert late[500:] == all_of_it[1000:]
    assert all(first for first, second in zip(all_of_it[500:], late, strict=True) if second)
    with_gaps = [step for step in range(1, 2000) if step % 10 > 2]
    heard = [squeezed for step in with_gaps for squeezed in squeezed_of(machines[2], range(step, step + 1))]
    assert heard[1100:] == [all_of_it[step - 1] for step in with_gaps][1100:]


def test_a_draw_once_planned_stays() -> None:
    """The main job may already have looked at the plan when the guard becomes suspicious."""
    machine = GateMachine(policy())
    machine.handle(JobAttached(0, 7))
    machine.handle(SideChanged(Side.READY))
    planned: dict[int, bool] = {}
    for step in range(1, 400):
        machine.handle(StepStarted(step))
        assert planned.setdefault(step, machine.is_squeezed(step)) is machine.is_squeezed(step)
        planned |= {ahead: machine.is_squeezed(ahead) for ahead in range(step, step + 4)}
        machine.handle(StepEnded(step, 200_000_000 * (1 + step % 3)))
