"""Ghosts that repeat a recorded job: against steps computed by hand, the textbook's bubbles, and one another."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.ghost.model import PipelineModel, StageTrace, Timing, isolated_bubbles_ns, replay
from benchmarks.ghost.program import GhostShape, Op
from benchmarks.ghost.program import programs_of as programs_of_shape
from benchmarks.ghost.recording import Pace, RecordedStep, Recording, out_of_step, read_recordings
from squeezer.records.facts import Bubble, Instructions, Step
from squeezer.records.layout import RECORD_VERSION, units_path
from squeezer.records.writer import Recorder
from tests.support.ghost_recordings import messages_of, recorded

pytest.importorskip("deepspeed.runtime.pipe.schedule")

MS = 1_000_000
MEETING = Timing(forward_ns=1, backward_ns=2, meets=True)


def programs_of(stages: int, micro_batches: int) -> list[tuple[Op, ...]]:
    return programs_of_shape(GhostShape(stages=stages, stage=0, micro_batches=micro_batches))


def following(recordings: Sequence[Recording]) -> Timing:
    return replace(MEETING, recorded=tuple(recordings))


def uneven(stage: int, step: int, op: Op) -> int:
    """Times that differ from computation to computation."""
    base = {"forward": 100, "backward": 200, "optimizer": 40}[op.what]
    return base + 7 * stage + 11 * (step % 3) + 13 * op.micro_batch


def waits_ns(trace: StageTrace) -> list[int]:
    return [wait.end_ns - wait.start_ns for wait in trace.waits]


def test_a_step_by_hand() -> None:
    # stage 0: 10, send activation, 2, receive gradient, 20, norm, 5, loss; stage 1: 1, 30, 3, 7 between the same
    steps = [RecordedStep([10, 2, 20, 5], [4] * 4), RecordedStep([1, 30, 3, 7], [4] * 4)]
    recordings = [Recording.of([step, step]) for step in steps]
    first, last = replay(programs_of(2, 1), following(recordings), steps=2)
    # they meet at 10, 44, 68 and 79, and go on 4 later; then the same again
    assert waits_ns(first) == [4, 32, 4, 6] * 2
    assert waits_ns(last) == [13, 4, 21, 4] * 2
    assert first.step_ends_ns == last.step_ends_ns == (83, 166)


def test_a_sender_waits_until_its_message_is_taken() -> None:
    slow_first = [RecordedStep([10, 100, 20, 5], [0] * 4), RecordedStep([1, 30, 3, 7], [0] * 4)]
    _, last = replay(programs_of(2, 1), following([Recording.of([step, step]) for step in slow_first]))
    # its gradient is ready at 40, and taken at 110
    assert waits_ns(last)[1] == 70


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_equal_work_and_no_transfers_give_the_textbooks_bubbles(stages: int, micro_batches: int) -> None:
    programs = programs_of(stages, micro_batches)
    lengths_ns = {"forward": 1, "backward": 2, "optimizer": 0}
    recordings = recorded(programs, lambda _stage, _step, op: lengths_ns[op.what], steps=2, transfer_ns=0)
    for timing in (MEETING, following(recordings)):
        for stage in range(stages):
            assert sum(isolated_bubbles_ns(programs, timing, stage)) == (stages - 1) * 3


@pytest.mark.parametrize("stage", range(3))
def test_a_punctual_true_stage_waits_as_its_recording_does(stage: int) -> None:
    programs = programs_of(3, 4)
    recordings = recorded(programs, uneven, steps=4, transfer_ns=9)
    assert drive(programs, recordings, stage, steps=4) == waits_ns(
        replay(programs, following(recordings), steps=4)[stage]
    )


@pytest.mark.parametrize("delay_ns", [1, 60, 5000])
@pytest.mark.parametrize("stage", range(3))
def test_a_true_stage_that_is_late_waits_as_if_that_had_been_recorded(stage: int, delay_ns: int) -> None:
    programs = programs_of(3, 4)
    recordings = recorded(programs, uneven, steps=4, transfer_ns=9)
    for place in range(len(messages_of(programs[stage]))):
        late = list(recordings[stage].steps)
        segments_ns = list(late[1].segments_ns)
        segments_ns[place] += delay_ns
        late[1] = late[1]._replace(segments_ns=segments_ns)
        as_recorded = [Recording.of(late) if at == stage else one for at, one in enumerate(recordings)]
        expected = waits_ns(replay(programs, following(as_recorded), steps=4)[stage])
        assert drive(programs, recordings, stage, steps=4, late=as_recorded[stage]) == expected


def drive(
    programs: Sequence[Sequence[Op]],
    recordings: Sequence[Recording],
    stage: int,
    *,
    steps: int,
    late: Recording | None = None,
    pace: float = 1.0,
) -> list[int]:
    """The waits of a true stage beside ghosts; it works as recorded, or as `late` says."""
    model = PipelineModel(programs, following(recordings), true_stage=stage)
    model.pace = pace
    now_ns, waited_ns = 0, []
    for step in range(steps):
        own = (late or recordings[stage]).of_step(step)
        for op, segment_ns in zip(messages_of(programs[stage]), own.segments_ns, strict=True):
            now_ns += round(pace * segment_ns)
            together_ns, end_ns = model.meets(step, op, now_ns)
            assert now_ns <= together_ns <= end_ns
            waited_ns.append(end_ns - now_ns)
            now_ns = end_ns
    return waited_ns


def test_ghosts_of_a_slower_machine_take_as_many_times_as_long() -> None:
    programs = programs_of(3, 4)
    recordings = recorded(programs, uneven, steps=4, transfer_ns=8)
    once, twice = (drive(programs, recordings, 1, steps=4, pace=pace) for pace in (1.0, 2.0))
    assert twice == [2 * wait_ns for wait_ns in once]


def test_peers_out_of_step_do_what_they_did_at_other_times() -> None:
    programs = programs_of(3, 2)
    recordings = recorded(programs, uneven, steps=4, transfer_ns=8)
    first, own, last = out_of_step(recordings, 1)
    assert own == recordings[1]
    for stage, moved in ((0, first), (2, last)):
        assert [moved.of_step(step) for step in range(4)] == [recordings[stage].of_step(step + 2) for step in range(4)]


def test_the_pace_is_the_median_of_the_last_steps() -> None:
    pace = Pace(Recording.of([RecordedStep([60, 40], [5, 5])] * 2))
    assert [pace.after(ns) for ns in (200, 100, 200)] == [2.0, 1.5, 2.0]
    assert [pace.after(300) for _ in range(Pace.STEPS)][-1] == 3.0, "earlier steps are forgotten"


def test_the_shortest_transfers_are_the_first_decile() -> None:
    steps = [RecordedStep([1], [transfer_ns]) for transfer_ns in range(100, 0, -1)]
    assert Recording.of(steps).shortest_ns == [11]


def test_what_a_run_recorded_is_read_as_it_was(tmp_path: Path) -> None:
    programs = programs_of(2, 3)
    recordings = recorded(programs, lambda *of: uneven(*of) * MS, steps=5, transfer_ns=3 * MS)
    write(tmp_path, programs, recordings, squeezed={step: True for step in range(5)})
    assert read_recordings(tmp_path, programs) == recordings


def test_only_steps_that_all_ranks_squeezed_are_read(tmp_path: Path) -> None:
    programs = programs_of(2, 3)
    recordings = recorded(programs, lambda *of: uneven(*of) * MS, steps=6, transfer_ns=3 * MS)
    write(tmp_path, programs, recordings, squeezed={0: None, 1: True, 2: True, 3: False, 4: True, 5: True})
    found = read_recordings(tmp_path, programs)
    assert [one.steps for one in found] == [[one.steps[step] for step in (1, 2, 4, 5)] for one in recordings]


def test_what_passes_after_a_step_counts_as_usual(tmp_path: Path) -> None:
    programs = programs_of(2, 3)
    recordings = recorded(programs, lambda *of: uneven(*of) * MS, steps=5, transfer_ns=3 * MS)
    write(tmp_path, programs, recordings, squeezed={step: True for step in range(5)}, pauses_ns={2: 777 * MS})
    assert read_recordings(tmp_path, programs) == recordings, "an evaluation is no part of a step"


def test_a_run_that_squeezed_nothing_is_refused(tmp_path: Path) -> None:
    programs = programs_of(2, 3)
    recordings = recorded(programs, uneven, steps=3, transfer_ns=3)
    write(tmp_path, programs, recordings, squeezed=dict.fromkeys(range(3)))
    with pytest.raises(ValueError, match="0 steps that all ranks have squeezed and recorded; allowed: two or more"):
        read_recordings(tmp_path, programs)
    with pytest.raises(ValueError, match="2 ranks for 3 stages; allowed: one rank per stage"):
        read_recordings(tmp_path, programs_of(3, 3))


def write(
    run: Path,
    programs: Sequence[Sequence[Op]],
    recordings: Sequence[Recording],
    *,
    squeezed: Mapping[int, bool | None],
    pauses_ns: Mapping[int, int] | None = None,
) -> None:
    """The records of a job that did as `recordings` say, with pauses after some of its steps."""
    traces = replay(programs, following(recordings), steps=len(squeezed))
    for stage, (program, trace) in enumerate(zip(programs, traces, strict=True)):
        recorder = Recorder(run, stage)
        recorder.add("run", version=RECORD_VERSION, rank=stage, config={}, wall_s=0.0, t_ns=0)
        messages = messages_of(program)
        begin_ns = shift_ns = 0
        for step, is_squeezed in squeezed.items():
            items = []
            for op, wait in zip(messages, trace.waits[step * len(messages) :], strict=False):
                start_ns, end_ns = wait.start_ns + shift_ns, wait.end_ns + shift_ns
                if op.what == "norm":  # lies within its instruction
                    recorder.add_fact(norm(step, start_ns, end_ns, is_squeezed))
                    start_ns, end_ns = start_ns - 1, end_ns + 1
                items.append(("OTHER", op.slot, start_ns, end_ns))
            recorder.add_fact(Instructions(step=step, items=tuple(items)))
            end_ns = trace.step_ends_ns[step] + shift_ns
            recorder.add_fact(Step(job=0, step=step, start_ns=begin_ns, end_ns=end_ns, squeezed=is_squeezed, work=0))
            shift_ns += (pauses_ns or {}).get(step, 0)
            begin_ns = trace.step_ends_ns[step] + shift_ns
        recorder.close()
        units_path(run, stage).touch()


def norm(step: int, start_ns: int, end_ns: int, squeezed: bool | None) -> Bubble:
    """The bubble of an all-reduce in the optimizer, shut."""
    return Bubble(
        step=step,
        epoch=step,
        slot=99,
        wait="OPTIMIZER_STEP",
        start_ns=start_ns,
        forecast_ns=None,
        permit_until_ns=None,
        end_ns=end_ns,
        squeezed=squeezed,
        side_ns=0,
        main_ns=0,
        stopped=False,
        overrun_ns=0,
    )
