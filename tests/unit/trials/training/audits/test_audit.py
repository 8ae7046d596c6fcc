"""When steps are audited, what an audit costs, and that it changes nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.audited import Audited, data, perceptron
from tests.support.fused_and_solo import (
    RecordingGate,
    Solo,
    ToyStudy,
    assert_same_trial,
    members,
    same_bits,
)
from tests.support.states import states
from tests.support.toy_models import Branching
from trials import TrialGroup
from trials.fusion.autotune import pinned
from trials.fusion.layers.linear import FusedLinear
from trials.fusion.ways import Way
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit
from trials.training.audits.budget import ASKING_NS, MOST_COST, READING_NS, Budget
from trials.training.audits.lone import Lone


def test_later_trials_of_the_structure_start_in_the_way_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FusedLinear.run
    monkeypatch.setattr(
        FusedLinear, "run", lambda layer, *args: (run(layer, *args)[0] * (1 + 1e-6), run(layer, *args)[1])
    )
    audited = Audited(perceptron)
    audited.train(1)
    assert audited.audit.way == "loop"
    later = TrialGroup(audited.study, members(audited.study, [2, 3]), OpenGate(), audited.audit)
    audited.group.merge(later)
    audited.solos += [Solo(audited.study, number) for number in (2, 3)]
    audited.train()
    assert len(audited.found) == 2
    half = audited.group.split([1, 2])
    assert {how.partition(":")[0] for group in (half, audited.group) for _, how in group.ways()} == {"loop over trials"}
    for group, numbers in ((audited.group, (0, 3)), (half, (1, 2))):
        for row, number in enumerate(numbers):
            assert_same_trial(group, row, audited.solos[number])


def masked(n: int) -> nn.Module:
    """A model whose graph has a constant, as a mask that the forward makes."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.a(x) * torch.tensor([1.0, 0.5, 2.0])
            return out

    return Masked().double()


@pytest.mark.parametrize("way", ["vmap", "loop"])
def test_fresh_and_saved_trials_train_together_in_that_way(way: Way) -> None:
    study = ToyStudy(masked, batches=data())
    audit = Audit(study)
    audit.way = way
    study.audit = False
    fresh = TrialGroup(study, members(study, range(2)), OpenGate(), audit)
    saved = TrialGroup(study, [fresh.export(row) for row in range(2)], OpenGate(), audit)
    saved.add(members(study, [2]))
    saved.merge(saved.split([2, 0]))
    solos = [Solo(study, number) for number in saved.numbers]
    for batch in study.data:
        saved.train_step(*batch)
        for solo in solos:
            solo.step(*batch)
    for row, solo in enumerate(solos):
        assert_same_trial(saved, row, solo)


def test_a_kink_that_rounding_decides_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FusedLinear.run

    def rounded(layer: FusedLinear, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        y, own = run(layer, x, per_trial, training)
        return torch.where(y.abs() < 1e-15, y - 1e-15, y), own  # as a sum in another order might

    def on_the_kink(n: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.ReLU(), nn.Linear(1, 1))
        model[0].weight.data = torch.tensor([[0.1, 0.2, -0.3]], dtype=torch.float64)
        return model.double()

    monkeypatch.setattr(FusedLinear, "run", rounded)
    study = ToyStudy(on_the_kink, "sgd", [(torch.ones(1, 3, dtype=torch.float64), torch.zeros(1))])
    looks: list[int] = []
    audit = Audit(study)
    group = TrialGroup(study, members(study, range(2)), OpenGate(), audit)
    plain = TrialGroup(study, members(study, range(2)), OpenGate())
    shake, nudged = TrialGroup.shake, Lone._nudged
    # nothing warns of it, until parameters are shaken: some processors round the product of one trial otherwise
    monkeypatch.setattr(Lone, "_nudged", lambda lone, tensor, share: nudged(lone, tensor, share) if looks else tensor)
    monkeypatch.setattr(TrialGroup, "shake", lambda group, *args: looks.append(1) or shake(group, *args))
    for each in (group, plain):
        each.train_step(*study.data[0])
    assert looks and not audit.mismatches
    assert same_bits(states(group), states(plain))


MODEL: dict[str, Callable[[int], nn.Module]] = {
    "layers": lambda n: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.1 * n), nn.Linear(5, 3)),
    "code": lambda n: nn.Sequential(nn.Linear(4, 3), Branching(to_number=False)),
    "loop": lambda n: nn.Sequential(nn.Linear(4, 3), Branching(to_number=True), nn.Dropout(0.2)),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", lambda n, parameters: torch.optim.Rprop(parameters, 0.01)])
@pytest.mark.parametrize("model", MODEL)
def test_audits_change_no_bit(model: str, optimizer: Any) -> None:
    def trained(audit: bool) -> tuple[list[dict[str, Any]], Any, Any]:
        study = ToyStudy(lambda n: MODEL[model](n).double(), optimizer, data())
        made = Audit(study) if audit else None
        group = TrialGroup(study, members(study, range(3)), OpenGate(), made)
        for inputs, targets in study.data:
            group.unproven = {"training", "evaluation"}
            group.train_step(inputs, targets)
        group.add(members(study, [4]))
        group.train_step(*study.data[0])
        scores = group.evaluate()
        assert made is None or (made.done >= 2 and not made.mismatches)
        return states(group), scores, torch.get_rng_state()

    with pinned("loop", "batched"):
        trained(False)  # what is measured is measured here
        assert same_bits(trained(True), trained(False))


def test_the_parts_of_an_audit_are_units_and_no_work() -> None:
    study = ToyStudy(lambda n: perceptron(n).double(), "adamw", data())
    gate = RecordingGate()
    group = TrialGroup(study, members(study, range(2)), gate, Audit(study))
    group.train_step(*study.data[0])
    group.train_step(*study.data[1])
    units = [unit for unit in gate.units if unit.startswith("audit ")]
    lone = ["0.Linear forward", "1.Tanh forward", "2.Linear forward", "loss"]
    lone += ["2.Linear backward", "1.Tanh backward", "0.Linear backward", "optimizer step", "comparison"]
    assert units == [f"audit {part}" for part in ("snapshot", "comparison", "setup", *lone, "setup", *lone)]
    group.evaluate()
    assert gate.units.count("audit score") == 2


@pytest.mark.parametrize(("when", "audits"), [("epoch", [1, 1, 2, 2, 3]), ("start", [1] * 5), (False, [0] * 5)])
def test_when_steps_are_audited(when: Any, audits: list[int]) -> None:
    study = ToyStudy(lambda n: perceptron(n).double(), "adamw", data())
    study.audit = when
    audit = Audit(study, Free())
    group = TrialGroup(study, members(study, range(3)), OpenGate(), audit)
    done = []
    for change in (None, None, group.end_epoch, None, lambda: group.keep([0, 2])):
        if change is not None:
            change()
        group.train_step(*study.data[0])
        done.append(audit.done)
    assert done == audits


class Free(Budget):
    """Allows everything."""

    def allows(self, cost_ns: int) -> bool:
        return True


def test_each_trial_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    study = ToyStudy(lambda n: perceptron(n).double(), "adamw", data())
    group = TrialGroup(study, members(study, range(3)), OpenGate(), Audit(study, Free()))
    rows: list[int] = []
    export = TrialGroup.export
    monkeypatch.setattr(TrialGroup, "export", lambda group, row: rows.append(row) or export(group, row))
    for _ in range(20):
        group.unproven = {"training"}
        group.train_step(*study.data[0])
    assert len(rows) == 20 and set(rows) == {0, 1, 2}


def test_first_batches_are_audited_whatever_they_cost() -> None:
    study = ToyStudy(lambda n: perceptron(n).double(), "adamw", data())
    budget = Budget()
    budget.spend(10**18, is_first=False)
    audit = Audit(study, budget)
    for _ in range(2):
        group = TrialGroup(study, members(study, range(2)), OpenGate(), audit)
        group.train_step(*study.data[0])
        group.evaluate()
    assert audit.done == 2, "one in each mode; the second group is of the same structure"
    assert not budget.allows(0)


def test_the_budget_is_kept() -> None:
    now_ns = [0]
    budget = Budget(lambda: now_ns[0], asking_ns=0, reading_ns=0)
    now_ns[0] = 1000
    budget.spend(100, is_first=True)
    assert not budget.allows(100), "a second one would be 100 of 900"
    now_ns[0] = 16_800
    assert budget.allows(100), "100 of 16700"
    assert not budget.allows(101)
    budget.spend(100, is_first=False)
    now_ns[0] = 33_500
    assert not budget.allows(100), "200 of 33300"
    now_ns[0] = 33_600
    assert budget.allows(100)


@pytest.mark.parametrize("step_ns", [1_300_000, 60_000_000], ids=["small model", "large model"])
@pytest.mark.parametrize("costs_ns", [(30_000_000,), (30_000_000, 3_000_000)], ids=["one cost", "two costs"])
def test_the_budget_counts_the_asking_and_reads_the_clock_seldom(costs_ns: tuple[int, ...], step_ns: int) -> None:
    steps = 100_000
    now_ns = readings = audits_ns = 0

    def clock_ns() -> int:
        nonlocal now_ns, readings
        now_ns, readings = now_ns + READING_NS, readings + 1
        return now_ns

    budget = Budget(clock_ns)
    for number in range(steps):
        now_ns += step_ns + ASKING_NS
        cost_ns = costs_ns[number % len(costs_ns)]
        if budget.allows(cost_ns):
            now_ns, audits_ns = now_ns + cost_ns, audits_ns + cost_ns
            budget.spend(cost_ns, is_first=False)
    of_asking = (readings * READING_NS + steps * ASKING_NS) / (steps * step_ns)
    assert of_asking < MOST_COST / 2, "most is left for audits"
    assert 0.95 * MOST_COST < of_asking + audits_ns / (steps * step_ns) < 1.01 * MOST_COST


def test_a_lost_trial_is_not_audited() -> None:
    study = ToyStudy(lambda n: perceptron(n).double(), "adamw", data())
    bad = torch.full_like(study.data[0][0], torch.inf)
    audit = Audit(study)
    group = TrialGroup(study, members(study, range(2)), OpenGate(), audit)
    group.train_step(bad, study.data[0][1])
    assert (audit.done, audit.mismatches) == (1, 0)
    assert not group.sound()
    group.unproven = {"training"}
    group.train_step(*study.data[0])
    assert audit.done == 1


@pytest.mark.parametrize("where", ["snapshot", "group's step", "lone step"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("can't allocate memory: full")])
def test_an_audit_that_does_not_fit_is_left_out(
    where: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    study = ToyStudy(lambda n: MODEL["layers"](n).double(), "adamw", data())
    audit = Audit(study)
    group = TrialGroup(study, members(study, range(3)), OpenGate(), audit)
    plain = TrialGroup(study, members(study, range(3)), OpenGate())

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    def fail_late(group: TrialGroup, record: Any, before: Any) -> Any:
        @contextmanager
        def watched() -> Iterator[None]:
            yield
            raise error

        return watched()

    with monkeypatch.context() as patch:
        if where == "snapshot":
            patch.setattr(TrialGroup, "saved", fail)
        elif where == "group's step":
            patch.setattr(TrialGroup, "watched", fail_late)
        else:
            patch.setattr("trials.training.audits.lone.Lone.__init__", fail)
        for batch in study.data[:2]:
            group.train_step(*batch)
            plain.train_step(*batch)
    assert same_bits(states(group), states(plain))
    assert audit.done == 0 and audit.mismatches == 0
    assert caplog.text.count("does not fit into memory, and is left out") == 1, "not at each step"
    audit.budget = Free()
    later = TrialGroup(study, members(study, range(3)), OpenGate(), audit)
    later.train_step(*study.data[0])
    assert audit.done == 1, "nothing has been proven before"


@pytest.mark.parametrize("when", ["epoch", "start"])
def test_an_audit_that_does_not_fit_is_tried_again_within_the_budget(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = ToyStudy(lambda n: perceptron(n).double(), "adamw", data())
    study.audit = when
    now_ns, tried = [0], []

    def fail(*_: Any, **__: Any) -> Any:
        tried.append(now_ns[0])
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(TrialGroup, "saved", fail)
    budget = Budget(lambda: now_ns[0], asking_ns=0, reading_ns=0)
    audit = Audit(study, budget)
    group = TrialGroup(study, members(study, range(3)), OpenGate(), audit)
    budget.spend(100, is_first=False)
    for now_ns[0] in (1_000, 2_000, 10**9):
        group.train_step(*study.data[0])
        group.end_epoch()
    assert tried == [1_000, 10**9]


def test_an_audit_that_costs_too_much_at_an_epochs_start_comes_later_in_the_epoch() -> None:
    """An epoch may be all that a study trains, so one that is refused stays due."""
    study = ToyStudy(lambda n: perceptron(n).double(), "adamw", data())
    now_ns = [0]
    audit = Audit(study, Budget(lambda: now_ns[0], asking_ns=0, reading_ns=0))
    group = TrialGroup(study, members(study, range(3)), OpenGate(), audit)
    group.train_step(*study.data[0])
    group.end_epoch()
    audit.budget.spend(10**6, is_first=False)
    done = []
    for now_ns[0] in (10**3, 10**6, 10**12, 10**12):
        group.train_step(*study.data[0])
        done.append(audit.done)
    assert done == [1, 1, 2, 2]


def test_steps_of_another_kind_are_audited_too() -> None:
    inputs = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = torch.zeros(2, 6)
    study = ToyStudy(
        lambda n: perceptron(n).double(), "adamw", [(inputs[0], targets[0]), (inputs[0, :1], targets[0, :1])]
    )
    audit = Audit(study, Spent())
    group = TrialGroup(study, members(study, [0]), OpenGate(), audit)
    done = []
    for join in (False, True):
        if join:
            group.add(members(study, [1]))
        for batch in (*study.data, *study.data):
            group.train_step(*batch)
            done.append(audit.done)
    group.train_step(inputs, targets, True)
    assert [*done, audit.done] == [1, 2, 2, 2, 3, 4, 4, 4, 5]
    group.evaluate()
    group.evaluate()
    assert audit.done == 7
    for size in (2, 3, 4, 5):
        group.train_step(inputs[0, :size], targets[0, :size])
    assert audit.done == 8, "not of each length"


class Spent(Budget):
    """Allows nothing."""

    def allows(self, cost_ns: int) -> bool:
        return False
