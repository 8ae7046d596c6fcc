"""Idle time of made-up runs whose every share is known beforehand."""

from pathlib import Path

import pytest

from squeezer.records.layout import RECORD_VERSION
from squeezer.records.reader import ReportError
from squeezer.reports.idle import FEW_STEPS, idle_of_run, render_idle
from squeezer.reports.metrics import WARM_UP_STEPS
from tests.support.made_up_rank import MS, MadeUpRank

KINDS = ("RECV_ACTIVATION", "LOSS")


def made(run: Path, rank: int, *lengths_ms: float, steps: int = FEW_STEPS, **place: int) -> MadeUpRank:
    """A rank whose steps of 100 ms have bubbles of these lengths; in the two of warm-up nothing waits."""
    one = MadeUpRank(run, rank, **place)
    for _ in range(WARM_UP_STEPS):
        one.step(False, 500.0)
    train(one, *lengths_ms, steps=steps)
    return one


def train(rank: MadeUpRank, *lengths_ms: float, steps: int = FEW_STEPS, kinds: tuple[str, ...] = KINDS) -> None:
    bubbles = [(40.0 * slot, length_ms) for slot, length_ms in enumerate(lengths_ms)]
    for _ in range(steps):
        rank.step(False, 100.0, bubbles, waits=kinds[: len(lengths_ms)])


def test_each_stages_share_by_kind_and_its_device_hours(tmp_path: Path) -> None:
    made(tmp_path, 0, 20.0, 5.0).write()
    made(tmp_path, 1, 10.0).write()
    (job,) = idle_of_run(tmp_path)
    first, last = job.stages
    assert first.by_kind == pytest.approx({"RECV_ACTIVATION": 0.20, "LOSS": 0.05})
    assert last.by_kind == pytest.approx({"RECV_ACTIVATION": 0.10})
    assert (first.steps, first.step_ms) == (FEW_STEPS, 100.0), "without warm-up"
    assert first.device_hours_per_day == pytest.approx(0.25 * 24)
    assert job.device_hours_per_day == pytest.approx(0.35 * 24)
    assert render_idle([job]).splitlines() == [
        "2 stages × 1 device, 4 micro-batches: 20 steps of 100.0 ms, after 2 of warm-up",
        "",
        "                        device-hours       RECV_",
        "stage  devices    idle       per day  ACTIVATION     LOSS",
        "    0        1   25.0%           6.0       20.0%     5.0%",
        "    1        1   10.0%           2.4       10.0%        –",
        "total        2   17.5%           8.4",
        "",
        "idle: the share of the step in which the device waits, transfers included; then its parts by kind of wait.",
    ]


def test_a_wait_in_which_the_device_computes_is_shown_but_not_idle(tmp_path: Path) -> None:
    one = made(tmp_path, 0, stages=1, world_size=1, steps=0)
    train(one, 20.0, 30.0, kinds=("RECV_GRAD", "REDUCE_GRADS"))
    one.write()
    (job,) = idle_of_run(tmp_path)
    assert job.stages[0].by_kind == pytest.approx({"RECV_GRAD": 0.2, "REDUCE_GRADS": 0.3})
    assert job.stages[0].share == pytest.approx(0.2)
    assert "REDUCE_GRADS is not idle" in render_idle([job])


def test_replicas_of_a_stage_are_averaged_and_all_their_devices_count(tmp_path: Path) -> None:
    for rank, length_ms in enumerate((10.0, 30.0, 40.0, 40.0)):  # two replicas of two stages
        made(tmp_path, rank, length_ms, world_size=4, stage=rank // 2).write()
    (job,) = idle_of_run(tmp_path)
    assert [(stage.devices, stage.ranks) for stage in job.stages] == [(2, (0, 1)), (2, (2, 3))]
    assert [stage.share for stage in job.stages] == pytest.approx([0.2, 0.4])
    assert job.device_hours_per_day == pytest.approx((0.2 * 2 + 0.4 * 2) * 24)
    assert "2 stages × 2 devices" in render_idle([job]) and job.missing == ()


def test_a_missing_rank_is_named_and_its_replica_stands_for_it(tmp_path: Path) -> None:
    for rank in (0, 2, 3):
        made(tmp_path, rank, 20.0, world_size=4, stage=rank // 2).write()
    (job,) = idle_of_run(tmp_path)
    assert job.missing == (1,)
    assert job.device_hours_per_day == pytest.approx(0.2 * 4 * 24)
    assert "No records of rank 1." in render_idle([job])


def test_a_stage_without_records_is_not_guessed(tmp_path: Path) -> None:
    made(tmp_path, 0, 20.0).write()
    (job,) = idle_of_run(tmp_path)
    assert (job.stages[1].share, job.device_hours_per_day, job.missing) == (None, None, (1,))
    text = render_idle([job])
    assert "    1        1     n/a           n/a" in text and "total        2     n/a           n/a" in text


def test_few_steps_are_said_to_be_few_and_none_give_no_share(tmp_path: Path) -> None:
    made(tmp_path / "few", 0, 20.0, steps=FEW_STEPS - 1, stages=1, world_size=1).write()
    assert f"Fewer than {FEW_STEPS} steps: these shares are rough." in render_idle(idle_of_run(tmp_path / "few"))
    made(tmp_path / "none", 0, steps=0).write()
    text = render_idle(idle_of_run(tmp_path / "none"))
    assert text == "2 stages × 1 device: no step after the 2 of warm-up, so no share is known."


def test_jobs_of_one_layout_share_a_table_and_others_have_their_own(tmp_path: Path) -> None:
    rank = made(tmp_path, 0, 20.0, stages=1, world_size=1)
    rank.now_ns += MS
    rank.attach()
    train(rank, 90.0, steps=WARM_UP_STEPS)
    train(rank, 40.0)
    rank.now_ns += MS
    rank.attach(micro_batches=8)
    train(rank, 60.0, steps=WARM_UP_STEPS + FEW_STEPS)
    rank.write()
    both, other = idle_of_run(tmp_path)
    assert (both.jobs, other.jobs) == (2, 1)
    assert both.stages[0].share == pytest.approx(0.3), "each job's own warm-up is left out"
    assert other.stages[0].share == pytest.approx(0.6)
    text = render_idle([both, other])
    assert text.startswith("2 jobs of 1 stage × 1 device, 4 micro-batches: 40 steps") and "8 micro-batches: 20" in text


def test_a_daemon_that_was_restarted_makes_no_second_job(tmp_path: Path) -> None:
    rank = made(tmp_path, 0, 20.0, stages=1, world_size=1)
    attached_ns = rank.now_ns
    rank.attach()
    train(rank, 20.0)
    rank.add("run", version=RECORD_VERSION, rank=0, config={"side": None}, wall_s=1.7e9, t_ns=rank.now_ns)
    rank.add("job", job=0, pid=7, rank=0, t_ns=attached_ns, world_size=1, stage=0, stages=1, micro_batches=4)
    train(rank, 20.0)
    rank.write()
    (job,) = idle_of_run(tmp_path)
    assert job.jobs == 2, "the made-up rank's first, and one that two daemons served"


def test_bubbles_of_a_step_that_never_ended_do_not_count(tmp_path: Path) -> None:
    rank = made(tmp_path, 0, 20.0, stages=1, world_size=1)
    rank.step(False, 100.0, [(0.0, 90.0)])
    rank.write()
    kept = [line for line in rank.path.read_text().splitlines() if f'"step":{FEW_STEPS + 3},' not in line]
    rank.path.write_text("\n".join(kept) + "\n")
    (job,) = idle_of_run(tmp_path)
    assert job.stages[0].share == pytest.approx(0.2) and list(job.stages[0].by_kind) == ["RECV_ACTIVATION"]


def test_a_run_without_a_pipeline_engine_says_what_is_needed(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    rank.write()
    kept = [line for line in rank.path.read_text().splitlines() if '"r":"job"' not in line]
    rank.path.write_text("\n".join(kept) + "\n")
    assert render_idle(idle_of_run(tmp_path)).startswith("No pipeline engine was seen")


def test_a_directory_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no records of a run here"):
        idle_of_run(tmp_path)


def test_nothing_in_the_table_speaks_of_squeezing(tmp_path: Path) -> None:
    for rank in (0, 1):
        made(tmp_path, rank, 20.0, 5.0).write()
    text = render_idle(idle_of_run(tmp_path)).lower()
    assert max(map(len, text.splitlines())) <= 110
    for word in ("squeez", "guard", "harvest", "fill", "trial", "slowdown"):
        assert word not in text


def test_one_step_is_not_called_steps(tmp_path: Path) -> None:
    made(tmp_path, 0, 10.0, steps=1).write()
    assert ": 1 step of " in render_idle(idle_of_run(tmp_path))
