"""Figures in the documents that are not in a generated table are those of the committed results."""

import json
import re
from collections.abc import Sequence
from math import exp, inf, log, sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest

from benchmarks.published_figures import raw_runs
from benchmarks.shared.intervals import ratio_with_ci95
from benchmarks.shared.paths import RESULTS, ROOT
from benchmarks.soak.results import read
from benchmarks.study import table
from benchmarks.transfer.figures import goal
from benchmarks.windows.modes import PLACEBO, PREEMPTIVE
from squeezer.reports.student_t import t_quantile_975
from squeezer.reports.yield_svg import draw_yield

LATE = "late"
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
        expected = [summary[f"{model}_steps_per_audit"], *percent, 100 * summary[f"{model}_direct_cost"]]
        assert numbers_beside(text, model) == pytest.approx(expected, abs=0.06), model
    low, high = (100 * each for each in summary["cost_ci95"])
    assert f"{summary['cost']:.1%} (95% interval {low:.1f} to {high:.1f}; {summary['pairs']:,} pairs)" in text


@pytest.mark.parametrize(("row", "kind"), [("the core idles", "asleep"), ("another process computes", "in_turn")])
def test_what_a_pause_costs(row: str, kind: str) -> None:
    text, summary = text_of("docs/benchmarks.md").partition("## pauses")[2].partition("\n## ")[0], summary_of("pauses")
    steps = [(summary[f"{kind}_step_{i}"], *summary[f"{kind}_step_{i}_ci95"]) for i in range(1, 7)]
    assert numbers_beside(text, row) == pytest.approx([100 * each for step in steps for each in step], abs=0.51)
    low, high = summary["in_turn_steps_ci95"]
    assert f"each pause costs {summary['in_turn_steps']:.1f} steps ({low:.1f} to {high:.1f})" in text
    assert f"took {summary['slow_to_fast']:.1f} times as long" in text


def test_what_a_pause_costs_on_another_machine() -> None:
    text, summary = " ".join(text_of("docs/benchmarks.md").split()), summary_of("pauses_intel")
    low, high = summary["in_turn_steps_ci95"]
    assert f"each pause costs {summary['in_turn_steps']:.1f} steps ({low:.1f} to {high:.1f}): the first" in text
    assert f"one after it takes {summary['in_turn_step_1']:.0%} more" in text


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
        [*_with_bounds(of, "coordinate_slope_worst"), *_with_bounds(of, "coordinate_slope_plain")],
        _with_bounds(of, "drift_octaves_16"),
        [*_with_bounds(of, "drift_octaves_64"), *_with_bounds(of, "drift_octaves_plain_64")],
        _with_bounds(of, "drift_octaves_most"),
        _with_bounds(of, "drift_octaves_8_others"),
        *(_with_bounds(of, f"spearman_{scale}") for scale in ("2", "4", "8", "ceiling")),
        _with_bounds(of, "regret_sd"),
    ]
    found = [row for row in rows if row]
    assert [len(each) for each in found] == [len(each) for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=0.03, abs=0.0051)
    assert of["drift_octaves_64_ci95"][1] < 2 and "surely met is only the goal of ÷64" in " ".join(text.split())
    low, high = of["spearman_8_ci95"]
    assert f"Ranks at ÷8 correlate to {of['spearman_8']:.2f} ({low:.2f} to {high:.2f})" in text_of("docs/shrinking.md")
    assert f"took {of['end_to_end_speedup']:.1f} times" in text
    assert f"95% interval from {of['end_to_end_speedup_low']:.2f}" in text


def _with_bounds(of: dict[str, Any], name: str) -> list[float]:
    return [of[name], *of[f"{name}_ci95"]]


def test_what_a_factor_of_three_would_take() -> None:
    text = " ".join(text_of("docs/benchmarks.md").partition("**A factor of three could hardly")[2].split())
    runs = json.loads((RESULTS / "transfer_wide.json").read_text(encoding="utf-8"))["runs"]
    good, traces = goal(runs), [run["trace"] for run in runs if run["who"] == "optuna"]
    first = [min((s for s, loss, _ in trace if loss <= good), default=inf) for trace in traces]
    ends = [max(s for s, _, _ in trace) for trace in traces]
    logs = [log(min(pair)) for pair in zip(first, ends, strict=True)]
    assert first.count(inf) == 5 and "cuts five of them short" in text
    assert f"its logarithm is {stdev(logs):.2f}, about a geometric mean of {exp(fmean(logs)):.0f} s" in text
    needed_s = exp(fmean(logs) - t_quantile_975(16 - 1) * stdev(logs) / sqrt(16)) / 3
    assert f"in 16 repeats, half an hour of them, ours would have to end within {needed_s:.0f} s" in text
    pairs_s = [sorted(s for s, _, _ in run["trace"])[1] for run in runs if run["who"] == "ours"]
    assert f"the first two targets, which ended after {min(pairs_s):.0f} to {max(pairs_s):.0f} s" in text


def test_what_the_chosen_number_of_fused_trials_gains() -> None:
    content = json.loads((RESULTS / "most_fused.json").read_text(encoding="utf-8"))
    found = [run["chosen_speedup"] for run in content["runs"]]
    text = text_of("docs/fusing.md").partition("## How much to fuse")[2]
    assert f"On {len(found)} models" in text and f"{min(found):.2f} to {max(found):.2f} times the speed" in text
    assert f"up to {content['summary']['longest_choice_s']:.0f} s of CPU time" in text


def test_how_long_a_study_takes() -> None:
    of, text = summary_of("study"), text_of("docs/benchmarks.md").partition("## study")[2].partition("\n## ")[0]
    assert table(of) in text
    pruned, plain = (
        of["bubbles_trials_per_hour"] / of[f"{arm}_trials_per_hour"] for arm in ("optuna_pruned", "optuna")
    )
    assert f"trials end {pruned:.1f} times as fast" in text and f"and {plain:.0f} times as fast" in " ".join(
        text.split()
    )


def test_what_the_reports_of_ordinary_runs_said() -> None:
    runs = sorted(raw_runs("real_jobs"), key=lambda run: run["run"])
    mains = [run["main"] for run in runs if run["scenario"] == "pretrain_yield"]
    said = _signs(", ".join(f"{main['slowdown']:+.1%}" for main in mains))
    text, readme = (" ".join(text_of(name).split()) for name in ("docs/benchmarks.md", "README.md"))
    text = text.partition("## real_jobs")[2]
    assert len(mains) == 3 and f"The three of the Transformer said {said}" in text
    slowdowns = [main["slowdown"] for main in mains]
    assert _signs(f"reports of three ordinary runs said {min(slowdowns):+.1%} to {max(slowdowns):+.1%}") in readme
    (lasting,) = (run["main"] for run in runs if run["scenario"] == "pretrain_lasting")
    low, high = (f"{bound:+.1%}" for bound in lasting["slowdown_ci95"])
    shown = f"{lasting['slowdown']:+.1%} ({low} to {high}; {lasting['slowdown_pairs']} pairs)"
    assert _signs(f"that of 3,000 steps {shown}") in text
    (long,) = (run["main"] for run in raw_runs("real_jobs_amd") if run["scenario"] == "denoise_steady")
    low, high = (f"{bound:+.1%}" for bound in long["slowdown_ci95"])
    shown = f"{long['slowdown']:+.1%}"
    assert _signs(f"the convolutions said {shown} ({low} to {high}; {long['slowdown_pairs']} pairs)") in text
    assert (
        long["slowdown_ci95"][0] > 0
        and f"a longer one did detect one](docs/benchmarks.md#real_jobs), {shown}" in readme
    )


def _percent_of(figures: dict[str, Any], name: str) -> str:
    low, high = (f"{bound:+.1%}" for bound in figures[f"{name}_ci95"])
    return _signs(f"{figures[name]:+.1%} ({low} to {high})")


def _signs(text: str) -> str:
    return text.replace("-", "−")


def test_what_the_demo_showed() -> None:
    report = json.loads((RESULTS / "demo.json").read_text(encoding="utf-8"))
    low, high = report["main"]["slowdown_ci95"]
    slowdown = f"{report['main']['slowdown']:+.1%} ({low:+.1%} to {high:+.1%}".replace("-", "−")
    assert f"{slowdown}, n = {report['main']['slowdown_pairs']}, [its report]" in text_of("docs/benchmarks.md")
    assert not report["main"]["slowdown_detected"]


def test_what_resuming_and_tails_take_for_each_trial() -> None:
    found = []
    for name in ("demo", "demo_in_blocks_of_three"):
        report = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        bubble_ms = report["bubbles"]["steps"] * sum(
            each["ms_per_step"] for each in report["bubbles"]["by_kind"].values()
        )
        ended = report["trials"]["completed"] + report["trials"]["pruned"]
        found.append(report["side"]["waterfall"]["resume_and_tail"] * bubble_ms / ended)
    search = summary_of("search_cost")
    known = [search[f"default_journal_{trials}_cpu_ms"] for trials in (10, 1000)]
    text = " ".join(text_of("docs/benchmarks.md").split())
    assert f"it took {found[0]:.0f} and {found[1]:.0f} ms for each trial that ended" in text
    assert f"[{known[0]:.0f} to {known[1]:.0f} ms](#search_cost)" in text


def test_the_waterfall_is_the_demos(tmp_path: Path) -> None:
    report = json.loads((RESULTS / "demo.json").read_text(encoding="utf-8"))
    drawn = draw_yield(report, tmp_path / "yield.svg")
    assert drawn is not None and drawn.read_bytes() == (ROOT / "docs" / "yield.svg").read_bytes()


def test_what_a_report_in_blocks_of_three_steps_says() -> None:
    main = json.loads((RESULTS / "demo_in_blocks_of_three.json").read_text(encoding="utf-8"))["main"]
    low, high = main["slowdown_ci95"]
    said = f"shows {main['slowdown']:+.1%} ({low:+.1%} to {high:+.1%}, n = {main['slowdown_pairs']}, "
    assert said in text_of("docs/benchmarks.md")
    assert f"on another machine, {main['slowdown']:+.1%}" in " ".join(text_of("README.md").split())


def test_what_the_transformer_pays() -> None:
    figures, amd = summary_of("real_jobs"), summary_of("real_jobs_amd")
    text, readme = (" ".join(text_of(name).split()) for name in ("docs/benchmarks.md", "README.md"))
    shown = _percent_of(figures, "pretrain_slowdown")
    for document in (text, readme):
        assert f"The Transformer pays {shown}" in document
    (pairs_ms,) = (run["pairs_ms"] for run in raw_runs("hooks_overhead") if run["scenario"] == "real_two_ranks")
    hooks, (low, high) = ratio_with_ci95(pairs_ms)
    for document in (text, readme):
        assert "hooks come on top" in document and _signs(f"{hooks:+.1%} ({low:+.1%} to {high:+.1%})") in document
    for job, whose in (("pretrain", "of the Transformer"), ("denoise", "of the convolutions")):
        assert f"{figures[f'{job}_slowdown_rounds']} rounds {whose}" in text
    transformer, convolutions = (_percent_of(amd, f"{job}_stopped") for job in ("pretrain", "denoise"))
    assert f"cost the Transformer {transformer} and the convolutions {convolutions}" in text
    assert f"it cost the Transformer {transformer}" in readme
    assert f"work cost the Transformer {_percent_of(amd, 'pretrain_work')} more" in text
    yields = [f"{amd[f'{job}_yield']:.0%}" for job in ("pretrain", "denoise")]
    assert f"yielded {yields[0]} and {yields[1]}" in text
    (steps_ms,) = (run["steps_ms"] for run in raw_runs("real_jobs_amd") if run["scenario"] == "pretrain_cost")
    ms = {(mode, at, round_): each for round_, mode, at, each in steps_ms}
    rounds = {round_ for _, _, round_ in ms}
    grows = [median(ms[PREEMPTIVE, at, of] / ms[PLACEBO, at, of] - 1 for of in rounds) for at in range(5)]
    assert _signs(", ".join(f"{each:+.1%}" for each in grows)) + " (medians)" in text


def test_what_a_busy_neighbour_costs() -> None:
    figures = summary_of("neighbour")
    text = " ".join(text_of("docs/benchmarks.md").split())
    spins, trains, copies = (_percent_of(figures, f"{name}_slower") for name in ("spins", "trains", "copies"))
    assert f"one that only spins does by {spins}, one that trains small models by {trains}" in text
    assert f"one that copies memory by {copies}" in text and f"[{figures['rounds']} rounds](" in text
    report = json.loads((RESULTS / "demo_in_blocks_of_three.json").read_text(encoding="utf-8"))
    idle, most = report["bubbles"]["ratio"], report["bubbles"]["ratio"] * figures["spins_slower"]
    assert f"by {figures['spins_slower']:.1%} there, and cores were idle for {idle:.0%} of that run" in text
    assert f"which makes up to {most:.1%}" in text


def test_how_well_the_guard_tells_a_slowdown_from_noise() -> None:
    text = text_of("docs/benchmarks.md").partition("## guard_power")[2].partition("\n## ")[0]
    cells = json.loads((RESULTS / "guard_power.json").read_text(encoding="utf-8"))["cells"]
    own = [cell for cell in cells if not cell["held_out"] and cell["kind"] != LATE]
    assert len({cell["kind"] for cell in own}) == 11

    def of(found: list[dict[str, Any]], deviation: float, slowdown: float) -> list[float]:
        key = "cost" if slowdown else "squeezed"
        return [cell[key] for cell in found if (cell["deviation"], cell["slowdown"]) == (deviation, slowdown)]

    for noise in (0.01, 0.03, 0.1):
        squeezed = of(own, noise, 0.0)
        row = f"| {noise:.0%} | {median(squeezed):.0%}, {min(squeezed):.0%} |"
        for slowdown in (0.02, 0.04, 0.4):
            costs = of(own, noise, slowdown)
            row += f" {median(costs):.1%}, {max(costs):.1%} |"
        assert f"{row}\n" in text
    late = [cell for cell in cells if cell["kind"] == LATE]
    columns = [
        [f"{value:.{int(slowdown > 0)}%}" for noise in (0.01, 0.03, 0.1) for value in of(late, noise, slowdown)]
        for slowdown in (0.0, 0.02, 0.04, 0.4)
    ]
    assert f"(`late`): 1%, 3%, 10% | {' | '.join(map(', '.join, columns))} |\n" in text
    worst = max(cell["lost"] for cell in cells if cell["held_out"] and not cell["slowdown"])
    assert f"lost at most {worst:.1%} of the squeezing" in text


def test_how_soon_the_guard_finds_a_slowdown() -> None:
    cells = json.loads((RESULTS / "guard_power.json").read_text(encoding="utf-8"))["cells"]

    def steps(deviation: float, slowdown: float, kinds: Sequence[str] = ()) -> list[float]:
        """The median run's, of each kind of noise that is not held out, or of `kinds`; infinite: never."""
        wanted = [
            cell
            for cell in cells
            if (cell["deviation"], cell["slowdown"]) == (deviation, slowdown)
            and (cell["kind"] in kinds if kinds else not cell["held_out"] and cell["kind"] != LATE)
        ]
        return [inf if cell["shut_after"][1] is None else cell["shut_after"][1] for cell in wanted]

    ordinary = [fmean(steps(0.03, slowdown, ("white", "bursts"))) for slowdown in (0.4, 0.04, 0.02)]
    expected = "a slowdown of 40% after {:.0f} steps (median), 4% after {:.0f}, and 2% after {:.0f}.".format(*ordinary)
    assert expected in " ".join(text_of("docs/benchmarks.md").split())
    most = sorted(steps(0.03, 0.02))[1:-4]
    assert f"needs {round(most[0], -2):.0f} to {round(most[-1], -2):,.0f} of them to find one of 2%" in " ".join(
        text_of("README.md").split()
    )
    noisy = f"If steps vary by 10%, it needs about {round(median(steps(0.1, 0.04)), -2):.0f} to find a slowdown of 4%"
    assert noisy in " ".join(text_of("docs/promises.md").split())


def test_what_adapters_cost() -> None:
    speeds = {key: value for key, value in summary_of("adapters").items() if key.startswith("ratio ")}
    text = " ".join(text_of("docs/fusing.md").split())
    assert f"reached {min(speeds.values()):.0%} to {max(speeds.values()):.0%} of the speed of plain PyTorch" in text


def test_what_the_soak_found() -> None:
    text = text_of("docs/benchmarks.md").partition("## soak")[2]
    alone, *runs = read(RESULTS / "soak.jsonl")
    assert "alone" in alone
    completed = sum(run["ended"] == "completed" for run in runs)
    injected = ["pid" in fault for run in runs for fault in run["faults"]]
    assert numbers_beside(text, "runs of the job") == [len(runs), completed, len(runs) - completed]
    assert numbers_beside(text, "losses compared bit by bit") == [sum(run["steps"] for run in runs)]
    assert numbers_beside(text, "faults") == [sum(injected), len(injected) - sum(injected)]
    assert numbers_beside(text, "runs in which side tasks worked") == [sum(bool(run["side_units"]) for run in runs)]
    assert numbers_beside(text, "runs that failed") == [sum(bool(run["failed"]) for run in runs)]
