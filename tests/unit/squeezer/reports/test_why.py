"""What `squeezer why` says of made-up runs."""

from pathlib import Path
from typing import Any

import pytest

from squeezer.cli import main
from squeezer.records.layout import RECORD_VERSION
from squeezer.reports.why import sentence
from tests.support.made_up_rank import MadeUpRank

MS = 1_000_000
CONFIG = {
    "squeeze": {"kinds": ["RECV_GRAD"], "min_bubble_ms": 3.0},
    "guard": {"enabled": True, "slowdown_budget": 0.01},
    "side": {"study_name": "digits"},
}


def why(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["why", str(run), *options]) == 0
    return capsys.readouterr().out


def made_up(run: Path, rank: int = 0, **config: Any) -> MadeUpRank:
    made = MadeUpRank(run, rank)
    made.add("run", version=RECORD_VERSION, rank=rank, config={**CONFIG, **config}, wall_s=1.7e9, t_ns=made.now_ns)
    return made


def decided(rank: MadeUpRank, what: str, cause: str, **figures: Any) -> None:
    rank.add("guard", t_ns=rank.now_ns, step=rank.number, what=what, cause=cause, figures=figures)


def test_every_decision_is_told_with_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank = made_up(tmp_path)
    rank.step(None, 100.0)
    rank.add("side", t_ns=rank.now_ns, event="ready")
    rank.step(True, 100.0, bubbles=[(20, 10), (60, 2)])
    decided(rank, "shut", "steps", slowdown=0.183, at_least=0.021, pairs=9, for_steps=3)
    for _ in range(3):
        rank.step(None, 100.0)
    decided(rank, "retry", "steps")
    rank.step(True, 100.0, bubbles=[(20, 10), (60, 2)])
    decided(rank, "widen", "overrun", slot=1, margin_ms=0.6, overrun_ms=2.0, mean_overrun_ms=0.3)
    rank.step(False, 100.0)
    rank.end()
    rank.write()
    text = why(tmp_path, capsys)
    for words in (
        "7: 2 squeezed, 1 left alone for comparison, 4 neither",
        "step 1: the side task was starting, or waited to",
        "steps 3 to 5: the guard had the gate shut",
        "budget 1.00% of slowdown; shut 1 time\n",
        "step 2: the gate is shut for 3 steps: squeezed steps are longer than the steps beside them that were",
        "(by 18.30%, surely by 2.10%; 9 comparisons)",
        "step 5: squeezing is tried again, and judged anew",
        "in slot 1 the permit ends earlier: 0.6 ms before the forecast end",
        "(overrun 2.00 ms, recent mean 0.30 ms)",
        "0.1 s: ready",
    ):
        assert words in text, text


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("gaps", "the time between steps is longer after squeezed ones than after those left alone"),
        ("long_gaps", "evaluations and checkpoints take longer after squeezed steps than after those left alone"),
        ("overrun", "the side task used CPU time outside bubbles (4.00% of the last squeezed steps)"),
    ],
)
def test_a_shut_gate_names_its_cause(cause: str, words: str) -> None:
    figures = {"slowdown": 0.04, "at_least": 0.01, "pairs": 9, "for_steps": 200}
    if cause == "overrun":
        figures = {"overrun_share": 0.04, "for_steps": 200}
    assert words in sentence({"what": "shut", "cause": cause, "figures": figures})


def test_a_slot_that_stays_shut_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    squeeze = {"kinds": ["RECV_GRAD"], "min_bubble_ms": 7.0}
    rank = made_up(tmp_path, squeeze=squeeze)
    rank.step(True, 100.0, bubbles=[(20, 10)], opened=False)
    rank.write()
    assert "on average shorter than min_bubble_ms = 7" in why(tmp_path, capsys)


def test_a_least_bubble_that_the_device_raises_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By what `squeezer doctor --measure` has found there."""
    rank = made_up(tmp_path)
    rank.attach(least_bubble_ns=8_500_000)
    rank.step(True, 100.0, bubbles=[(20, 5)], opened=False)
    rank.end()
    rank.write()
    text = why(tmp_path, capsys)
    assert "on average shorter than the 8.5 ms worth opening on this device (squeezer doctor)" in text
    assert "min_bubble_ms" not in text


def test_without_a_side_task_or_a_guard_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank = made_up(tmp_path, side=None, guard={"enabled": False})
    rank.step(False, 100.0)
    rank.write()
    text = why(tmp_path, capsys)
    assert "none is configured: bubbles are only observed" in text and "switched off by the configuration" in text


def test_times_count_from_the_first_daemon_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank = made_up(tmp_path)
    rank.step(None, 100.0)
    rank.add("side", t_ns=rank.now_ns, event="started")
    rank.step(True, 100.0)
    rank.add("run", version=RECORD_VERSION, rank=0, config=CONFIG, wall_s=1.7e9, t_ns=rank.now_ns)
    rank.add("side", t_ns=rank.now_ns, event="ready")
    rank.write()
    text = why(tmp_path, capsys)
    assert "0.1 s: started" in text and "0.2 s: ready" in text, text


def test_audits_are_one_line_however_many_epochs_report_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = made_up(tmp_path)
    rank.step(True, 100.0)
    rank.add("side", t_ns=rank.now_ns, event="started", pid=7, group="here", no_group="")
    rank.add("side", t_ns=rank.now_ns, event="ready", busy_ms=3104.140556)
    for audits in (2, 0, 0, 1):
        figures = {"audits": audits, "mismatches": 0, "audit_ms": 5.0 * audits, "first_ms": 0.0, "all_ms": 100.0}
        rank.add("side", t_ns=rank.now_ns, event="audited", **figures)
    rank.write()
    text = why(tmp_path, capsys)
    assert "audited" not in text
    assert "  audits      3 steps compared with a trial alone, 0 differed; cost 3.8% of the side task's time\n" in text
    assert "started (pid 7, group here)\n" in text and "ready (busy_ms 3104.14)\n" in text


def test_one_rank_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (0, 1):
        rank = made_up(tmp_path, number)
        rank.step(False, 100.0)
        rank.write()
    text = why(tmp_path, capsys, "--rank", "1")
    assert text.startswith("rank 1") and "rank 0" not in text
    with pytest.raises(SystemExit, match="2"):
        main(["why", str(tmp_path), "--rank", "7"])
    assert "no rank 7 in it" in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["why", str(tmp_path)])
    assert "no records of a run here" in capsys.readouterr().err
