"""Figures in the documents that are not in a generated table are those of the committed results."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import ROOT
from benchmarks.published_figures import RESULTS
from squeezer.reports.yield_svg import draw_yield

NUMBER = re.compile(r"[+−]?\d+(?:[.,]\d+)*(?:e-\d+)?")


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def summary_of(benchmark: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{benchmark}.json").read_text(encoding="utf-8"))["summary"]
    return found


def numbers_beside(text: str, name: str) -> list[float]:
    """All numbers in the table row that begins with `name`, but those in the name itself."""
    (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)$", text, re.MULTILINE)
    return [float(each.replace("−", "-").replace(",", "")) for each in NUMBER.findall(row)]


def test_what_audits_cost() -> None:
    text, summary = text_of("docs/benchmarks.md").partition("## audit")[2].partition("\n## ")[0], summary_of("audit")
    models = [key.removesuffix("_steps_per_audit") for key in summary if key.endswith("_steps_per_audit")]
    assert len(models) == 10
    for model in models:
        percent = [100 * each for each in (summary[f"{model}_cost"], *summary[f"{model}_cost_ci95"])]
        expected = [summary[f"{model}_steps_per_audit"], *percent]
        assert numbers_beside(text, model) == pytest.approx(expected, abs=0.06), model
    low, high = (100 * each for each in summary["cost_ci95"])
    assert f"{summary['cost']:.1%} (95% interval {low:.1f} to {high:.1f}; 240 pairs)" in text


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ("nothing", "nothing"),
        ("a process of niceness 19", "nice_19"),
        ("the same as `SCHED_BATCH`", "batch_nice_19"),
        ("**a process of the idle class**", "idle"),
    ],
)
def test_what_a_bubble_costs(row: str, kind: str) -> None:
    text, summary = text_of("docs/benchmarks.md").partition("## What a bubble costs")[2], summary_of("wake_up")
    expected = [summary[f"{kind}_{what}_us_p{p}"] for what in ("held", "late") for p in (50, 90, 99)]
    means = [value for key, value in summary.items() if key.startswith(f"{kind}_lost_us_mean_at_")]
    assert numbers_beside(text.partition("\n## ")[0], row) == pytest.approx([*expected, sum(means) / 5], abs=0.5)


def test_how_well_rates_transfer() -> None:
    text, of = text_of("docs/benchmarks.md").partition("## transfer")[2].partition("\n## ")[0], summary_of("transfer")
    assert f"{of['oracle_error']:.0e}" in text
    rows = [numbers_beside(text, name) for name in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)]
    expected = [
        [of["oracle_error"]],
        [of["coordinate_slope_worst"], of["coordinate_slope_plain"]],
        [of["drift_octaves_16"]],
        [of["drift_octaves_64"], of["drift_octaves_plain_64"]],
        [of["drift_octaves_8_others"]],
        [of["spearman_2"], of["spearman_4"], of["spearman_8"]],
        [of["regret_sd"]],
    ]
    found = [row for row in rows if row]
    assert [len(each) for each in found] == [len(each) for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=0.03, abs=0.0051)
    assert f"two seeds of the target itself: {of['spearman_ceiling']:.2f}" in text
    assert f"took {of['end_to_end_speedup']:.1f} times" in text
    assert f"95% interval from {of['end_to_end_speedup_low']:.2f}" in text


def test_what_fusing_gains() -> None:
    text = text_of("docs/studies.md").partition("## Figures")[2]
    for model, of in summary_of("fusion")["by_model"].items():
        expected = [*(of["speedup_by_k"][k] for k in ("1", "16", "64")), of["planned_k"], of["speedup"]]
        expected += [*of["speedup_ci95"], of["speedup_over_processes"]]
        *ratios, fused_mib, processes_mib = numbers_beside(text, model)
        assert ratios == pytest.approx(expected, abs=0.0051), model
        assert (fused_mib, processes_mib) == pytest.approx((of["fused_mib"], of["processes_mib"]), abs=0.51), model


def test_what_the_demo_showed() -> None:
    report = json.loads((RESULTS / "demo.json").read_text(encoding="utf-8"))
    low, high = report["main"]["slowdown_ci95"]
    slowdown = f"{report['main']['slowdown']:+.1%} ({low:+.1%} to {high:+.1%}".replace("-", "−")
    assert f"{slowdown}), and a yield of {report['side']['yield']:.0%}" in text_of("README.md")
    assert f"{slowdown}, n = {report['main']['slowdown_pairs']}, [its report]" in text_of("docs/benchmarks.md")
    assert not report["main"]["slowdown_detected"]


def test_the_waterfall_is_the_demos(tmp_path: Path) -> None:
    report = json.loads((RESULTS / "demo.json").read_text(encoding="utf-8"))
    drawn = draw_yield(report, tmp_path / "yield.svg")
    assert drawn is not None and drawn.read_bytes() == (ROOT / "docs" / "yield.svg").read_bytes()
