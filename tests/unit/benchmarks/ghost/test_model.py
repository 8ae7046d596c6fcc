"""The ghosts' model against hand-derived schedules, a formula, and an independent longest-path computation."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from benchmarks.ghost.model import (
    PipelineModel,
    Timing,
    isolated_bubbles_ns,
    replay,
    steady_bubble_ratio,
)
from benchmarks.ghost.program import GhostModelError, GhostShape, Op, StageCursor, stage_program

schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")

UNIT = Timing(forward_ns=1, backward_ns=2)
PLAIN = Timing(forward_ns=100, backward_ns=200, optimizer_ns=30, latency_ns=7)
SLOW_LAST = Timing(forward_ns=100, backward_ns=200, optimizer_ns=30, latency_ns=7, stage_ratios=(1.0, 1.0, 1.0, 1.3))

Programs = list[tuple[Op, ...]]
Delays = dict[tuple[int, str, int], int]  # (step, what, micro-batch) of a send -> how much later it is sent


def programs_of(stages: int, micro_batches: int, *, clipping: bool = True) -> Programs:
    schedules = [schedule.TrainSchedule(micro_batches, stages, stage) for stage in range(stages)]
    return [stage_program(one, clipping=clipping) for one in schedules]


def drive(programs: Programs, timing: Timing, stage: int, steps: int, delays: Delays) -> dict[tuple[int, int], int]:
    """Walk the true stage by hand beside the model; returns the arrival of each receive by (step, slot)."""
    model = PipelineModel(programs, timing, true_stage=stage)
    now_ns, arrivals_ns = 0, {}
    for step in range(steps):
        for op in programs[stage]:
            if op.verb == "compute":
                now_ns += round(timing.compute_ns(stage, op.what))
            elif op.verb == "send":
                now_ns += delays.get((step, op.what, op.micro_batch), 0)
                model.sent(step, op, now_ns)
            else:
                if op.verb == "sync":
                    model.sent(step, op, now_ns)
                arrivals_ns[step, op.slot] = model.arrival_ns(step, op)
                now_ns = max(now_ns, arrivals_ns[step, op.slot])
    return arrivals_ns


def longest_paths(programs: Programs, timing: Timing, stage: int, steps: int, delays: Delays) -> dict[Any, int]:
    """The same arrivals from the dependency graph: each op ends after its predecessor and after its message."""

    def op_of(ops: tuple[Op, ...], what: str) -> Op:
        return next(op for op in ops if op.what == what)

    @cache
    def end_ns(at: int, step: int, index: int) -> int:
        if index < 0:
            return end_ns(at, step - 1, len(programs[at]) - 1) if step else 0
        op, before_ns = programs[at][index], end_ns(at, step, index - 1)
        if op.verb == "compute":
            return before_ns + round(timing.compute_ns(at, op.what))
        if op.verb == "send":
            return before_ns + (delays.get((step, op.what, op.micro_batch), 0) if at == stage else 0)
        return max(before_ns, arrival_ns(at, step, op))

    def arrival_ns(at: int, step: int, op: Op) -> int:
        if op.verb == "sync":
            others = [(other, ops.index(op_of(ops, "norm"))) for other, ops in enumerate(programs) if other != at]
            return max(end_ns(other, step, index - 1) for other, index in others) + timing.latency_ns
        source = {"activation": at - 1, "gradient": at + 1, "loss": len(programs) - 1}[op.what]
        wanted: tuple[str, str, int] = ("send", op.what, op.micro_batch)
        keys: list[tuple[str, str, int]] = [(sent.verb, sent.what, sent.micro_batch) for sent in programs[source]]
        return end_ns(source, step, keys.index(wanted)) + timing.latency_ns

    receives = [(step, op) for step in range(steps) for op in programs[stage] if op.verb in ("recv", "sync")]
    return {(step, op.slot): arrival_ns(stage, step, op) for step, op in receives}


@pytest.mark.parametrize("clipping", [True, False])
@pytest.mark.parametrize(
    ("stage", "bubbles_ns"), [(0, (6, 1, 1, 1)), (1, (1, 4, 1, 1, 2)), (2, (2, 2, 1, 4)), (3, (3, 6))]
)
def test_bubbles_of_four_stages_and_four_micro_batches(stage: int, bubbles_ns: tuple[int, ...], clipping: bool) -> None:
    programs = programs_of(4, 4, clipping=clipping)
    assert isolated_bubbles_ns(programs, UNIT, stage) == bubbles_ns
    assert steady_bubble_ratio(programs, UNIT, stage) == pytest.approx(9 / 21)


@pytest.mark.parametrize("durations_ns", [(1, 2), (2, 1), (3, 3)])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 9, 16])
@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8])
def test_balanced_stages_idle_as_the_formula_says(
    stages: int, micro_batches: int, durations_ns: tuple[int, int]
) -> None:
    timing = Timing(forward_ns=durations_ns[0], backward_ns=durations_ns[1])
    programs = programs_of(stages, micro_batches)
    for stage in range(stages):
        assert sum(isolated_bubbles_ns(programs, timing, stage)) == (stages - 1) * sum(durations_ns)
        ratio = steady_bubble_ratio(programs, timing, stage)
        assert ratio == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_program_numbers_instructions_and_micro_batches() -> None:
    first, last = programs_of(2, 2)
    assert [(op.slot, op.verb, op.what, op.micro_batch) for op in last] == [
        (0, "recv", "activation", 0),
        (2, "compute", "forward", 0),  # slot 1 loads the labels
        (3, "compute", "backward", 0),
        (4, "send", "gradient", 0),
        (5, "recv", "activation", 1),
        (7, "compute", "forward", 1),
        (8, "compute", "backward", 1),
        (9, "send", "gradient", 1),
        (12, "sync", "norm", 0),
        (12, "compute", "optimizer", 0),  # slots 10 and 11 reduce gradients
        (13, "send", "loss", 0),
    ]
    assert (first[-1].verb, first[-1].what) == ("recv", "loss")


@pytest.mark.parametrize("clipping", [True, False])
@pytest.mark.parametrize("timing", [PLAIN, SLOW_LAST])
@pytest.mark.parametrize("stage", range(4))
def test_punctual_true_stage_sees_what_a_ghost_in_its_place_sees(stage: int, timing: Timing, clipping: bool) -> None:
    programs = programs_of(4, 5, clipping=clipping)
    waits = replay(programs, timing, steps=4)[stage].waits
    assert drive(programs, timing, stage, 4, {}) == {(wait.step, wait.slot): wait.arrival_ns for wait in waits}


@pytest.mark.parametrize("clipping", [True, False])
@pytest.mark.parametrize("delay_ns", [1, 50, 333, 10_000])
@pytest.mark.parametrize("stage", range(4))
def test_delayed_send_comes_back_along_the_dependency_graph(stage: int, delay_ns: int, clipping: bool) -> None:
    programs = programs_of(4, 5, clipping=clipping)
    sends = [op for op in programs[stage] if op.verb == "send"]
    for op in sends:
        delays = {(1, op.what, op.micro_batch): delay_ns}
        expected = longest_paths(programs, SLOW_LAST, stage, 3, delays)
        assert drive(programs, SLOW_LAST, stage, 3, delays) == expected


@pytest.mark.parametrize(("delay_ns", "shift_ns"), [(0, 0), (1, 0), (2, 0), (3, 1), (10, 8)])
def test_delay_within_the_slack_costs_nothing(delay_ns: int, shift_ns: int) -> None:
    # Stage 1 of 3 has done its forward 1 by 3, and then waits for gradient 0 until 5: two units of slack.
    arrivals_ns = drive(programs_of(3, 3), UNIT, 0, 1, {(0, "activation", 1): delay_ns})
    assert next(iter(arrivals_ns.values())) == 7 + shift_ns


def test_steps_repeat_once_the_pipeline_has_settled() -> None:
    for trace in replay(programs_of(4, 6), SLOW_LAST, steps=6):
        lengths_ns = {end - start for start, end in zip(trace.step_ends_ns[1:], trace.step_ends_ns[2:], strict=False)}
        assert len(lengths_ns) == 1
        by_step = [[w.idle_ns for w in trace.waits if w.step == step] for step in range(2, 6)]
        assert all(waits == by_step[0] for waits in by_step)


def test_norm_holds_the_last_stage_until_the_first_one_is_done() -> None:
    waits = {wait.what: wait.idle_ns for wait in replay(programs_of(4, 4), UNIT, steps=3)[3].waits if wait.step == 2}
    assert waits == {"activation": 0, "norm": 6}  # of the activations, the last; the first one takes 3
    idle_ns = [wait.idle_ns for wait in replay(programs_of(4, 4, clipping=False), UNIT, steps=3)[3].waits]
    assert idle_ns[-4:] == [9, 0, 0, 0]


def test_no_stage_ends_a_step_before_the_loss_is_known() -> None:
    timing = Timing(forward_ns=1, backward_ns=1, optimizer_ns=5, latency_ns=2, stage_ratios=(1.0, 10.0))
    first, last = replay(programs_of(2, 1), timing, steps=3)
    assert all(own == loss + 2 for own, loss in zip(first.step_ends_ns, last.step_ends_ns, strict=True))


def test_jitter_is_bounded_and_repeats_with_its_seed() -> None:
    def step_ends(seed: int, jitter: float = 0.2) -> tuple[int, ...]:
        timing = Timing(forward_ns=1000, backward_ns=2000, jitter=jitter, seed=seed)
        return replay(programs_of(3, 4), timing, steps=3)[0].step_ends_ns

    assert step_ends(1) == step_ends(1) != step_ends(2)
    still = step_ends(1, jitter=0.0)
    assert all(0.8 * calm <= end <= 1.2 * calm for end, calm in zip(step_ends(1), still, strict=True))


def test_receive_that_depends_on_an_unsent_message_is_an_error() -> None:
    programs = programs_of(2, 1)
    model = PipelineModel(programs, UNIT, true_stage=0)
    gradient = next(op for op in programs[0] if op.what == "gradient")
    with pytest.raises(GhostModelError, match=r"stage 0 at step 0 .*gradient.* wait for each other: stage 1 "):
        model.arrival_ns(0, gradient)


def test_model_forgets_old_messages() -> None:
    programs = programs_of(4, 4)
    model = PipelineModel(programs, UNIT, true_stage=1)
    sizes = []
    for step in range(20):
        for op in programs[1]:
            if op.verb in ("send", "sync"):
                model.sent(step, op, step)
            if op.verb in ("recv", "sync"):
                model.arrival_ns(step, op)
        sizes.append(sum(len(messages) for messages in model._sent_ns.values()))
    assert sizes[2] == sizes[-1]


def test_replay_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="number of steps"):
        PipelineModel(programs_of(2, 1), UNIT)


def test_cursor_goes_round_and_refuses_what_the_schedule_does_not_say() -> None:
    cursor = StageCursor(programs_of(2, 1)[0])
    for step in range(2):
        with pytest.raises(GhostModelError, match=f"step {step}: the engine wants to recv gradient"):
            cursor.take("recv", "gradient")
        assert cursor.peek("send", "activation") == cursor.take("send", "activation")
        assert cursor.take("recv", "gradient")[0] == step
        assert cursor.take("sync", "norm")[0] == step
        assert cursor.take("recv", "loss")[0] == step


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stages", 1),
        ("stage", 4),
        ("micro_batches", 0),
        ("slow_last", 0.0),
        ("jitter", 1.0),
        ("latency_us", -1.0),
    ],
)
def test_shape_names_the_field_that_is_wrong(field: str, value: float) -> None:
    fields: dict[str, Any] = {"stages": 4, "stage": 1, "micro_batches": 4, field: value}
    with pytest.raises(ValueError, match=rf"GhostShape\.{field} = "):
        GhostShape(**fields)


def dualpipev_programs(stages: int, micro_batches: int) -> Programs:
    if not hasattr(schedule, "DualPipeVSchedule"):
        pytest.skip("this release of DeepSpeed has no DualPipeV")
    schedules = [schedule.DualPipeVSchedule(micro_batches, stages, stage) for stage in range(stages)]
    return [stage_program(one) for one in schedules]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 11), (8, 16)])
def test_dualpipev_messages_have_two_ends_and_nothing_is_sent_before_its_commit(
    stages: int, micro_batches: int
) -> None:
    programs = dualpipev_programs(stages, micro_batches)
    ends: dict[str, list[tuple[str, int, int, int]]] = {"send": [], "recv": []}
    for stage, (program, made) in enumerate(
        zip(programs, (schedule.DualPipeVSchedule(micro_batches, stages, s) for s in range(stages)), strict=True)
    ):
        names = [type(instruction).__name__ for commands in made.steps() for instruction in commands]
        for op in program:
            if op.verb in ends and op.what != "loss":
                assert names[op.slot] == "CommitP2P"
                pair = (stage, op.peer) if op.verb == "send" else (op.peer, stage)
                ends[op.verb].append((op.what, op.micro_batch, *pair))
    assert sorted(ends["send"]) == sorted(ends["recv"]) and len(set(ends["send"])) == len(ends["send"])
    # each of the 2P stages but the last hands each micro-batch on; the turn-around on the last rank is no message
    assert len(ends["send"]) == 2 * micro_batches * (2 * stages - 2)


@pytest.mark.parametrize(("stages", "micro_batches", "stage"), [(2, 4, 0), (4, 8, 1), (4, 8, 3), (4, 12, 2)])
def test_dualpipev_waits_are_those_of_the_dependencies(stages: int, micro_batches: int, stage: int) -> None:
    """Against end times that are raised until every op of every stage stands after all that it depends on."""
    programs = dualpipev_programs(stages, micro_batches)
    timing = Timing(forward_ns=100, backward_ns=200, optimizer_ns=30, latency_ns=7, stage_ratios=(1.0,) * stages)
    ends = [[0] * len(program) for program in programs]
    sends = {
        (at, op.what, op.micro_batch): (at, index)
        for at, program in enumerate(programs)
        for index, op in enumerate(program)
        if op.verb in ("send", "sync")
    }
    changed = True
    while changed:
        changed = False
        for at, program in enumerate(programs):
            for index, op in enumerate(program):
                before = ends[at][index - 1] if index else 0
                if op.verb == "compute":
                    before += round(timing.compute_ns(at, op.what))
                elif op.verb == "recv":
                    source, place = sends[op.peer, op.what, op.micro_batch]
                    before = max(before, ends[source][place] + timing.latency_ns)
                elif op.verb == "sync":
                    others = [sends[other, "norm", 0] for other in range(stages) if other != at]
                    before = max(before, *((ends[o][i - 1] if i else 0) + timing.latency_ns for o, i in others))
                changed |= before != ends[at][index]
                ends[at][index] = before
    trace = replay(programs, timing)[stage]
    expected = [ends[stage][index] for index, op in enumerate(programs[stage]) if op.verb in ("recv", "sync")]
    assert [wait.end_ns for wait in trace.waits] == expected
    assert trace.step_ends_ns == (ends[stage][-1],)


def test_jitter_spares_the_true_stage() -> None:
    steady = Timing(forward_ns=1000, backward_ns=2000, jitter=0.3, steady_stage=0)
    alone = [programs_of(2, 1)[0][:1]]  # a stage that only computes
    assert alone[0][0].verb == "compute"
    assert replay(alone, steady, steps=3)[0].step_ends_ns == (1000, 2000, 3000)
