"""Trials that the device finds lost. The host hears of it later, and then all is as if it had looked in each step."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

from ds_hooks.shared.page.file import Page, page_path
from tests.support.cuda_world import World
from tests.support.fused_and_solo import Batch, members, same_bits
from tests.support.optimizer_settings import SETTINGS
from tests.support.rich_study import RichStudy
from tests.support.slow_cases import others_slow
from tests.support.states import reloaded, states
from trials import TrialGroup
from trials.gate.base import OpenGate
from trials.optim import block
from trials.optim.facts import rule_of
from trials.optim.vector import VectorOptimizer
from trials.training import group_state
from trials.training.audits.audit import Audit

TRIALS, STEPS = 4, 12
LOST = {1: 3, 3: 7}
"""A trial -> the step that loses it."""
WITH_RULES = [name for name, make in SETTINGS.items() if rule_of(make(0, [nn.Parameter(torch.zeros(1))])) is not None]
QUICK = ["sgd with momentum", "adam, amsgrad", "adamw", "nadam", "radam", "rmsprop, centered", "adagrad"]


def model(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)).double()


def poisoned(n: int, sizes: tuple[int, ...]) -> list[Batch]:
    """A trial's batches."""
    stream = torch.Generator().manual_seed(n)
    made = [torch.randn(size, 6, generator=stream, dtype=torch.float64) for size in sizes]
    if n in LOST:
        made[LOST[n]][0, 0] = torch.inf
    return [(x, torch.zeros(len(x))) for x in made]


def study_of(
    optimizer: Any, make: Callable[[int], nn.Module] = model, sizes: tuple[int, ...] = (5,) * STEPS, **settings: Any
) -> RichStudy:
    return RichStudy(make, optimizer, own=lambda n, epoch: poisoned(n, sizes), **settings)


Act = Callable[[TrialGroup], None]


def trained(
    by_device: bool, study: RichStudy, acts: dict[int, Act] | None = None, every: int = 5, device: str = "cpu"
) -> TrialGroup:
    """Train for an epoch; the host learns every few steps at least. `acts`: what happens after which step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_state, "decides_on_device", lambda device: by_device)
        patch.setattr(group_state, "STEPS_AT_MOST", every)
        group = TrialGroup(study, members(study, range(TRIALS)), OpenGate())
        group.to(device)
        for step in range(STEPS):
            group.train_step(*_batch(group, step))
            if acts and step in acts:
                acts[step](group)
        assert (group._control.alive is not None) is by_device
        group.end_epoch()
    return group


def _batch(group: TrialGroup, step: int) -> tuple[Tensor, Tensor, bool]:
    own = [[*(group._study.trial_batches({"n": n}, n, 0) or ())][step] for n in group.numbers]
    return torch.stack([x for x, _ in own]), torch.stack([y for _, y in own]), True


def assert_same(make: Callable[[], RichStudy], acts: dict[int, Act] | None = None, every: int = 5) -> TrialGroup:
    by_host, by_device = (trained(by_device, make(), acts, every) for by_device in (False, True))
    assert by_device.finite_K().tolist() == by_host.finite_K().tolist()
    assert same_bits(by_device.losses_K(), by_host.losses_K())
    assert same_bits(states(by_device), states(by_host))
    return by_device


@pytest.fixture(autouse=True)
def vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device has no single-pass kernels."""
    monkeypatch.setattr(block, "SinglePass", type(None))


@pytest.mark.parametrize("name", others_slow(WITH_RULES, QUICK))
def test_trials_and_their_neighbours_end_in_the_same_state(name: str) -> None:
    def make() -> RichStudy:
        schedule = lambda n, o: lrs.ExponentialLR(o, 0.9 + 0.02 * n)  # noqa: E731
        return study_of(SETTINGS[name], schedule=schedule, every="step", norm=lambda n: 0.5 * (n + 1))

    assert assert_same(make).finite_K().tolist() == [True, False, True, False]


@pytest.mark.parametrize("every", [1, 2, 64])
def test_it_does_not_matter_when_the_host_learns(every: int) -> None:
    assert_same(lambda: study_of("adamw"), every=every)


class Turns(nn.Module):
    """Even batches use one layer, odd ones the other."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.even(x) if len(x) == 4 else self.odd(x)
        return y


def repack(group: TrialGroup) -> None:
    """As where hyperparameters come to agree; then read who is lost."""
    (optimizer,) = group._optimizers
    assert isinstance(optimizer, VectorOptimizer)
    optimizer._pack(optimizer._tables(), optimizer.counts())
    group.finite_K()


def test_parameters_that_were_used_as_often_as_others_when_the_host_learned_but_not_before() -> None:
    """They lie in one block by then, and have no numbers in common any more."""
    sizes = (4, 4, 4, 5, 5, 5, 5, 4, 4, 4, 5, 5)
    make = lambda: study_of("adamw", lambda n: Turns().double(), sizes)  # noqa: E731
    assert_same(make, {5: repack}, every=64)


def checkpoint(group: TrialGroup) -> None:
    assert len(states(group)) == group.size


MOVES: dict[str, Act] = {
    "keep": lambda group: group.keep([2, 1, 0]),
    "split": lambda group: group.merge(group.split([1, 0])),
    "add": lambda group: group.add(members(group._study, [4])),
    "moved": lambda group: group.to("cpu"),
    "saved and put back": lambda group: group.saved()(),
    "rebuilt": lambda group: group.rebuild("vmap"),
    "a checkpoint": checkpoint,
}


@pytest.mark.parametrize("move", MOVES)
def test_what_moves_before_the_host_has_learned(move: str) -> None:
    assert_same(lambda: study_of("adamw"), {4: MOVES[move]}, every=64)


def test_who_was_lost_before_takes_no_step() -> None:
    first = trained(True, study_of("adamw"))
    again = reloaded(first)
    before = states(again)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_state, "decides_on_device", lambda device: True)
        again = TrialGroup(again._study, [again.export(row) for row in range(TRIALS)], OpenGate())
        for step in range(3):
            again.train_step(*_batch(again, step % 2))
        after = states(again)
    assert [same_bits(one["tensors"], other["tensors"]) for one, other in zip(before, after, strict=True)] == [
        number in LOST for number in range(TRIALS)
    ]
    assert [same_bits(one["optimizers"], other["optimizers"]) for one, other in zip(before, after, strict=True)] == [
        number in LOST for number in range(TRIALS)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUICK)
def test_on_a_gpu_they_end_in_the_same_state(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = []
    for by_device in (False, True):
        group = trained(by_device, study_of(SETTINGS[name], norm=lambda n: 0.5 * (n + 1)), device="cuda")
        group.to("cpu")
        found.append(states(group))
    assert same_bits(*found)


READERS: dict[str, Callable[[TrialGroup], Any]] = {
    "finite_K": lambda group: group.finite_K().tolist(),
    "sound": lambda group: group.sound(),
    "progress": lambda group: [group.progress(row)["lost"] for row in range(TRIALS)],
    "extract": lambda group: [group.extract(row) for row in range(TRIALS)],
    "export": states,
}


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_what_the_host_knows_has_it_learn_first(reader: str) -> None:
    found: list[Any] = []
    for by_device in (False, True):
        trained(by_device, study_of("adamw"), {8: lambda group: found.append(READERS[reader](group))}, every=64)
    assert same_bits(*found)


def test_groups_that_merge_before_the_host_has_learned() -> None:
    found: list[Any] = []
    for by_device in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group_state, "decides_on_device", lambda device, by_device=by_device: by_device)
            study = study_of("adamw")
            one, other = (TrialGroup(study, members(study, numbers), OpenGate()) for numbers in ([0, 1], [2, 3]))
            for step in range(STEPS - 1):
                for group in (one, other):
                    group.train_step(*_batch(group, step))
            one.merge(other)
            one.train_step(*_batch(one, STEPS - 1))
            found.append(states(one))
    assert same_bits(*found)


class Draws(random.Random):
    """Chooses a trial that will be lost, as long as there is one."""

    def choice(self, seq: Any) -> Any:
        return next((each for each in seq if each in LOST), seq[0])


@pytest.mark.usefixtures("on_device")
def test_audits_know_which_trials_are_lost() -> None:
    study = study_of("adamw")
    study.audit = "epoch"
    audit = Audit(study)
    audit.tables = []  # so no cost counts
    audit._draws = Draws()
    group = TrialGroup(study, members(study, range(TRIALS)), OpenGate(), audit)
    for step in range(STEPS):
        group.unproven = {"training", "evaluation"}  # each step is audited
        group.train_step(*_batch(group, step))
    assert audit.done > STEPS / 2 and not audit.mismatches
    assert group.finite_K().tolist() == [number not in LOST for number in range(TRIALS)]


def scaled(n: int) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", 128.0)


@pytest.mark.usefixtures("on_device")
def test_where_a_number_of_the_hosts_depends_on_it_the_host_looks_in_each_step() -> None:
    def decides(study: RichStudy) -> bool:
        return TrialGroup(study, members(study, range(2)), OpenGate())._control.alive is not None

    assert decides(study_of("adamw"))
    assert not decides(study_of("adamw", scale=scaled))
    assert not decides(study_of(SETTINGS["asgd"]))


@pytest.mark.usefixtures("on_device")
def test_behind_the_gate_of_a_device_they_end_in_the_same_state(tmp_path: Path) -> None:
    world = World(Page.open(page_path(tmp_path / "pages", 0)))
    study, gate = study_of("adamw"), world.gate()
    world.open(1, 2**31)
    group = TrialGroup(study, members(study, range(TRIALS)), gate)
    for step in range(STEPS):
        group.train_step(*_batch(group, step))
    group.end_epoch()
    found = group.finite_K().tolist(), states(group)
    world.leave()
    alone = trained(False, study_of("adamw"))
    assert found[0] == alone.finite_K().tolist() and same_bits(found[1], states(alone))
