"""The scheduler: whatever is split or crowded out when, each trial gives the same; and a device that fails."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from optuna.trial import FrozenTrial, TrialState
from torch import nn

from ds_hooks.shared import statuses
from ds_hooks.shared.statuses import Status
from tests.support.fused_and_solo import alike, close
from tests.support.side_task_runs import MS, Direct, Starving, assert_as_alone, make_study, run
from tests.support.slow_cases import others_slow
from trials.fusion.layers.linear import FusedLinear
from trials.fusion.rows import Rows
from trials.gate.base import GateError, Starved
from trials.side_task import scheduler
from trials.side_task.cohort import Fit
from trials.training.group import TrialGroup


@pytest.fixture(scope="module", params=others_slow([False, True], [True]))
def whole(request: pytest.FixtureRequest) -> tuple[bool, list[FrozenTrial], list[Status]]:
    """Whether trials have their own batches, and a run in which nothing is split."""
    return request.param, *run(request.param, Starving(()))


def starved(sent: list[Status]) -> list[statuses.Starved]:
    return [status for status in sent if isinstance(status, statuses.Starved)]


def out_of_memory(sent: list[Status]) -> list[tuple[int, int]]:
    """(trials, most) each time."""
    return [(status.trials, status.most) for status in sent if isinstance(status, statuses.OutOfMemory)]


def test_trials_that_crowd_others_out_of_the_memory_begin_anew_with_them(
    whole: tuple[bool, list[FrozenTrial], list[Status]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, roomy, _ = whole
    append = TrialGroup._append

    def crowded(group: TrialGroup, rows: Rows, *rest: Any) -> None:
        if group.size + rows.size > 2:
            group._fused.rows.append(rows)
            raise torch.OutOfMemoryError("no more")
        append(group, rows, *rest)

    monkeypatch.setattr(TrialGroup, "_append", crowded)
    tight, reported = run(own, Starving(()))
    assert out_of_memory(reported) == [(3, 1)]
    for one, other in zip(tight, roomy, strict=True):
        assert one.state == other.state
        for epoch, value in other.intermediate_values.items():
            close(one.intermediate_values[epoch], value, f"trial {one.number} epoch {epoch}")


@settings(
    max_examples=4,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(times=st.sets(st.integers(1, 23), min_size=1, max_size=4))  # the last time, no trial is left
def test_trials_of_split_groups_give_the_same(
    whole: tuple[bool, list[FrozenTrial], list[Status]], times: set[int]
) -> None:
    own, unsplit, reported_unsplit = whole
    gate = Starving(times)
    split, reported = run(own, gate)
    assume(min(times) <= gate.asked)  # else none was too long
    first = starved(reported)[0]
    assert first.remedy == ("split" if first.trials > 1 else "nothing")
    assert reported[-1] == reported_unsplit[-1] and isinstance(reported[-1], statuses.Finished)
    ended = {0: TrialState.COMPLETE, 1: TrialState.FAIL, 2: TrialState.PRUNED}
    for one, other in zip(split, unsplit, strict=True):
        assert one.state == other.state == ended.get(one.number, TrialState.COMPLETE)
        assert one.intermediate_values.keys() == other.intermediate_values.keys()
        for epoch, value in other.intermediate_values.items():
            close(one.intermediate_values[epoch], value, f"trial {one.number} epoch {epoch}")
        alike(one.user_attrs, other.user_attrs, f"trial {one.number}")


def test_later_cohorts_are_no_wider_than_what_fits_and_the_longest_unit_is_told() -> None:
    gate = Starving({1})
    trials, reported = run(False, gate)
    assert len(trials) == 7
    assert max(gate.sizes[: gate.sizes.index(2)]) == 4 and max(gate.sizes[gate.sizes.index(2) :]) == 2
    assert starved(reported) == [
        statuses.Starved(unit="loss", trials=4, needs_ms=5.0, longest_bubble_ms=3.0, remedy="split")
    ]


def test_a_group_is_split_down_to_one_trial() -> None:
    _, reported = run(False, Starving(range(1, 1000)))
    remedies = [(status.trials, status.remedy) for status in starved(reported)]
    assert remedies == [(4, "split"), (2, "split"), (2, "split"), (1, "nothing")]


def test_what_a_split_does_not_shorten_is_split_no_further_and_told_once() -> None:
    _, reported = run(False, Starving(range(1, 1000), lambda trials: 9))
    assert [(status.trials, status.remedy) for status in starved(reported)] == [(4, "split"), (2, "nothing")]


def test_a_unit_of_an_audit_splits_nothing() -> None:
    class Long(Starving):
        def take_starved(self) -> list[Starved]:
            return [Starved(unit="audit loss", trials=self._trials, needs_ns=9 * MS, longest_ns=MS)]

    _, told = run(False, Long(()))
    assert starved(told) == []


def test_audits_are_reported_and_change_no_score(whole: tuple[bool, list[FrozenTrial], list[Status]]) -> None:
    own, audited, told = whole
    reports = [status for status in told if isinstance(status, statuses.Audited)]
    assert sum(each.audits for each in reports) >= 2
    assert sum(each.mismatches for each in reports) == 0
    assert all(0 <= each.first_ms <= each.audit_ms < each.all_ms for each in reports)
    study = make_study(own)
    study.audit = False
    plain, silent = run(own, Starving(()), study)
    assert not any(isinstance(status, statuses.Audited) for status in silent)
    for one, other in zip(audited, plain, strict=True):
        assert one.intermediate_values == other.intermediate_values


def test_a_mismatch_is_reported_and_holds_for_later_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    by_rules = FusedLinear.run

    def off(layer: FusedLinear, *args: Any) -> tuple[torch.Tensor, bool]:
        y, own = by_rules(layer, *args)
        return y * 1.001, own

    monkeypatch.setattr(FusedLinear, "run", off)
    study = make_study(False)
    trials, told = run(False, Starving(()), study)
    found = [status for status in told if isinstance(status, statuses.Mismatched)]
    assert [(each.way, each.then) for each in found] == [("rules", "vmap"), ("vmap", "loop")]
    assert found[0].what.startswith("output of 0.Linear differs by ")
    assert_as_alone(trials, study)


def test_trials_that_rules_alone_can_fuse_are_trained_apart_after_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Labelled(nn.Module):
        """Keeps a number that its forward does not read."""

        def __init__(self, n: int, layers: nn.Module) -> None:
            super().__init__()
            self.n, self.layers = n, layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    by_rules = FusedLinear.run
    monkeypatch.setattr(
        FusedLinear, "run", lambda layer, *args: (by_rules(layer, *args)[0] * 1.001, by_rules(layer, *args)[1])
    )
    study = make_study(False)
    make = study.make
    study.make = lambda n: Labelled(n, make(n))
    gate = Starving(())
    trials, _ = run(False, gate, study)
    assert max(gate.sizes) == 4 and gate.sizes[-1] == 1
    ended = {1: TrialState.FAIL, 2: TrialState.PRUNED}
    assert [trial.state for trial in trials] == [ended.get(number, TrialState.COMPLETE) for number in range(7)]
    assert_as_alone(trials, study)


def test_a_device_that_fails_is_no_trials_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Starving):
        def rest(self) -> None:
            if steps == 3:
                raise GateError("the device's gate is shut for good")

    step = TrialGroup.train_step
    steps = 0

    def fails(group: TrialGroup, *batch: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise RuntimeError("illegal memory access")
        step(group, *batch)

    monkeypatch.setattr(TrialGroup, "train_step", fails)
    sent: list[dict[str, Any]] = []
    send = Direct.send
    monkeypatch.setattr(Direct, "send", lambda line, **request: sent.append(request) or send(line, **request))
    with pytest.raises(GateError):
        run(False, Broken(()))
    assert [request for request in sent if "fail" in request] == []


@pytest.mark.parametrize("fits", others_slow([3, 1], [1]))
def test_trials_that_do_not_fit_into_the_memory_are_trained_in_smaller_groups_and_give_the_same(
    whole: tuple[bool, list[FrozenTrial], list[Status]], fits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, roomy, _ = whole
    step = TrialGroup.train_step
    steps = 0

    def crowded(group: TrialGroup, *batch: Any) -> None:
        nonlocal steps
        steps += 1
        step(group, *batch)
        if group.size > fits and steps > 2:
            raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(TrialGroup, "train_step", crowded)
    tight, reported = run(own, Starving(()))
    assert out_of_memory(reported) == ([(4, 2)] if fits == 3 else [(4, 2), (2, 1)])
    for one, other in zip(tight, roomy, strict=True):
        assert one.state == other.state
        for epoch, value in other.intermediate_values.items():
            close(one.intermediate_values[epoch], value, f"trial {one.number} epoch {epoch}")


def test_a_trial_that_does_not_fit_alone_fails_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(group: TrialGroup, *batch: Any) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(TrialGroup, "train_step", never)
    monkeypatch.setattr(scheduler, "ASK_AGAIN_S", 0.01)  # nobody else would take them meanwhile
    trials, reported = run(False, Starving(()))
    assert {trial.state for trial in trials} == {TrialState.FAIL}
    assert all("not even one trial fits" in trial.user_attrs["squeezer_reason"] for trial in trials)
    assert [most for _, most in out_of_memory(reported)][:3] == [2, 1, 0]


@pytest.mark.parametrize(("warns", "level"), [(True, "WARNING"), (False, "INFO")])
def test_what_the_search_worker_says_is_logged(
    warns: bool, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Direct.answers
    said = [{"said": "deadline: of no matter", "warns": warns}]

    def and_more(line: Direct, wait_s: float = 0.0) -> list[dict[str, Any]]:
        more, said[:] = list(said), []
        return [*more, *answers(line, wait_s)]

    monkeypatch.setattr(Direct, "answers", and_more)
    with caplog.at_level("INFO", logger="trials.side_task.scheduler"):
        run(False, Starving(()))
    assert [(r.levelname, r.getMessage()) for r in caplog.records if "deadline" in r.getMessage()] == [
        (level, "deadline: of no matter")
    ]


@pytest.mark.parametrize(
    ("needs_ms", "may"),
    [
        ({16: 20}, True),
        ({1: 20}, False),
        ({16: 20, 8: 12}, True),  # 5 ms for one
        ({16: 20, 8: 19}, False),  # 18.1 ms
        ({16: 20, 8: 9}, True),
        ({16: 40, 8: 12, 4: 11}, False),  # what is nearest counts: 10.3 ms, not 3.8
        ({8: 20, 16: 21}, True),  # fewer trials say nothing of more
    ],
)
def test_a_group_is_halved_while_a_line_through_what_was_needed_says_that_it_may_help(
    needs_ms: dict[int, int], may: bool
) -> None:
    fit = Fit(most=16)
    verdicts = [
        fit.may_halve(Starved(unit="a", trials=trials, needs_ns=ms * MS, longest_ns=8 * MS))
        for trials, ms in needs_ms.items()
    ]
    assert verdicts[-1] == may
