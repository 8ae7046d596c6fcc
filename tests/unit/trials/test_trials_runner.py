"""The runner: whoever is trained with whom, each trial gives the same. The clerk answers at once, the gate is open."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from optuna.trial import FrozenTrial, TrialState
from torch import nn
from torch.optim import lr_scheduler as lrs
from trials_helpers import OPTIMIZERS, AtOnce, Batch, close
from trials_solo import RichSolo, RichStudy

from trials.clerk import Clerk, ClerkPlace, _answer
from trials.cohort import SHARED_LOADER, UNLIKE_EPOCHS, Fit
from trials.feed import Pinned
from trials.gate import OpenGate, Starved
from trials.group import TrialGroup
from trials.stream_gate import GateError
from trials.ungated import rehearse
from trials.work import Runner

MS = 1_000_000
EPOCHS = 3


class Direct:
    """The line to a clerk in this process."""

    def __init__(self, clerk: Clerk) -> None:
        self._clerk = clerk
        self._answers: list[dict[str, Any]] = []

    def send(self, **request: Any) -> None:
        answer = _answer(self._clerk, request)
        self._answers += [] if answer is None else [answer]

    def answers(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        found, self._answers = self._answers, []
        return found


class Starving(OpenGate):
    """Open, but finds a unit too long when it is asked for the given times, counted from 1."""

    def __init__(self, times: Collection[int], needs_ms: Callable[[int], int] = lambda trials: 1 + trials) -> None:
        self.trials = 0
        self._times, self._needs_ms = times, needs_ms
        self._asked = 0
        self.sizes: list[int] = []

    def use(self, units: Sequence[str]) -> None:
        self.sizes.append(self.trials)

    def add_work(self, trial_samples: int) -> None: ...

    def take_starved(self) -> list[Starved]:
        self._asked += 1
        if self._asked not in self._times:
            return []
        needs_ns = self._needs_ms(self.trials) * MS
        short = Starved(unit="score", trials=self.trials, needs_ns=MS, longest_ns=MS // 2)
        return [short, Starved(unit="loss", trials=self.trials, needs_ns=needs_ns, longest_ns=3 * MS)]


class Seven(RichStudy):
    """Seven trials, four at once: number 1 diverges, number 2 is pruned. Every epoch has other batches."""

    trials, fused, epochs, rungs = 7, 4, EPOCHS, (1, 2)

    def batches(self, epoch: int) -> list[Batch]:
        return data(epoch, self.length(epoch))

    def pruner(self) -> optuna.pruners.BasePruner:
        class Second(optuna.pruners.BasePruner):
            def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
                return trial.number == 2

        return Second()


def data(seed: int, length: int) -> list[Batch]:
    stream = torch.Generator().manual_seed(seed)
    return [(torch.randn(5, 3, dtype=torch.float64, generator=stream), torch.zeros(5)) for _ in range(length)]


def make_study(own: bool, length: Callable[[int], int] = lambda epoch: 3) -> Seven:
    def model(n: int) -> nn.Module:
        layers = nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.1 * (n % 4)), nn.Linear(4, 2)
        return nn.Sequential(*layers).double()

    def optimizer(n: int, parameters: Any) -> torch.optim.Optimizer:
        made = OPTIMIZERS["adamw"](n % 5, parameters)
        if n == 1:
            made.param_groups[0]["lr"] = 1e300
        return made

    study = Seven(
        model,
        optimizer,
        data(0, 3),
        schedule=lambda n, o: [lrs.StepLR(o, 1), *([lrs.ReduceLROnPlateau(o, patience=0)] if n % 2 else [])],
        own=lambda n, epoch: data(100 * n + epoch, length(epoch)) if own else None,
    )
    study.length = length  # type: ignore[attr-defined]
    return study


def run(own: bool, gate: Starving, study: Seven | None = None) -> tuple[list[FrozenTrial], list[dict[str, Any]]]:
    """The trials in the end, and what the runner told of itself."""
    study = study or make_study(own)
    place = ClerkPlace(storage="sqlite:///:memory:", study_name="s", worker="w", lock_file=Path(os.devnull))
    clerk = Clerk(study, place, AtOnce())
    told: list[dict[str, Any]] = []
    Runner(study, gate, Direct(clerk), lambda **line: told.append(line)).run()  # type: ignore[arg-type]
    return clerk._study.get_trials(), told


def assert_as_alone(trials: Sequence[FrozenTrial], study: Seven) -> None:
    """Each trial's scores are those of an ordinary loop over its batches."""
    for trial in trials:
        solo = RichSolo(study, trial.number)
        for epoch in range(1, max(trial.intermediate_values, default=0) + 1):
            solo.epoch()
            close(trial.intermediate_values[epoch], solo.score(), f"trial {trial.number} epoch {epoch}")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[set[int], int]]:
    """Of every training step: the epochs at which its trials are, and how many they are."""
    found: list[tuple[set[int], int]] = []
    step = TrialGroup.train_step

    def noted(group: TrialGroup, *batch: Any) -> None:
        found.append((set(group.epochs_done), group.size))
        step(group, *batch)

    monkeypatch.setattr(TrialGroup, "train_step", noted)
    return found


@pytest.mark.parametrize("own", [False, True])
def test_freed_rows_are_given_to_new_trials_and_each_is_trained_as_alone(
    own: bool, trained: list[tuple[set[int], int]]
) -> None:
    trials, _ = run(own, Starving(()))
    assert len(trials) == 7
    assert_as_alone(trials, make_study(own))
    assert [(epochs, size) for epochs, size in trained[::3]] == [
        ({0}, 4),
        ({0, 1}, 4),  # 1 has diverged
        ({0, 1, 2}, 4),  # 2 is pruned
        ({0, 1, 2}, 3),  # 0 and 3 are done, and no trial is left but one
        ({1, 2}, 2),
        ({2}, 1),
    ]


@pytest.mark.parametrize("own", [False, True])
def test_trials_at_epochs_of_different_lengths_take_turns_and_each_is_trained_as_alone(
    own: bool, trained: list[tuple[set[int], int]], capsys: pytest.CaptureFixture[str]
) -> None:
    study = make_study(own, lambda epoch: 2 + epoch % 2)
    trials, _ = run(own, Starving(()), study)
    assert_as_alone(trials, study)
    assert capsys.readouterr().err.count(UNLIKE_EPOCHS) == 1
    mixed = [at for at, (epochs, _) in enumerate(trained) if len(epochs) > 1]
    assert mixed == [2, 3], "until the shorter epoch was over"


class Loader:
    """Draws the order of an epoch with its first batch, by the epoch that it was last told."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Batch]:
        yield from data(self.epoch, 3)


class LoaderWithOneIterator(Loader):
    """Its workers persist: there is one iterator, which begins anew when it is asked for."""

    class Restarted:
        left: list[Batch]

        def __iter__(self) -> "LoaderWithOneIterator.Restarted":
            return self

        def __next__(self) -> Batch:
            if not self.left:
                raise StopIteration
            return self.left.pop(0)

    def __init__(self) -> None:
        super().__init__()
        self._one = self.Restarted()

    def __iter__(self) -> Iterator[Batch]:
        self._one.left = data(self.epoch, 3)
        return self._one


def read_from(loader: Loader, study: Seven, wrap: Callable[[Any], Any] = lambda loader: loader) -> None:
    def batches(epoch: int) -> Any:
        loader.epoch = epoch
        return wrap(loader)

    study.batches = batches  # type: ignore[method-assign]


def test_an_order_that_is_drawn_with_the_first_batch_is_that_of_its_epoch(
    trained: list[tuple[set[int], int]],
) -> None:
    study = make_study(False)
    read_from(Loader(), study, iter)
    trials, _ = run(False, Starving(()), study)
    assert_as_alone(trials, make_study(False))
    assert any(len(epochs) == 3 for epochs, _ in trained)


def test_own_batches_from_some_epoch_on_feed_those_trials_alone(trained: list[tuple[set[int], int]]) -> None:
    study = make_study(True)
    own = study.own
    study.own = lambda n, epoch: own(n, epoch) if epoch else None
    trials, _ = run(True, Starving(()), study)
    assert_as_alone(trials, study)
    assert any(len(epochs) == 3 for epochs, _ in trained)


def test_what_works_on_one_batch_for_all_only_is_not_mixed(
    trained: list[tuple[set[int], int]], capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs[targets > -1].square().mean()  # how many rows are left depends on the data

    study, alone = make_study(False), make_study(False)
    study.loss = alone.loss = loss  # type: ignore[method-assign]
    trials, _ = run(False, Starving(()), study)
    assert [trial.state for trial in trials].count(TrialState.COMPLETE) == 5
    assert_as_alone(trials, alone)
    assert len([epochs for epochs, _ in trained if len(epochs) > 1]) == 1, "tried once"
    assert capsys.readouterr().err.count("are not fused, but take turns") == 1
    rehearse(study)
    assert not study.mix_epochs, "found out beforehand"
    assert "FuseError" in capsys.readouterr().err


@pytest.mark.parametrize("wrap", [lambda loader: loader, Pinned])
@pytest.mark.parametrize("is_known", [False, True])
def test_epochs_that_cannot_be_read_side_by_side_are_read_one_after_another(
    is_known: bool,
    wrap: Callable[[Any], Any],
    trained: list[tuple[set[int], int]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    study = make_study(False)
    read_from(LoaderWithOneIterator(), study, wrap)
    study.mix_epochs = not is_known
    trials, _ = run(False, Starving(()), study)
    assert_as_alone(trials, make_study(False))
    assert capsys.readouterr().err.count(SHARED_LOADER) == (not is_known)
    assert all(len(epochs) == 1 for epochs, _ in trained)
    assert all(len(list(steps)) % 3 == 0 for _, steps in groupby(trained)), "each epoch to its end"


def test_trials_that_crowd_others_out_of_the_memory_begin_anew_with_them(
    whole: tuple[bool, list[FrozenTrial], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, roomy, _ = whole
    merge = TrialGroup.merge

    def crowded(group: TrialGroup, other: TrialGroup) -> None:
        if group.size + other.size > 2:
            group._fused.rows.append(other._fused.rows)
            raise torch.OutOfMemoryError("no more")
        merge(group, other)

    monkeypatch.setattr(TrialGroup, "merge", crowded)
    tight, told = run(own, Starving(()))
    assert [(line["trials"], line["most"]) for line in told if line["event"] == "out_of_memory"] == [(4, 2)]
    for one, other in zip(tight, roomy, strict=True):
        assert one.state == other.state
        for epoch, value in other.intermediate_values.items():
            close(one.intermediate_values[epoch], value, f"trial {one.number} epoch {epoch}")


@pytest.fixture(scope="module", params=[False, True])
def whole(request: pytest.FixtureRequest) -> tuple[bool, list[FrozenTrial], list[dict[str, Any]]]:
    """Whether trials have their own batches, and a run in which nothing is split."""
    return request.param, *run(request.param, Starving(()))


def starved(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in told if line["event"] == "starved"]


@settings(
    max_examples=4,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(times=st.sets(st.integers(1, 24), min_size=1, max_size=4))
def test_trials_of_split_groups_give_the_same(
    whole: tuple[bool, list[FrozenTrial], list[dict[str, Any]]], times: set[int]
) -> None:
    own, unsplit, told_unsplit = whole
    split, told = run(own, Starving(times))
    assert [line["did"] for line in starved(told)][:1] == ["split"]
    assert told[-1] == told_unsplit[-1] and told[-1]["event"] == "finished"
    ended = {0: TrialState.COMPLETE, 1: TrialState.FAIL, 2: TrialState.PRUNED}
    for one, other in zip(split, unsplit, strict=True):
        assert one.state == other.state == ended.get(one.number, TrialState.COMPLETE)
        assert one.intermediate_values.keys() == other.intermediate_values.keys()
        for epoch, value in other.intermediate_values.items():
            close(one.intermediate_values[epoch], value, f"trial {one.number} epoch {epoch}")
        assert one.user_attrs == other.user_attrs


def test_later_cohorts_are_no_wider_than_what_fits_and_the_longest_unit_is_told() -> None:
    gate = Starving({1})
    trials, told = run(False, gate)
    assert len(trials) == 7
    assert max(gate.sizes[: gate.sizes.index(2)]) == 4 and max(gate.sizes[gate.sizes.index(2) :]) == 2
    assert starved(told) == [
        {"event": "starved", "unit": "loss", "trials": 4, "needs_ms": 5.0, "longest_bubble_ms": 3.0, "did": "split"}
    ]


def test_a_group_is_split_down_to_one_trial() -> None:
    _, told = run(False, Starving(range(1, 1000)))
    did = [(line["trials"], line["did"]) for line in starved(told)]
    assert did == [(4, "split"), (2, "split"), (2, "split"), (1, "nothing")]


def test_what_a_split_does_not_shorten_is_split_no_further_and_told_once() -> None:
    _, told = run(False, Starving(range(1, 1000), lambda trials: 9))
    assert [(line["trials"], line["did"]) for line in starved(told)] == [(4, "split"), (2, "nothing")]


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


@pytest.mark.parametrize("fits", [3, 1])
def test_trials_that_do_not_fit_into_the_memory_are_trained_in_smaller_groups_and_give_the_same(
    whole: tuple[bool, list[FrozenTrial], list[dict[str, Any]]], fits: int, monkeypatch: pytest.MonkeyPatch
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
    tight, told = run(own, Starving(()))
    said = [(line["trials"], line["most"]) for line in told if line["event"] == "out_of_memory"]
    assert said == ([(4, 2)] if fits == 3 else [(4, 2), (2, 1)])
    for one, other in zip(tight, roomy, strict=True):
        assert one.state == other.state
        for epoch, value in other.intermediate_values.items():
            close(one.intermediate_values[epoch], value, f"trial {one.number} epoch {epoch}")


def test_a_trial_that_does_not_fit_alone_fails_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(group: TrialGroup, *batch: Any) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(TrialGroup, "train_step", never)
    trials, told = run(False, Starving(()))
    assert {trial.state for trial in trials} == {TrialState.FAIL}
    assert all("does not fit" in trial.user_attrs["squeezer_reason"] for trial in trials)
    assert [line["most"] for line in told if line["event"] == "out_of_memory"][:3] == [2, 1, 0]


@pytest.mark.parametrize(
    ("needs_ms", "may"),
    [
        ({16: 20}, True),
        ({1: 20}, False),
        ({16: 20, 8: 12}, True),  # 5 ms for one
        ({16: 20, 8: 19}, False),  # 18.1 ms
        ({16: 20, 8: 9}, True),
        ({16: 40, 8: 20, 4: 19}, False),  # what is nearest counts: 18.3 ms
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
