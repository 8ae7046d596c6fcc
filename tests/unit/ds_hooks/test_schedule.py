"""Bubbles are read off DeepSpeed's schedules: adjacent waits are one, compute parts them."""

import pytest
from deepspeed.runtime.pipe.schedule import TrainSchedule

from ds_hooks.schedule import Slot, Waits, find_slots
from ds_hooks.shared.wire import WaitKind

PIPELINE = Waits(queued_p2p=False, tied=False, data_parallel=False)


def bubbles(slots: list[Slot]) -> list[tuple[int, int, WaitKind]]:
    """(first instruction, last instruction, kind) of each bubble."""
    found = []
    for index, slot in enumerate(slots):
        if slot.opens is not None:
            first, kind = index, slot.opens
        if slot.closes:
            found.append((first, index, kind))
    return found


def names(schedule: object) -> list[str]:
    return [type(command).__name__ for commands in schedule.steps() for command in commands]  # type: ignore[attr-defined]


def test_adjacent_waits_are_one_bubble_named_after_its_receive() -> None:
    slots = find_slots(["SendGrad", "RecvActivation", "LoadMicroBatch", "ForwardPass", "SendActivation"], PIPELINE)
    assert bubbles(list(slots)) == [(0, 1, WaitKind.RECV_ACTIVATION), (4, 4, WaitKind.SEND_ACTIVATION)]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("micro_batches", [1, 4, 7])
def test_in_every_stage_each_wait_lies_in_one_bubble_and_no_compute_does(stage: int, micro_batches: int) -> None:
    order = names(TrainSchedule(micro_batches=micro_batches, stages=4, stage_id=stage))
    slots = list(find_slots(order, PIPELINE))
    inside = {index for first, last, _ in bubbles(slots) for index in range(first, last + 1)}
    assert inside == {index for index, name in enumerate(order) if name.startswith(("Send", "Recv"))}
    edges = {edge for first, last, _ in bubbles(slots) for edge in (first - 1, last + 1)}
    assert not edges & inside, "two bubbles touch"


def test_reductions_wait_only_where_there_is_somebody_to_wait_for() -> None:
    tail = ["BackwardPass", "ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
    assert bubbles(list(find_slots(tail, PIPELINE))) == []
    both = Waits(queued_p2p=False, tied=True, data_parallel=True)
    assert bubbles(list(find_slots(tail, both))) == [(1, 1, WaitKind.REDUCE_TIED_GRADS), (2, 2, WaitKind.REDUCE_GRADS)]
    data_parallel = Waits(queued_p2p=False, tied=False, data_parallel=True)
    assert bubbles(list(find_slots(tail, data_parallel))) == [(2, 2, WaitKind.REDUCE_GRADS)]


def test_the_reduction_of_gradients_is_in_no_other_bubble_since_it_computes() -> None:
    order = ["BackwardPass", "SendGrad", "ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
    alone = Waits(queued_p2p=False, tied=False, data_parallel=False)
    assert bubbles(list(find_slots(order, alone))) == [(1, 1, WaitKind.SEND_GRAD)]
    peers = Waits(queued_p2p=False, tied=False, data_parallel=True)
    assert bubbles(list(find_slots(order, peers))) == [(1, 1, WaitKind.SEND_GRAD), (3, 3, WaitKind.REDUCE_GRADS)]
    between = ["SendGrad", "ReduceGrads", "RecvGrad"]
    around = [(0, 0, WaitKind.SEND_GRAD), (2, 2, WaitKind.RECV_GRAD)]
    assert bubbles(list(find_slots(between, alone))) == around
    assert bubbles(list(find_slots(between, peers))) == [around[0], (1, 1, WaitKind.REDUCE_GRADS), around[1]]


def test_where_sends_and_receives_only_queue_the_commit_waits() -> None:
    dual = Waits(queued_p2p=True, tied=False, data_parallel=False)
    order = ["RecvActivation", "CommitP2P", "ForwardPass", "SendActivation", "CommitP2P", "RecvGrad", "CommitP2P"]
    assert bubbles(list(find_slots(order, dual))) == [(1, 1, WaitKind.COMMIT_P2P), (4, 6, WaitKind.COMMIT_P2P)]


def test_dualpipev_schedules_wait_in_commits_alone() -> None:
    schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    if not hasattr(schedule, "DualPipeVSchedule"):
        pytest.skip("this release of DeepSpeed has no DualPipeV")
    order = names(schedule.DualPipeVSchedule(micro_batches=8, stages=4, stage_id=1))
    slots = list(find_slots(order, Waits(queued_p2p=True, tied=False, data_parallel=False)))
    assert {order[first] for first, _, _ in bubbles(slots)} == {"CommitP2P"}
    inside = {index for first, last, _ in bubbles(slots) for index in range(first, last + 1)}
    assert not any(order[index] in ("ForwardPass", "BackwardPass", "OptimizerStep") for index in inside)


def test_an_instruction_of_a_later_release_counts_as_compute() -> None:
    slots = find_slots(["RecvGrad", "WeightPass", "SendGrad"], PIPELINE)
    assert [slot.closes for slot in slots] == [True, False, True]
