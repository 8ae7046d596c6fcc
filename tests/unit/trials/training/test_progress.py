"""Schedulers, clipping, loss scaling, lost trials and own batches: each trial has what it would have alone."""

import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

from tests.support.fused_and_solo import Batch, RecordingGate, assert_same_trial, close, members, same_bits
from tests.support.rich_study import RichSolo, RichStudy, Schedule
from tests.support.slow_cases import others_slow
from tests.support.states import reloaded
from trials import FuseError, TrialGroup
from trials.gate.base import OpenGate

warnings.filterwarnings("error", message=".*lr_scheduler.*", category=UserWarning)


def model(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.1 * n), nn.Linear(5, 3)).double()


def batches(seed: int = 0, count: int = 3, size: int = 6) -> list[Batch]:
    stream = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 4, dtype=torch.float64, generator=stream), torch.zeros(size)) for _ in range(count)]


def momentum(n: int, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01 * (n + 1), momentum=0.9 - 0.1 * n)


def run(group: TrialGroup, solos: list[RichSolo], epochs: int) -> None:
    start = group.epochs_done[0]
    for epoch in range(start, start + epochs):
        for batch in group.batches(epoch):
            group.train_step(*batch)
        group.end_epoch()
        for solo in solos:
            solo.epoch()


def assert_same(group: TrialGroup, solos: list[RichSolo]) -> None:
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)
        assert group.progress(row)["scaler"] == (solo.scaler.state_dict() or None)
        for saved, scheduler in zip(group.progress(row)["schedulers"], solo.schedulers, strict=True):
            assert saved["_last_lr"] == scheduler.get_last_lr()


EVERY = ["epoch", "step"]
SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": lambda n, o: lrs.LambdaLR(o, lambda epoch: (0.9 - 0.1 * n) ** epoch),
    "MultiplicativeLR": lambda n, o: lrs.MultiplicativeLR(o, lambda epoch: 0.9 - 0.1 * n),
    "StepLR": lambda n, o: lrs.StepLR(o, n + 1, 0.5),
    "MultiStepLR": lambda n, o: lrs.MultiStepLR(o, [1, n + 2], 0.3),
    "ConstantLR": lambda n, o: lrs.ConstantLR(o, 0.1 * (n + 1), 2),
    "LinearLR": lambda n, o: lrs.LinearLR(o, 0.1 * (n + 1), total_iters=3),
    "ExponentialLR": lambda n, o: lrs.ExponentialLR(o, 0.9 - 0.1 * n),
    "PolynomialLR": lambda n, o: lrs.PolynomialLR(o, 5, 1.0 + n),
    "CosineAnnealingLR": lambda n, o: lrs.CosineAnnealingLR(o, n + 2, 0.001 * n),
    "CosineAnnealingWarmRestarts": lambda n, o: lrs.CosineAnnealingWarmRestarts(o, n + 1, 2),
    "CyclicLR": lambda n, o: lrs.CyclicLR(o, 0.001, 0.01 * (n + 1), n + 1, mode="triangular2"),
    "OneCycleLR": lambda n, o: lrs.OneCycleLR(o, 0.05 * (n + 1), 30, pct_start=0.1 + 0.1 * n),
    "SequentialLR": lambda n, o: lrs.SequentialLR(
        o, [lrs.ConstantLR(o, 0.1 * (n + 1), 2), lrs.ExponentialLR(o, 0.8)], [n + 1]
    ),
    "ChainedScheduler": lambda n, o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.1, n + 1), lrs.ExponentialLR(o, 0.8)]),
    "ReduceLROnPlateau": lambda n, o: lrs.ReduceLROnPlateau(o, "max", 0.5, patience=n, threshold=0.1),
    "SWALR": lambda n, o: torch.optim.swa_utils.SWALR(o, 0.001 * (n + 1), n + 2),
    "of different kinds": lambda n, o: lrs.StepLR(o, 1, 0.5) if n % 2 == 0 else lrs.ReduceLROnPlateau(o, patience=0),
    "two of them": lambda n, o: [lrs.StepLR(o, n + 1, 0.5), lrs.ReduceLROnPlateau(o, "min", 0.5, patience=0)],
}


def test_every_scheduler_is_tested() -> None:
    known = {name for name in lrs.__all__ if name not in ("LRScheduler",)}
    assert known <= SCHEDULES.keys()


@pytest.mark.parametrize(("name", "every"), others_slow(product(SCHEDULES, EVERY), [*zip(SCHEDULES, cycle(EVERY))]))
def test_schedulers(name: str, every: str) -> None:
    study = RichStudy(model, momentum, batches(), SCHEDULES[name], every)
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos = [RichSolo(study, number) for number in range(3)]
    run(group, solos, 3)
    assert_same(group, solos)
    # their state travels: with rows that are taken out, and through a checkpoint
    group.keep([2, 1])
    group = reloaded(group)
    run(group, [solos[2], solos[1]], 3)
    assert_same(group, [solos[2], solos[1]])


PLACES = count()


def chained(optimizer: Any) -> Any:
    stream = random.Random(0)
    return lrs.ChainedScheduler([lrs.StepLR(optimizer, 2), lrs.LambdaLR(optimizer, lambda epoch: stream.random())])


@pytest.mark.parametrize(
    ("schedule", "kept"),
    [
        (lambda n, o: lrs.LambdaLR(o, lambda epoch, places=PLACES: 0.9 ** next(places)), "count"),
        (lambda n, o: lrs.LambdaLR(o, lambda epoch: 0.9 ** next(PLACES)), "count in 'PLACES'"),
        (
            lambda n, o: lrs.MultiplicativeLR(o, partial(lambda places, epoch: next(places), iter([0.5] * 99))),
            "list_it",
        ),
        (lambda _, o: chained(o), "Random in 'stream'"),
    ],
    ids=["default", "global", "partial", "chained"],
)
def test_a_schedule_whose_place_no_checkpoint_holds_is_refused(schedule: Schedule, kept: str) -> None:
    study = RichStudy(model, momentum, batches(), schedule)
    with pytest.raises(FuseError, match=rf"Study.scheduler keeps a {kept}.*; allowed: a function of the epoch alone"):
        members(study, [0])


def _counting(n: int, o: torch.optim.Optimizer) -> Any:
    calls = 0

    def factor(epoch: int) -> float:
        nonlocal calls
        calls += 1
        return 0.9**calls

    return lrs.LambdaLR(o, factor)


def _collecting(seen: list[int], epoch: int) -> float:
    seen.append(epoch)
    return 0.9 ** len(seen)


@pytest.mark.parametrize(
    "schedule",
    [
        _counting,
        lambda n, o: lrs.MultiplicativeLR(o, partial(_collecting, [])),
        lambda n, o: lrs.ChainedScheduler([lrs.ExponentialLR(o, 0.9), _counting(n, o)], o),
        lambda n, o: lrs.LambdaLR(o, (lambda seen: lambda epoch: _collecting(seen, epoch))([])),
    ],
)
def test_a_function_that_counts_its_calls_is_refused(schedule: Schedule) -> None:
    study = RichStudy(model, momentum, batches(), schedule, "step")
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    with pytest.raises(FuseError, match="changes what it keeps from call to call, which no checkpoint holds"):
        group.train_step(*batches()[0])


def test_beta_is_scheduled_too() -> None:
    study = RichStudy(
        model,
        lambda n, ps: torch.optim.AdamW(ps, 0.01, (0.9, 0.99), 1e-3),
        batches(),
        lambda n, o: lrs.OneCycleLR(o, 0.02 * (n + 1), 9, base_momentum=0.5 + 0.1 * n),
        "step",
    )
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos = [RichSolo(study, number) for number in range(3)]
    run(group, solos, 2)
    assert_same(group, solos)


def test_no_scheduler() -> None:
    study = RichStudy(model, schedule=lambda n, o: [print])
    with pytest.raises(FuseError, match=r"Study\.scheduler returned builtin_function_or_method; allowed: torch sched"):
        members(study, range(1))


@pytest.mark.parametrize("limits", ["norm", "value", "both"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rprop"])
def test_clipping(optimizer: str, limits: str) -> None:
    made = (lambda n, ps: torch.optim.Rprop(ps, 0.01)) if optimizer == "rprop" else optimizer
    study = RichStudy(
        model,
        made,
        batches(),
        norm=lambda n: (0.05, None, 0.5)[n] if limits != "value" else None,
        value=lambda n: (None, 0.01, 0.1)[n] if limits != "norm" else None,
    )
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos = [RichSolo(study, number) for number in range(3)]
    run(group, solos, 2)
    assert_same(group, solos)


def test_norm_counts_parameters_that_are_not_trained() -> None:
    study = RichStudy(model, lambda n, ps: torch.optim.SGD([*ps][2:], 0.1), batches(), norm=lambda n: 0.1 * (n + 1))
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    solos = [RichSolo(study, number) for number in range(2)]
    run(group, solos, 2)
    assert_same(group, solos)


def test_limits_must_be_positive() -> None:
    study = RichStudy(model, norm=lambda n: 0.0)
    with pytest.raises(FuseError, match=r"Study\.clip_norm returned 0\.0; allowed: a positive number or None"):
        TrialGroup(study, members(study, range(2)), OpenGate())


def overflowing(n: int) -> torch.amp.GradScaler | None:
    """Trial 0 has none, trial 1 overflows float32 at first, trial 2 grows soon."""
    if n == 0:
        return None
    return torch.amp.GradScaler("cpu", (1.0, 3e38, 1000.0)[n], 3.0 if n == 2 else 2.0, 0.03, (1, 100, 2)[n])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rprop"])
@pytest.mark.parametrize("norm", [None, 0.05])
def test_loss_scaling(optimizer: str, norm: float | None) -> None:
    made = (lambda n, ps: torch.optim.Rprop(ps, 0.01)) if optimizer == "rprop" else optimizer
    data = [(300 * x.float(), y) for x, y in batches()]
    study = RichStudy(lambda n: model(n).float(), made, data, norm=lambda n: norm, scale=overflowing)
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos = [RichSolo(study, number) for number in range(3)]
    run(group, solos, 2)
    for row, solo in enumerate(solos):
        assert group.progress(row)["scaler"] == (solo.scaler.state_dict() or None)
        for key, value in solo.model.state_dict().items():
            torch.testing.assert_close(group.extract(row)[0][key], value, rtol=1e-4, atol=1e-6)
        alone = solo.optimizer.state_dict()["state"]
        assert {i: s.get("step") for i, s in group.extract(row)[1]["state"].items()} == {
            i: s.get("step") for i, s in alone.items()
        }
    assert solos[1].scaler.get_scale() < 1e37  # it did overflow


def test_scaled_exactly_in_float64() -> None:
    scale: Callable[[int], Any] = lambda n: torch.amp.GradScaler("cpu", 1024.0 * (n + 1), growth_interval=2)  # noqa: E731
    study = RichStudy(model, "adamw", batches(), norm=lambda n: 0.1, value=lambda n: 0.05, scale=scale)
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    solos = [RichSolo(study, number) for number in (0, 1)]
    run(group, solos, 3)
    assert_same(group, solos)


def test_gradients_are_a_unit_of_their_own() -> None:
    gate = RecordingGate()
    study = RichStudy(model, batches=batches(), norm=lambda n: 1.0 if n == 7 else None)
    group = TrialGroup(study, members(study, range(2)), gate)
    group.train_step(*study.data[0])
    assert "gradients" not in gate.entered
    group.add(members(study, [7]))
    group.train_step(*study.data[0])
    assert gate.units[-2:] == ["gradients", "optimizer step"]


@pytest.mark.parametrize(
    ("settings", "dtype"),
    others_slow(
        product(["plain", "clipped", "scaled"], [torch.float32, torch.float64]),
        [("plain", torch.float64), ("clipped", torch.float32), ("scaled", torch.float32)],
    ),
)
@pytest.mark.usefixtures("noticed")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rprop"])
def test_a_lost_trial_is_frozen_and_harms_none(optimizer: str, settings: str, dtype: torch.dtype) -> None:
    def make(poison: bool) -> tuple[TrialGroup, RichStudy]:
        data = [(x.to(dtype), y) for x, y in batches()]
        own: list[list[Batch]] = [list(data) for _ in range(3)]
        if poison:
            own[1][1] = (torch.full_like(data[1][0], torch.inf), data[1][1])
        study = RichStudy(
            lambda n: model(0).to(dtype),
            (lambda n, ps: torch.optim.Rprop(ps, 0.01)) if optimizer == "rprop" else optimizer,
            data,
            schedule=lambda n, o: lrs.ExponentialLR(o, 0.9),
            norm=lambda n: 0.1 if settings == "clipped" else None,
            scale=lambda n: torch.amp.GradScaler("cpu", 128.0) if settings == "scaled" else None,
            own=lambda n, epoch: own[n],
        )
        return TrialGroup(study, members(study, range(3)), OpenGate()), study

    (lost, _), (whole, _) = make(True), make(False)
    states = []
    for group in (lost, whole):
        for epoch in range(2):
            for step, batch in enumerate(group.batches(epoch)):
                group.train_step(*batch)
                if group is lost and not epoch and step < 2:
                    states.append(group.extract(1))
            group.end_epoch()
    assert lost.finite_K().tolist() == [True, False, True]
    assert whole.finite_K().all()
    for row in (0, 2):
        assert torch.equal(lost.losses_K()[row], whole.losses_K()[row])
        (mine, own), (theirs, other) = lost.extract(row), whole.extract(row)
        assert all(same_bits(mine[key], theirs[key]) for key in mine)
        for index, state in own["state"].items():
            assert all(same_bits(value, other["state"][index][kind]) for kind, value in state.items())
    # after the step that lost it, and ever since, it is as before that step
    for weights, optimizer_state in (states[1], lost.extract(1)):
        assert all(same_bits(weights[key], value) for key, value in states[0][0].items())
        for index, state in states[0][1]["state"].items():
            assert all(same_bits(value, optimizer_state["state"][index][kind]) for kind, value in state.items())


class Statistics(nn.Module):
    """Buffers of every sort: a norm's statistics, a counter, and one that is replaced in a forward without a graph."""

    def __init__(self, traced: bool, kind: str) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 4), getattr(nn, kind)(4, track_running_stats=True)
        self.mean: Tensor
        self.seen: Tensor
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.traced = traced

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = self.norm(y if y.ndim == 2 else y.transpose(1, 2))
        if not self.traced and self.training and len(x) > 1:
            self.seen += 1
            self.mean = 0.9 * self.mean + 0.1 * y.detach().flatten(1)[:, :4].mean(0)
        return y.tanh()


@pytest.mark.parametrize(
    ("value", "optimizer"),
    others_slow(product([torch.inf, torch.nan], ["sgd", "adamw"]), [(torch.inf, "sgd"), (torch.nan, "adamw")]),
)
@pytest.mark.usefixtures("noticed")
@pytest.mark.parametrize(("traced", "kind"), [(True, "BatchNorm1d"), (False, "BatchNorm1d"), (True, "InstanceNorm1d")])
def test_buffers_of_a_lost_trial_stay_too(traced: bool, kind: str, value: float, optimizer: str) -> None:
    shape = (5, 6) if kind == "BatchNorm1d" else (5, 3, 6)
    stream = torch.Generator().manual_seed(0)
    data = [(torch.randn(shape, generator=stream), torch.zeros(5)) for _ in range(4)]

    def trained(poisoned: bool) -> tuple[TrialGroup, dict[str, Tensor]]:
        own = [list(data) for _ in range(3)]
        if poisoned:
            own[1][2] = (torch.full(shape, value), torch.zeros(5))
        study = RichStudy(lambda n: Statistics(traced, kind), optimizer, data, own=lambda n, epoch: own[n])
        group = TrialGroup(study, members(study, range(3)), OpenGate())
        before: dict[str, Tensor] = {}
        for step, batch in enumerate(group.batches(0)):
            before = group.extract(1)[0] if step == 2 else before
            group.train_step(*batch)
        return group, before

    lost, before = trained(True)
    whole, _ = trained(False)
    assert lost.finite_K().tolist() == [True, False, True]
    assert all(same_bits(before[name], tensor) for name, tensor in lost.extract(1)[0].items())
    for row in (0, 2):
        mine, theirs = lost.extract(row)[0], whole.extract(row)[0]
        assert all(same_bits(mine[name], theirs[name]) for name in theirs)
        assert not same_bits(mine["norm.running_mean"], before["norm.running_mean"])


def test_own_batches() -> None:
    def own(n: int, epoch: int) -> Iterator[Batch]:
        yield from batches(seed=100 * n + epoch)

    study = RichStudy(model, "adamw", batches(), own=own)
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos = [RichSolo(study, number) for number in range(3)]
    run(group, solos, 2)
    assert_same(group, solos)
    close(group.losses_K(), torch.tensor([solo.loss for solo in solos], dtype=torch.float64), "loss")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (lambda n, epoch: batches(count=n + 1), "more batches than others"),
        (lambda n, epoch: batches(size=n + 1), "batches that differ in their tensors' shapes"),
        (lambda n, epoch: batches() if n == 0 else None, "more batches than others"),
    ],
)
def test_own_batches_that_do_not_fit(own: Any, message: str) -> None:
    study = RichStudy(model, own=own)
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    with pytest.raises(FuseError, match=rf"Study\.trial_batches gave .*{message}"):
        list(group.batches(0))


def test_autocast() -> None:
    data = [(x.float(), y) for x, y in batches()]
    study = RichStudy(lambda n: model(0).float(), "adamw", data)
    study.autocast = torch.bfloat16
    kinds = []
    study.loss = lambda outputs, targets: kinds.append(outputs.dtype) or outputs.float().square().mean()  # type: ignore[method-assign]
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    group.train_step(*data[0])
    assert set(kinds) == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        alone = RichSolo(study, 1)
        alone.step(*data[0])
    torch.testing.assert_close(group.losses_K()[1].item(), alone.loss, rtol=2e-2, atol=1e-3)
