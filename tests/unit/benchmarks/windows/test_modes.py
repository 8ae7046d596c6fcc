"""Which mode each step has."""

from itertools import pairwise, permutations

import pytest

from benchmarks.windows.modes import Windows, WindowStep

CYCLE = (("preemptive", 3), ("alone", 2), ("placebo", 3), ("naive", 2))
WINDOWS = Windows(observe=2, warm_up=4, cycle=CYCLE)


def test_windows_locate_every_step() -> None:
    found = [WINDOWS.locate(step) for step in range(1, WINDOWS.first_step(2))]
    assert [each.mode for each in found[:6]] == ["alone"] * 2 + ["preemptive"] * 4
    assert all(each.cycle == -1 for each in found[:6])
    expected = [
        WindowStep(cycle, window, mode, at)
        for cycle in range(2)
        for window, (mode, steps) in enumerate(CYCLE)
        for at in range(steps)
    ]
    assert found[6:] == expected


def test_the_warm_up_shows_the_daemon_both_modes() -> None:
    windows = Windows(observe=1, warm_up=6, cycle=(*CYCLE, ("cooperative", 2), ("alone", 2)))
    modes = [windows.locate(step).mode for step in range(1, windows.first_step(0))]
    assert modes == ["alone", *["cooperative"] * 3, "alone", *["preemptive"] * 2]
    assert windows.next_gated(1) == "cooperative" and windows.next_gated(5) == "preemptive"


def test_where_only_the_cooperative_mode_is_measured_the_whole_warm_up_is_cooperative() -> None:
    windows = Windows(observe=1, warm_up=6, cycle=(("cooperative", 2), ("unhooked", 2)))
    assert {windows.locate(step).mode for step in range(2, 8)} == {"cooperative"}


SHUFFLED = Windows(observe=2, warm_up=4, cycle=(("alone", 2), ("awake", 3), ("preemptive", 2)), shuffled=True)


def test_shuffled_windows_come_once_per_cycle_in_an_order_that_all_processes_know() -> None:
    orders = set()
    for cycle in range(60):
        first = SHUFFLED.first_step(cycle)
        found = [SHUFFLED.locate(step) for step in range(first, first + SHUFFLED.length)]
        assert {each.cycle for each in found} == {cycle}
        starts = [each.mode for each in found if each.at == 0]
        assert [each.mode for each in found] == [mode for mode in starts for _ in range(dict(SHUFFLED.cycle)[mode])]
        orders.add(tuple(starts))
        for step in range(first, first + SHUFFLED.length):
            assert SHUFFLED.next_gated(step) == "preemptive"
    assert orders == set(permutations(mode for mode, _ in SHUFFLED.cycle))
    again = Windows(**{field: getattr(SHUFFLED, field) for field in ("observe", "warm_up", "cycle", "shuffled")})
    assert all(again.locate(step) == SHUFFLED.locate(step) for step in range(1, 400))


@pytest.mark.parametrize("windows", [WINDOWS, SHUFFLED])
def test_windows_travel_by_the_environment(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in windows.environment().items():
        monkeypatch.setenv(name, value)
    assert Windows.of_environment() == windows


@pytest.mark.parametrize(
    ("cycle", "message"),
    [
        ((("preemptive", 2), ("cooperative", 2), ("alone", 1)), "cooperative follows preemptive"),
        ((("preemptive", 2), ("alone", 1), ("cooperative", 1)), "preemptive follows cooperative"),
        ((("preemptive", 2), ("greedy", 1)), "greedy"),
        ((("alone", 1), ("placebo", 2), ("cooperative", 2)), "cooperative follows placebo"),
    ],
)
def test_windows_that_cannot_alternate_are_refused(cycle: tuple[tuple[str, int], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Windows(observe=1, warm_up=1, cycle=cycle)


@pytest.mark.parametrize(
    "cycle",
    [
        (("preemptive", 2), ("alone", 1), ("cooperative", 2)),
        (("dedicated", 2), ("preemptive", 2), ("cooperative", 2)),
    ],
)
def test_two_gated_modes_are_shuffled_only_where_another_can_lie_between(cycle: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"cannot be shuffled; allowed: one mode of .* or several after dedicated"):
        Windows(observe=1, warm_up=1, cycle=cycle, shuffled=True)


def test_between_shuffled_windows_of_two_gates_lies_another_one() -> None:
    modes = ("alone", "placebo", "preemptive", "cooperative", "awake")
    cycle = (("dedicated", 2), *((mode, 2) for mode in modes))
    windows = Windows(observe=1, warm_up=4, cycle=cycle, shuffled=True)
    gate = {"placebo": "preemptive", "preemptive": "preemptive", "cooperative": "cooperative"}
    orders = set()
    for cycle_number in range(2000):
        first = windows.first_step(cycle_number)
        found = [windows.locate(step).mode for step in range(first, first + windows.length, 2)]
        assert found[0] == "dedicated"
        gates = [gate.get(mode) for mode in found]
        assert all(None in pair or len({*pair}) == 1 for pair in pairwise(gates)), found
        orders.add(tuple(found[1:]))
        for at, mode in enumerate(gates):
            if mode is not None:
                assert windows.next_gated(first + 2 * at) == mode
    allowed = [
        order
        for order in permutations(modes)
        if all(None in pair or len({*pair}) == 1 for pair in pairwise(map(gate.get, order)))
    ]
    assert orders == set(allowed) and len(allowed) < 120
