"""The daemon that squeezes in windows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.windows.daemon import FORECASTS, WindowedMachine
from benchmarks.windows.modes import GATED, Windows
from benchmarks.windows.modes import PLACEBOS as PLACEBO_MODES
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.page.plan import plan_slot, plan_steps, planned_permit
from squeezer.config import GuardTable, SqueezeTable
from squeezer.policy.actions import PlanSlot, PlanSteps
from squeezer.policy.events import BubbleEnded, Event, JobAttached, Side, SideChanged, StepStarted

WINDOWS = Windows(observe=2, warm_up=4, cycle=(("preemptive", 3), ("alone", 2), ("cooperative", 3), ("naive", 2)))
PLACEBOS = Windows(observe=2, warm_up=0, cycle=(("preemptive", 2), ("alone", 1), ("placebo", 1), ("cache_placebo", 1)))


SHUFFLED = Windows(
    observe=2,
    warm_up=8,
    cycle=(("dedicated", 2), *((mode, 3) for mode in ("preemptive", "placebo", "cooperative", "alone", "awake"))),
    shuffled=True,
)


@pytest.fixture(params=[WINDOWS, SHUFFLED], ids=["in order", "shuffled"])
def windows(request: pytest.FixtureRequest) -> Windows:
    chosen: Windows = request.param
    return chosen


@pytest.fixture
def machine(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> Iterator[WindowedMachine]:
    for name, value in windows.environment().items():
        monkeypatch.setenv(name, value)
    made = WindowedMachine(SqueezeTable().policy(GuardTable()))
    yield made
    made.validate()


def test_the_windowed_daemon_squeezes_in_gated_windows_as_each_says(
    machine: WindowedMachine, windows: Windows, tmp_path: Path
) -> None:
    page = Page.open(page_path(tmp_path / "pages", 0))

    def feed(event: Event) -> None:
        for action in machine.handle(event):
            if isinstance(action, PlanSlot):
                plan_slot(page.words, action.slot, action.permit_ns)
            elif isinstance(action, PlanSteps):
                plan_steps(page.words, action.from_step, action.until_step)

    feed(SideChanged(Side.READY))
    feed(JobAttached())
    for step in range(1, windows.first_step(20)):
        mode = windows.locate(step).mode
        permit_ns, _ = planned_permit(page.words, step, 3)
        if step > 2:  # the first two are not forecast
            assert bool(permit_ns) == (mode in (*GATED, *PLACEBO_MODES)), (step, mode)
            assert not planned_permit(page.words, step, 7)[0], "too short"
        if permit_ns:
            assert (permit_ns > 50_000_000) == (mode in ("preemptive", "placebo")), (step, mode)
        feed(StepStarted(step))
        feed(BubbleEnded(3, "RECV_GRAD", 50_000_000))
        feed(BubbleEnded(7, "RECV_GRAD", 1_500_000))
        assert step < 2 or page.words[Field.PERMITS + FORECASTS + 7] == 1_500
    page.close()


def test_placebos_are_squeezed_as_ours_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLACEBOS.environment().items():
        monkeypatch.setenv(name, value)
    machine = WindowedMachine(SqueezeTable().policy(GuardTable()))
    assert [machine.is_squeezed(step) for step in range(3, 8)] == [True, True, False, True, True]
    assert {PLACEBOS.next_gated(step) for step in range(1, 10)} == {"preemptive"}
