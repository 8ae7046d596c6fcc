"""After any sequence of leaving, joining, merging, splitting, saving and restoring, every trial equals its solo run."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as lrs

from tests.support.fused_and_solo import assert_same_trial, close, members
from tests.support.rich_study import RichSolo, RichStudy
from tests.support.states import reloaded
from trials import FuseError, TrialGroup
from trials.gate.base import OpenGate

torch.set_num_threads(1)


def model(n: int) -> nn.Module:
    # the norm keeps statistics, dropout a random stream, and both go with their trial
    # (no bias before the norm: it would cancel, and Rprop would act on the sign of rounding errors)
    first = nn.Linear(3, 4, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.1 * (n % 4)), nn.Linear(4, 2))


def make_study(optimizer: str) -> RichStudy:
    makers = {
        "sgd": lambda n, ps: torch.optim.SGD(ps, 0.01 * (n % 5), momentum=0.1 * (n % 3), nesterov=False),
        "adamw": lambda n, ps: torch.optim.AdamW(ps, 0.01, (0.9 - 0.1 * (n % 4), 0.9), 1e-3, 0.1 * (n % 2)),
        "nadam": lambda n, ps: torch.optim.NAdam(ps, 0.01, (0.9 - 0.1 * (n % 4), 0.9), 1e-3),
        "rprop": lambda n, ps: torch.optim.Rprop(ps, 0.001 * (n % 4 + 1)),
    }
    stream = torch.Generator().manual_seed(0)
    data = [(torch.randn(5, 3, dtype=torch.float64, generator=stream), torch.zeros(5)) for _ in range(2)]
    return RichStudy(
        lambda n: model(n).double(),
        makers[optimizer],
        data,
        schedule=lambda n, o: lrs.CosineAnnealingWarmRestarts(o, n % 3 + 1),
        norm=lambda n: 0.5 if n % 2 else None,
        scale=lambda n: torch.amp.GradScaler("cpu", 64.0, growth_interval=2) if n % 3 == 0 else None,
    )


def epoch(group: TrialGroup, solos: dict[int, RichSolo]) -> None:
    for batch in group.batches(0):
        group.train_step(*batch)
    group.end_epoch()
    for number in group.numbers:
        solos[number].epoch()


OPERATIONS = st.tuples(st.sampled_from(["drop", "add", "merge", "split", "save", "train"]), st.integers(0, 10**6))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "nadam", "rprop"])
@settings(
    max_examples=5,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(operations=st.lists(OPERATIONS, min_size=3, max_size=8))
def test_every_trial_equals_its_solo_run(optimizer: str, operations: list[tuple[str, int]]) -> None:
    study = make_study(optimizer)
    fresh = iter(range(3, 100))
    groups = [TrialGroup(study, members(study, range(3)), OpenGate())]
    solos = {number: RichSolo(study, number) for number in range(3)}
    epoch(groups[0], solos)
    for name, choice in operations:
        group = groups[choice % len(groups)]
        order = sorted(range(group.size), key=lambda row: (choice >> row & 7, row))
        if name == "drop" and group.size > 1:
            group.keep(order[1:])
        elif name == "add":
            numbers = [next(fresh) for _ in range(choice % 2 + 1)]
            group.add(members(study, numbers))
            solos.update({number: RichSolo(study, number) for number in numbers})
        elif name == "merge" and len(groups) > 1:
            groups.remove(group)
            groups[0].merge(group)
            assert group.size == 0
        elif name == "split" and group.size > 1:
            groups.append(group.split(order[: group.size // 2]))
        elif name == "save":
            groups[groups.index(group)] = reloaded(group)
        elif name == "train":
            epoch(group, solos)
    for group in groups:
        epoch(group, solos)
        assert group.epochs_done == [solos[number].epochs for number in group.numbers]
        for row, number in enumerate(group.numbers):
            solo = solos[number]
            assert_same_trial(group, row, solo)
            assert group.progress(row)["scaler"] == (solo.scaler.state_dict() or None)
            assert torch.equal(group.progress(row)["rng_state"], solo.rng_state)
        close(group.evaluate(), [solos[number].score() for number in group.numbers], "score")


def test_groups_that_cannot_be_merged() -> None:
    study, other = make_study("sgd"), make_study("rprop")
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    with pytest.raises(FuseError, match="trial 7 cannot join trial 0: optimizer: type is"):
        group.merge(TrialGroup(other, members(other, [7]), OpenGate()))
    with pytest.raises(ValueError, match=r"rows \[2\] cannot be split off; allowed: different ones of 0\.\.1"):
        group.split([2])
    with pytest.raises(ValueError, match="at least one"):
        group.split([])
    assert group.size == 2


def test_checkpoint_with_other_schedulers() -> None:
    study = make_study("sgd")
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    plain = make_study("sgd")
    plain.schedule = None
    with pytest.raises(FuseError, match=r"of trial 0 with 1 schedulers; Study\.scheduler gives 0"):
        reloaded(group, plain)


def moved(device: str) -> None:
    study = make_study("adamw")
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos = {number: RichSolo(study, number) for number in range(3)}
    epoch(group, solos)
    group.to(device)
    group.add(members(study, [4]))
    assert {t.device.type for t in group.extract(3)[0].values()} == {device}
    for batch in group.batches(0):
        group.train_step(*batch)
    group.end_epoch()
    group.to("cpu")
    solos[0].epoch()  # the only one without dropout, whose stream cannot follow to another kind of device
    assert_same_trial(group, 0, solos[0])


def test_moves() -> None:
    moved("cpu")


@pytest.mark.gpu
def test_moves_to_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    moved("cuda")
