"""A trial group: row operations, checkpoints, isolation, and the units that the gate is asked for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import (
    RecordingGate,
    Solo,
    ToyStudy,
    assert_same_trial,
    close,
    members,
    only_optimizer,
    same_bits,
)
from tests.support.states import reloaded, states
from trials import FuseError, TrialGroup, build_member
from trials.gate.base import OpenGate, StopRequested


class Net(nn.Module):
    """A bit of everything that has state: weights, statistics, random masks, a residual, a layer used twice."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.conv2 = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3, momentum=None)
        self.pool = nn.AvgPool2d(2)
        self.drop = nn.Dropout(0.1 * n)
        self.fc = nn.Linear(12, 12)
        self.out = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        x = x + self.norm(self.conv2(x))
        x = self.drop(self.pool(x).flatten(1))
        x = self.fc(torch.tanh(self.fc(x)))
        return self.out(x)


class Classes(ToyStudy):
    """Classification with cross entropy, in float64."""

    def __init__(self, optimizer: Any = "adam", dtype: torch.dtype = torch.float64) -> None:
        stream = torch.Generator().manual_seed(0)
        data = [
            (torch.randn(size, 1, 4, 4, dtype=dtype, generator=stream), torch.randint(4, (size,), generator=stream))
            for size in (8, 8, 5)
        ]
        super().__init__(lambda n: Net(n).to(dtype), optimizer, data)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(-1) == targets).double().mean()


UNITS = [
    *("conv.Conv2d forward", "conv2.Conv2d forward", "norm.BatchNorm2d forward", "pool.AvgPool2d forward"),
    *("drop.Dropout forward", "fc.Linear forward", "fc.Linear forward#2", "out.Linear forward", "loss"),
    "loss backward",
    *("out.Linear backward", "fc.Linear backward#2", "fc.Linear backward", "drop.Dropout backward"),
    *("pool.AvgPool2d backward", "norm.BatchNorm2d backward", "conv2.Conv2d backward", "conv.Conv2d backward"),
    "optimizer step",
]


def train(group: TrialGroup, study: ToyStudy, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        group.train_step(*study.data[step % len(study.data)])


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_network_equals_solo(optimizer: str) -> None:
    study = Classes(optimizer)
    group = TrialGroup(study, members(study, range(4)), OpenGate())
    solos = [Solo(study, number) for number in range(4)]
    train(group, study, 5)
    for step in range(5):
        for solo in solos:
            solo.step(*study.data[step % 3])
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)
    close(group.evaluate(), [solo.score() for solo in solos], "score")


def test_gate_is_asked_for_every_unit_in_order() -> None:
    study, gate = Classes(), RecordingGate()
    group = TrialGroup(study, members(study, range(2)), gate)
    assert gate.names == [*UNITS, "score"]
    for _ in range(2):
        gate.entered.clear()
        group.train_step(*study.data[0])
        assert gate.units == UNITS
    gate.entered.clear()
    group.evaluate()
    assert gate.entered == [*[*UNITS[:8], "score", "host"] * 3, "rest"]


def test_backward_of_branches_is_the_forward_reversed() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b, self.c, self.out = (nn.Linear(3, 3) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            left = self.a(x)
            right = self.c(self.b(x).relu())
            return self.out(torch.cat([left, right], -1)[..., :3] + x)

    study, gate = ToyStudy(lambda n: Branches()), RecordingGate()
    group = TrialGroup(study, members(study, range(2)), gate)
    group.train_step(torch.randn(4, 3), torch.zeros(4))
    layers = [f"{name}.Linear" for name in ("stem", "a", "b", "c", "out")]
    forward, backward = [f"{name} forward" for name in layers], [f"{name} backward" for name in reversed(layers)]
    assert gate.units == [*forward, "loss", "loss backward", *backward, "optimizer step"]


def test_gate_is_told_its_units_after_each_change() -> None:
    study, gate = Classes(), RecordingGate()
    group = TrialGroup(study, members(study, range(2)), gate)
    for change in (
        lambda: group.keep([1]),
        lambda: group.add(members(study, [5])),
        group.use_units,
        lambda: group.add([group.export(0)]),
    ):
        gate.names = []
        change()
        assert gate.names == [*UNITS, "score"]


def test_pauses_change_no_bit() -> None:
    class Disturbing(RecordingGate):
        """Does in each pause what a process may do meanwhile."""

        def enter(self, unit: int) -> None:
            super().enter(unit)
            torch.rand(3)
            torch.empty(1000).fill_(float("nan"))

    study = Classes()
    plain = TrialGroup(study, members(study, range(3)), OpenGate())
    paused = TrialGroup(study, members(study, range(3)), Disturbing())
    for group in (plain, paused):
        train(group, study, 4)
    assert same_bits(states(plain), states(paused))
    assert same_bits(plain.evaluate(), paused.evaluate())


@pytest.mark.parametrize("unit", ["conv2.Conv2d forward", "loss", "fc.Linear backward", "optimizer step", "score"])
def test_stop_goes_through(unit: str) -> None:
    class Stopping(RecordingGate):
        def enter(self, number: int) -> None:
            super().enter(number)
            if self.entered[-1] == unit:
                raise StopRequested

    study = Classes()
    gate = Stopping()
    group = TrialGroup(study, members(study, range(2)), gate)
    with pytest.raises(StopRequested):
        train(group, study, 1)
        group.evaluate()
    assert gate.entered[-1] == unit


def test_trials_leave_and_join() -> None:
    study = Classes()
    group = TrialGroup(study, members(study, range(4)), OpenGate())
    group.epochs_done[:] = [1, 2, 3, 4]
    train(group, study, 2)
    group.keep([3, 1])
    assert (group.numbers, group.epochs_done, group.size) == ([3, 1], [4, 2], 2)
    train(group, study, 1, start=2)
    group.add(members(study, [6, 2]))
    assert (group.numbers, group.epochs_done) == ([3, 1, 6, 2], [4, 2, 0, 0])
    assert group.losses_K()[2:].isnan().all()
    train(group, study, 3)
    for row, (number, early) in enumerate([(3, 3), (1, 3), (6, 0), (2, 0)]):
        solo = Solo(study, number)
        for step in (*range(early), *range(3)):
            solo.step(*study.data[step])
        assert_same_trial(group, row, solo)


def test_last_trial_may_leave() -> None:
    study = Classes()
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    group.keep([])
    assert group.size == 0 and group.losses_K().shape == (0,)


@pytest.mark.parametrize("rows", [[0, 0], [2], [-1]])
def test_rows_that_cannot_be_kept(rows: list[int]) -> None:
    study = Classes()
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    with pytest.raises(ValueError, match=r"cannot be kept; allowed: different ones of 0\.\.1"):
        group.keep(rows)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_checkpoint(optimizer: str) -> None:
    study = Classes(optimizer)
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    train(group, study, 2)
    group.epochs_done[:] = [1, 1, 1]
    other = reloaded(group)
    assert same_bits(states(other), states(group))
    for each in (group, other):
        train(each, study, 3, start=2)
    assert same_bits(states(other), states(group))
    assert other.numbers == [0, 1, 2] and other.params[2] == {"n": 2}


def test_checkpoint_is_a_snapshot() -> None:
    study = Classes()
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    train(group, study, 1)
    exported = [group.export(row) for row in range(2)]
    train(group, study, 2, start=1)
    for _ in range(2):
        again = TrialGroup(study, exported, OpenGate())
        train(again, study, 2, start=1)
        assert same_bits(states(again), states(group))


def test_checkpoint_of_another_structure() -> None:
    study, other = Classes(), ToyStudy(lambda n: nn.Linear(2, 2))
    with pytest.raises(FuseError, match=r"checkpoint of trial 0 is of another structure: 'conv\.bias' is absent there"):
        reloaded(TrialGroup(other, members(other, range(2)), OpenGate()), study)
    with pytest.raises(FuseError, match="checkpoint of another optimizer"):
        reloaded(TrialGroup(Classes("sgd"), members(Classes("sgd"), range(2)), OpenGate()), study)


def test_extracted_state_goes_into_the_users_objects() -> None:
    study = Classes("adam")
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solo = Solo(study, 2)
    for step in range(2):
        group.train_step(*study.data[step])
        solo.step(*study.data[step])
    member = build_member(study, 2, {"n": 2})
    model_state, optimizer_state = group.extract(2)
    member.model.load_state_dict(model_state)
    only_optimizer(member).load_state_dict(optimizer_state)
    assert_same_trial(TrialGroup(study, [member], OpenGate()), 0, solo)


@pytest.mark.usefixtures("noticed")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_trial_that_diverges_harms_no_neighbour(kind: type[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    def run(rate: float) -> TrialGroup:
        study = Classes(lambda n, ps: kind(ps, lr=rate if n == 1 else 0.01), dtype)  # type: ignore[call-arg]
        group = TrialGroup(study, members(study, range(3)), OpenGate())
        train(group, study, 6)
        return group

    lost, benign = run(1e30 if dtype == torch.float32 else 1e300), run(0.01)
    assert lost.finite_K().tolist() == [True, False, True]
    assert benign.finite_K().all()
    for row in (0, 2):
        assert same_bits(lost.extract(row), benign.extract(row))
    lost_scores, benign_scores = lost.evaluate(), benign.evaluate()
    assert [lost_scores[0], lost_scores[2]] == [benign_scores[0], benign_scores[2]]
    lost.keep([0, 2])
    benign.keep([0, 2])
    train(lost, Classes(dtype=dtype), 2)
    train(benign, Classes(dtype=dtype), 2)
    assert same_bits(lost.extract(1), benign.extract(1))


def test_neighbours_do_not_matter() -> None:
    study = Classes()
    wide = TrialGroup(study, members(study, range(5)), OpenGate())
    narrow = TrialGroup(study, members(study, [3]), OpenGate())
    train(wide, study, 4)
    train(narrow, study, 4)
    for name, value in narrow.extract(0)[0].items():
        close(wide.extract(3)[0][name], value, name)


def test_building_a_trial_leaves_the_global_random_numbers() -> None:
    study = Classes()
    before = torch.get_rng_state()
    one, other = build_member(study, 4, {"n": 4}), build_member(study, 4, {"n": 4})
    group = TrialGroup(study, [one], OpenGate())
    train(group, study, 1)
    assert torch.equal(before, torch.get_rng_state())
    assert same_bits(dict(one.model.state_dict()), dict(other.model.state_dict()))
