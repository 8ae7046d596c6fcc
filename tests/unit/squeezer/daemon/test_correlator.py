"""The main job's messages become steps, bubbles and overruns. No recorder is near."""

import json
from pathlib import Path

import pytest

from ds_hooks.shared import wire
from squeezer.daemon.correlator import Correlator, Found
from squeezer.policy.events import BubbleEnded, Overran, StepEnded
from squeezer.policy.forecast import Forecast
from squeezer.records.facts import Bubble, Instructions, Job, Step
from squeezer.records.layout import details_path, events_path
from squeezer.records.writer import Recorder

HELLO = wire.Hello(pid=7, rank=1, world_size=2, stage=1, stages=2, micro_batches=4, master_port=29500)
GRAD = wire.WaitKind.RECV_GRAD


class Device:
    """A correlator, and what it asked of the forecasts."""

    def __init__(self, *, host_measures: bool = True) -> None:
        self.asked: list[tuple[int, int | None]] = []
        self.correlator = Correlator(self._forecast_of, host_measures=host_measures)
        self.correlator.job_attached(0, HELLO)
        self.correlator.step_started(5, wire.StepStart(1), squeezed=True, shut=None)

    def _forecast_of(self, slot: int, gap_ns: int | None) -> Forecast:
        self.asked.append((slot, gap_ns))
        return Forecast(50, 40, 60, 51)

    def start(self, t_ns: int, epoch: int, slot: int = 3, cpu_ns: int = -1, permit_ns: int = 30) -> list[Found]:
        return self.correlator.bubble_started(t_ns, wire.BubbleStart(1, epoch, slot, GRAD, cpu_ns, permit_ns))

    def end(self, t_ns: int, epoch: int, slot: int = 3, cpu_ns: int = -1, stopped: int = 0) -> list[Found]:
        return self.correlator.bubble_ended(t_ns, wire.BubbleEnd(1, epoch, slot, GRAD, cpu_ns, min(cpu_ns, 4), stopped))


def test_jobs_are_counted() -> None:
    correlator = Correlator(lambda slot, gap_ns: None, host_measures=True)
    assert correlator.job == -1
    for index in range(2):
        (job,) = correlator.job_attached(index, HELLO)
        assert isinstance(job, Job) and (job.job, job.t_ns, job.pid, job.micro_batches) == (index, index, 7, 4)


def test_a_step_is_a_fact_and_an_event_once_both_its_ends_are_known() -> None:
    device = Device()
    found = device.correlator.step_ended(105, wire.StepEnd(1, dropped=2, work=64))
    assert found == [Step(job=0, step=1, start_ns=5, end_ns=105, squeezed=True, work=64), StepEnded(1, 100)]
    assert device.correlator.dropped == 2
    assert device.correlator.step_ended(205, wire.StepEnd(2, dropped=3, work=64)) == []
    assert device.correlator.dropped == 3


def test_a_bubble_is_an_event_at_its_end_and_a_fact_once_its_overrun_is_known() -> None:
    device = Device()
    assert device.start(100, epoch=1, cpu_ns=10) == []
    assert device.end(160, epoch=1, cpu_ns=35, stopped=1) == [BubbleEnded(3, "RECV_GRAD", 60, None)]
    bubble, overrun = device.start(200, epoch=2, cpu_ns=42)
    assert overrun == Overran(3, 7)
    assert bubble == Bubble(
        step=1,
        epoch=1,
        slot=3,
        wait="RECV_GRAD",
        start_ns=100,
        forecast_ns=(50, 40, 60),
        permit_until_ns=130,
        end_ns=160,
        squeezed=True,
        side_ns=25,
        main_ns=4,
        stopped=True,
        overrun_ns=7,
    )
    assert device.end(250, epoch=2, cpu_ns=42) == [BubbleEnded(3, "RECV_GRAD", 50, 40)]
    assert device.asked == [(3, None), (3, 40)]
    assert device.correlator.bubble_ns == 110


def test_a_bubble_that_stayed_shut_is_no_overrun() -> None:
    device = Device()
    device.start(100, epoch=1, cpu_ns=10, permit_ns=0)
    device.end(160, epoch=1, cpu_ns=10)
    (bubble,) = device.start(200, epoch=2, cpu_ns=12)
    assert isinstance(bubble, Bubble) and (bubble.permit_until_ns, bubble.overrun_ns) == (None, 2)


def test_a_lost_message_costs_its_bubble_and_the_gap_after_it() -> None:
    device = Device()
    assert device.end(160, epoch=1) == []
    device.start(200, epoch=2)
    assert device.end(260, epoch=3) == [], "of another bubble"
    device.start(300, epoch=4)
    device.end(350, epoch=4)
    device.start(400, epoch=6)
    assert device.asked == [(3, None)] * 3


def test_the_last_bubble_of_a_job_has_no_overrun() -> None:
    device = Device()
    device.start(100, epoch=1, cpu_ns=10)
    device.end(160, epoch=1, cpu_ns=20)
    (bubble,) = device.correlator.job_lost()
    assert isinstance(bubble, Bubble) and bubble.overrun_ns is None
    assert device.correlator.job_lost() == []


def test_where_only_the_side_task_measures_its_overruns_count_for_the_last_opened_bubble() -> None:
    device = Device(host_measures=False)
    assert device.start(100, epoch=1, slot=3) == []
    device.end(160, epoch=1, slot=3)
    device.correlator.side_task_overran(3, 20)
    device.correlator.side_task_overran(3, 22)
    device.correlator.side_task_overran(8, 5)
    bubble, overrun = device.start(200, epoch=2, slot=5, permit_ns=0)
    assert isinstance(bubble, Bubble) and (bubble.side_ns, bubble.overrun_ns) == (None, None)
    assert overrun == Overran(3, 42)
    device.end(250, epoch=2, slot=5)
    assert [type(each) for each in device.start(300, epoch=3, slot=8)] == [Bubble], "slot 5 stayed shut"
    device.end(350, epoch=3, slot=8)
    assert device.start(400, epoch=4)[-1] == Overran(8, 5)
    assert device.asked == [(3, None), (5, None), (8, None), (3, None)]


@pytest.mark.parametrize("host_measures", [True, False])
@pytest.mark.parametrize("permit_ns", [0, 30])
def test_an_opened_bubble_may_end_late_where_the_host_runs_ahead(host_measures: bool, permit_ns: int) -> None:
    device = Device(host_measures=host_measures)
    device.start(100, epoch=1, permit_ns=permit_ns)
    may_be_late = not host_measures and permit_ns > 0
    assert device.end(160, epoch=1) == [BubbleEnded(3, "RECV_GRAD", 60, None, may_be_late)]


def test_instructions_have_names_and_absolute_times() -> None:
    message = wire.Instructions(4, 1000, ((wire.InstructionKind.FORWARD_PASS, 2, 5, 9),))
    assert Device().correlator.instructions(message) == [Instructions(step=4, items=(("FORWARD_PASS", 2, 1005, 1009),))]


@pytest.mark.parametrize("at_once", [1, 100])
def test_facts_stand_in_the_records_in_the_order_of_their_fields(tmp_path: Path, at_once: int) -> None:
    recorder = Recorder(tmp_path, 0)
    recorder.add_fact(Step(job=0, step=1, start_ns=5, end_ns=105, squeezed=None, work=64))
    recorder.write(at_least=at_once)
    recorder.add("fault", t_ns=3, what="lost")
    recorder.add_fact(Instructions(step=4, items=(("FORWARD_PASS", 2, 1005, 1009),)))
    recorder.close()
    events = [json.loads(line) for line in events_path(tmp_path, 0).read_text().splitlines() if line]
    assert [list(event.items()) for event in events] == [
        [("r", "step"), ("job", 0), ("step", 1), ("start_ns", 5), ("end_ns", 105), ("squeezed", None), ("work", 64)],
        [("r", "fault"), ("t_ns", 3), ("what", "lost")],
    ]
    (details,) = details_path(tmp_path, 0).read_text().split()
    assert json.loads(details) == {"r": "instructions", "step": 4, "items": [["FORWARD_PASS", 2, 1005, 1009]]}


def test_all_that_the_side_task_uses_is_counted_but_not_between_processes_or_jobs() -> None:
    device = Device()
    device.start(100, epoch=1, cpu_ns=10)
    device.end(160, epoch=1, cpu_ns=35)
    device.start(200, epoch=2, cpu_ns=40)
    assert device.correlator.counted_ns == 30
    device.end(260, epoch=2, cpu_ns=5)  # another process
    device.start(300, epoch=3, cpu_ns=15)
    assert device.correlator.counted_ns == 40
    device.correlator.job_attached(400, HELLO)
    device.start(500, epoch=1, cpu_ns=99)
    device.end(560, epoch=1)  # not measured
    device.start(600, epoch=2, cpu_ns=100)
    assert device.correlator.counted_ns == 41
