"""Several optimizers in a trial: a pair of networks that are trained in turns, fused and alone."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler as lrs

from tests.support.fused_and_solo import Batch, RecordingGate, ToyStudy, close, members
from tests.support.slow_cases import others_slow
from tests.support.states import reloaded
from tests.support.toy_models import dcgan_discriminator, dcgan_generator
from trials import FuseError, TrialGroup, build_member
from trials.gate.base import OpenGate
from trials.optim.several import by_phase

NOISE, PIXELS = 6, 16 * 16


class Pair(nn.Module):
    """DCGAN's two; a batch is noise and real images side by side."""

    def __init__(self, traced: bool = True) -> None:
        super().__init__()
        self.maker, self.judge, self.traced = dcgan_generator(), dcgan_discriminator(), traced

    def made(self, x: Tensor) -> Tensor:
        if not self.traced and len(x) < 2:
            return x.new_zeros(1, 1, 16, 16)
        return self.maker(x[:, :NOISE].reshape(-1, NOISE, 1, 1))

    def judging(self, x: Tensor) -> Tensor:
        real = x[:, NOISE:].reshape(-1, 1, 16, 16)
        return functional.softplus(self.judge(self.made(x).detach())) + functional.softplus(-self.judge(real))

    def making(self, x: Tensor) -> Tensor:
        return functional.softplus(-self.judge(self.made(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(self.made(x))


class Adversaries(ToyStudy):
    """Each network has its optimizer and its schedule, and they differ between trials."""

    scheduler_every = "step"

    def __init__(self, traced: bool = True, clip: float | None = None, poison: int = -1) -> None:
        super().__init__(lambda n: Pair(traced).double())
        self.clip, self.poison = clip, poison
        stream = torch.Generator().manual_seed(4)
        self.data = [(torch.randn(4, NOISE + PIXELS, generator=stream).double(), torch.zeros(4)) for _ in range(3)]

    def optimizer(self, params: dict[str, Any], model: Any) -> dict[str, torch.optim.Optimizer]:
        n = params["n"]
        return {
            "judging": torch.optim.Adam(model.judge.parameters(), 0.002 * (n + 1), (0.5 + 0.1 * n, 0.9), 1e-3),
            "making": torch.optim.SGD(model.maker.parameters(), 0.01 * (n + 1), momentum=0.3 * n),
        }

    def scheduler(self, params: dict[str, Any], optimizer: Any) -> Any:
        return [lrs.ExponentialLR(optimizer["judging"], 0.9), lrs.StepLR(optimizer["making"], 2, 0.5)]

    def clip_norm(self, params: dict[str, Any]) -> float | None:
        return self.clip

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.mean()

    def trial_batches(self, params: dict[str, Any], number: int, epoch: int) -> list[Batch] | None:
        if self.poison < 0:
            return None
        bad = (torch.full_like(self.data[1][0], torch.nan), self.data[1][1])
        return [self.data[0], bad if number == self.poison else self.data[1], self.data[2]]


class Alone:
    """One trial by ordinary PyTorch."""

    def __init__(self, study: Adversaries, number: int) -> None:
        member = build_member(study, number, {"n": number})
        self.study, self.model, self.schedulers = study, member.model, member.schedulers
        self.optimizers: Mapping[str, torch.optim.Optimizer] = by_phase(member.optimizer)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.model.train()
        for phase, optimizer in self.optimizers.items():
            self.model.zero_grad()
            self.study.loss(getattr(self.model, phase)(x), y).backward()
            if self.study.clip is not None:
                own = [p for group in optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(own, self.study.clip)
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()


def assert_same(group: TrialGroup, row: int, alone: Alone) -> None:
    model, optimizers = group.extract(row)
    for name, value in alone.model.state_dict().items():
        close(model[name], value, f"row {row} {name}")
    assert list(optimizers) == ["judging", "making"]
    for phase, optimizer in alone.optimizers.items():
        expected = optimizer.state_dict()
        for own, group_alone in zip(optimizers[phase]["param_groups"], expected["param_groups"], strict=True):
            assert own == group_alone
        assert optimizers[phase]["state"].keys() == expected["state"].keys()
        for index, state in expected["state"].items():
            for kind, value in state.items():
                close(optimizers[phase]["state"][index][kind], value, f"row {row} {phase} {index} {kind}")


@pytest.mark.parametrize(
    ("traced", "clip"), others_slow(product([True, False], [None, 0.05]), [(True, 0.05), (False, None)])
)
def test_adversaries_in_turns(traced: bool, clip: float | None) -> None:
    study = Adversaries(traced, clip)
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos = [Alone(study, number) for number in range(3)]
    for step in range(6):
        group.train_step(*study.data[step % 3])
        for solo in solos:
            solo.step(*study.data[step % 3])
    for row, solo in enumerate(solos):
        assert_same(group, row, solo)
        solo.model.eval()
    found = group.evaluate()
    close(found, [sum(solo.model(x).mean().item() for x, _ in study.data) / 3 for solo in solos], "score")
    ways = dict(group.ways())
    assert ("Pair.making as a whole" in ways) is not traced


def test_their_state_travels() -> None:
    study = Adversaries()
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos = {number: Alone(study, number) for number in range(5)}

    def train(each: TrialGroup, step: int) -> None:
        each.train_step(*study.data[step])
        for number in each.numbers:
            solos[number].step(*study.data[step])

    train(group, 0)
    group.keep([2, 0])
    group.add(members(study, [3]))
    train(group, 1)
    other = group.split([1])
    other.merge(TrialGroup(study, members(study, [4]), OpenGate()))
    again = reloaded(group)
    again.to("cpu")
    for each in (again, other):
        train(each, 2)
        train(each, 0)
        for row, number in enumerate(each.numbers):
            assert_same(each, row, solos[number])
    again.set_lr(0, 0.5)
    assert [own["param_groups"][0]["lr"] for own in again.extract(0)[1].values()] == [0.5, 0.5]


class LateViewing(torch.optim.SGD):
    """Keeps a view of a parameter, from its first step on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        p = self.param_groups[0]["params"][0]
        self.state[p]["flat"] = p.detach().view(-1)


class Reluctant(Adversaries):
    def optimizer(self, params: dict[str, Any], model: Any) -> dict[str, torch.optim.Optimizer]:
        return {**super().optimizer(params, model), "making": LateViewing(model.maker.parameters(), 0.01)}


@pytest.mark.parametrize(
    "move",
    [
        lambda group, others: group.keep([1]),
        lambda group, others: group.split([1]),
        lambda group, others: group.add(members(group._study, [3])),
        lambda group, others: group.merge(others),
        lambda group, others: others.merge(group),
    ],
    ids=["keep", "split", "add", "merge", "merge into another"],
)
def test_trials_that_may_not_move_train_on_where_they_are(move: Any) -> None:
    """One of their optimizers refuses, and the other has not begun to."""
    study = Reluctant()
    group, others, unmoved = (TrialGroup(study, members(study, range(3)), OpenGate()) for _ in range(3))
    for each in (group, unmoved):
        each.train_step(*study.data[0])
    with pytest.raises(FuseError, match="LateViewing keeps a view of a parameter"):
        move(group, others)
    for each in (group, unmoved):
        each.train_step(*study.data[1])
    others.train_step(*study.data[1])
    assert others.size == group.size == 3
    for row in range(3):
        for name, value in unmoved.extract(row)[0].items():
            assert torch.equal(group.extract(row)[0][name], value), name


@pytest.mark.usefixtures("noticed")
def test_a_lost_pair_is_frozen_and_harms_none() -> None:
    def trained(poison: int) -> Iterator[tuple[list[dict[str, Tensor]], TrialGroup]]:
        study = Adversaries(poison=poison)
        group = TrialGroup(study, members(study, range(3)), OpenGate())
        for batch in group.batches(0):
            group.train_step(*batch)
            yield [group.extract(row)[0] for row in range(3)], group

    (first, _), _, (last, group) = trained(1)
    *_, (whole, _) = trained(5)
    assert group.finite_K().tolist() == [True, False, True]
    assert all(torch.equal(first[1][name], value) for name, value in last[1].items())
    for row in (0, 2):
        assert all(torch.equal(whole[row][name], value) for name, value in last[row].items())


def test_units_of_each_phase() -> None:
    study = Adversaries()
    gate = RecordingGate()
    group = TrialGroup(study, members(study, range(2)), gate)
    for _ in range(2):
        gate.entered.clear()
        group.train_step(*study.data[0])
    steps = [name for name in gate.units if "loss" in name or "optimizer" in name]
    assert steps == [
        f"{phase} {step}" for phase in ("judging", "making") for step in ("loss", "loss backward", "optimizer step")
    ]
    assert {f"maker.{at}.{kind} backward" for at, kind in ((0, "ConvTranspose2d"), (7, "Tanh"))} <= set(gate.entered)


def test_what_cannot_be() -> None:
    study = Adversaries()

    def other(made: Any) -> Adversaries:
        found = Adversaries()
        found.scheduler = lambda params, optimizer: None  # type: ignore[method-assign]
        found.optimizer = lambda params, model: made(model)  # type: ignore[method-assign]
        return found

    whole = other(lambda model: torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(FuseError, match=r"model: phases is \('forward',\), there \('judging', 'making'\)"):
        TrialGroup(study, [*members(study, [0]), *members(whole, [1])], OpenGate())
    with pytest.raises(FuseError, match=r"one for 'guess', which Pair lacks; allowed: names of methods of the model"):
        members(other(lambda model: {"guess": torch.optim.SGD(model.parameters())}), [0])
    with pytest.raises(FuseError, match=r"Study\.optimizer returned no optimizers; allowed: one, or a dictionary"):
        members(other(lambda model: {}), [0])
    with pytest.raises(FuseError, match=r"type list; allowed: a torch\.optim\.Optimizer"):
        TrialGroup(study, members(other(lambda model: []), [0]), OpenGate())
    with pytest.raises(FuseError, match=r"trial 0 has optimizers for \['forward'\]; Study.optimizer now .* \['jud"):
        reloaded(TrialGroup(whole, members(whole, [0]), OpenGate()), study)
