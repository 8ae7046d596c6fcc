"""The soak's own parts: what it draws, whom it finds, what it takes for a failure, and how it goes on after a cut."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.soak import leftovers, results
from benchmarks.soak.faults import OURS, STEPS, Fault, Plan, draw
from benchmarks.soak.job import read_losses
from benchmarks.soak.processes import Process, by_role


def test_a_run_can_be_repeated_and_all_kinds_of_faults_are_drawn() -> None:
    assert draw(1, 5) == draw(1, 5) and draw(1, 5) != draw(2, 5)
    plans = [draw(1, number) for number in range(600)]
    drawn = Counter((fault.victim, fault.what) for plan in plans for fault in plan.faults)
    signals = {"SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGSTOP"}
    for victim in (*OURS, "launcher", "deepspeed", "rank"):
        assert {what for each, what in drawn if each == victim} >= signals
    assert {plan.form for plan in plans} == {"detached", "foreground", "background"}
    assert {what for _, what in drawn} == signals | {"full disk", "file limit", "hang-up", "Ctrl-C"}


def test_no_main_job_stays_stopped_and_no_fault_of_ours_may_end_it() -> None:
    for number in range(600):
        for fault in draw(3, number).faults:
            assert fault.victim in OURS or fault.what != "SIGSTOP" or fault.lasts_s is not None
            assert not (fault.victim in OURS and fault.ends_job)
            assert 0 <= fault.after_step <= STEPS


@pytest.mark.parametrize(
    ("fault", "may_end"),
    [
        (Fault(what="SIGKILL", victim="daemon"), False),
        (Fault(what="SIGSTOP", victim="rank", lasts_s=1.0), False),
        (Fault(what="SIGKILL", victim="launcher", after_step=1), False),
        (Fault(what="SIGKILL", victim="deepspeed", after_step=0), True),
        (Fault(what="full disk"), False),
        (Fault(what="hang-up", victim="background"), False),
        (Fault(what="SIGTERM", victim="launcher"), True),
        (Fault(what="SIGKILL", victim="rank"), True),
        (Fault(what="Ctrl-C", victim="foreground"), True),
    ],
)
def test_what_may_end_the_main_job(fault: Fault, may_end: bool) -> None:
    assert Plan(form="detached", faults=(fault,)).may_end_early is may_end


def process(pid: int, parent: int, line: str, group: int = 0, rank: int = 0) -> Process:
    words = tuple(line.split())
    return Process(pid=pid, parent=parent, group=group or pid, session=1, start=pid, state="S", words=words, rank=rank)


def test_each_process_of_a_run_has_its_role() -> None:
    side = "python -m trials.side_task.main --study s.py --rank 1"
    daemon = "python -m squeezer daemon --local-rank 1"
    found = [
        process(1, 0, "bash"),
        process(2, 1, "python -m launch.ds_squeeze --squeezer s.toml train.py"),
        process(3, 2, "python -m deepspeed.launcher.launch /x/launch/rank.py train.py"),
        process(4, 3, "python -u -m ds_hooks --local_rank=0 train.py"),
        process(5, 3, "python -u /x/launch/rank.py --local_rank=1 train.py", rank=1),
        process(6, 5, daemon, rank=1),
        process(7, 6, daemon, rank=1),
        process(8, 7, side),
        process(9, 8, side),
        process(10, 8, side, group=8),
        process(11, 4, "python -u -m ds_hooks --local_rank=0 train.py"),
    ]
    assert {role: each.pid for role, each in by_role(found).items()} == {
        ("launcher", 0): 2,
        ("deepspeed", 0): 3,
        ("rank", 0): 4,
        ("rank", 1): 5,
        ("keeper", 1): 6,
        ("daemon", 1): 7,
        ("side task", 1): 8,
        ("search worker", 1): 9,
        ("loader", 1): 10,
    }


def test_a_loss_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "losses"
    assert read_losses(path) == []
    path.write_text("0x1.0p+1\n0x1.8p+1\n0x1.")
    assert read_losses(path) == ["0x1.0p+1", "0x1.8p+1"]


def run_of(number: int, **changed: object) -> dict[str, object]:
    made: dict[str, object] = {
        "run": number,
        "seed": 1,
        "steps_planned": STEPS,
        "commit": "a",
        "ended": "completed",
        "faults": [],
        "left": {},
    }
    return {**made, "steps": STEPS, "seconds": 60.0, "failed": [], **changed}


def test_a_soak_that_was_cut_goes_on_and_only_with_the_same_commit(tmp_path: Path) -> None:
    path = tmp_path / "soak.jsonl"
    assert results.to_continue(path, "a", 1, STEPS) == []
    results.append(path, run_of(0))
    with path.open("a") as file:
        file.write('{"run": 1, "se')
    assert [run["run"] for run in results.to_continue(path, "a", 1, STEPS)] == [0]
    results.append(path, run_of(1))
    assert [run["run"] for run in results.to_continue(path, "a", 1, STEPS)] == [0, 1]
    with pytest.raises(results.ResultsError, match="name another file"):
        results.to_continue(path, "b", 1, STEPS)


def test_a_failure_stands_in_the_summary() -> None:
    fault = {"what": "SIGKILL", "victim": "daemon", "pid": 5}
    failed = run_of(1, failed=["losses differ from step 7 on"], faults=[fault, {"what": "SIGINT", "victim": "loader"}])
    said = results.summary([run_of(0), failed])
    assert "2 runs in 2.0 minutes: 2 completed" in said and "1 failed" in said and "losses differ from step 7" in said
    assert "1 SIGKILL daemon" in said and "1 found no victim" in said


def test_files_in_shared_memory_are_told_by_port_and_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    ours = ["deepspeed_allreduce_buffer_0_127.0.0.1_4001_1", "torch_77_123_0"]
    for name in (*ours, "deepspeed_allreduce_buffer_0_127.0.0.1_14001_1", "torch_78_77_x", "squeezer-0"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "torch_77_124_0").touch()
    assert leftovers.shared_memory({4001}, {77}) == ours
    assert leftovers.shared_memory((), ()) == []
