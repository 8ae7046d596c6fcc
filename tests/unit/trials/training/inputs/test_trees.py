"""Batches as people write them: dicts, tuples, masks, None. Each fused trial is as the trial alone."""

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import RecordingGate, Solo, assert_same_trial, close, members
from tests.support.rich_study import RichStudy
from tests.support.slow_cases import others_slow
from tests.support.tree_models import CASES, B, MaybeMasked, Pair, TreeStudy, mask, own_batches, study_of, x
from trials import FuseError, TrialGroup
from trials.fusion.errors import ApartError
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit
from trials.training.inputs.batches import BatchCopy, Pinned, as_batch, fuse_batches, shapes
from trials.training.inputs.trees import examples, stacked

FEW = list(CASES)[::3]
"""For what is shown of all cases with the same batches for all trials."""


def solos_of(study: TreeStudy, size: int) -> list[Solo]:
    return [Solo(study, number) for number in range(size)]


def assert_as_alone(group: TrialGroup, solos: list[Solo]) -> None:
    close(group.losses_K(), torch.tensor([solo.loss for solo in solos], dtype=torch.float64), "loss")
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)
    close(group.evaluate(), [solo.score() for solo in solos], "score")


@pytest.mark.parametrize("size", others_slow([1, 3], [3]))
@pytest.mark.parametrize("name", CASES)
def test_the_same_batches_for_all(name: str, size: int) -> None:
    study = study_of(name)
    group = TrialGroup(study, members(study, range(size)), OpenGate())
    solos = solos_of(study, size)
    for batch in study.data:
        group.train_step(*batch)
        for solo in solos:
            solo.step(*batch)
    assert_as_alone(group, solos)


@pytest.mark.parametrize("size", others_slow([1, 3], [3]))
@pytest.mark.parametrize("name", others_slow(CASES, FEW))
def test_batches_of_each_trials_own(name: str, size: int) -> None:
    study = study_of(name)
    group = TrialGroup(study, members(study, range(size)), OpenGate())
    solos = solos_of(study, size)
    for own in own_batches(study, list(range(size))):
        group.train_step(*fuse_batches(own))
        for solo, each in zip(solos, own, strict=True):
            solo.step(*each)
    assert_as_alone(group, solos)


@pytest.mark.parametrize("name", others_slow(CASES, FEW))
@pytest.mark.parametrize("per_trial", others_slow([False, True], [True]))
def test_audits_agree(name: str, per_trial: bool) -> None:
    study = study_of(name, count=3)
    audit = Audit(study)
    audit.tables = []
    group = TrialGroup(study, members(study, range(2)), OpenGate(), audit)
    solos = solos_of(study, 2)
    for own in own_batches(study, [0, 1] if per_trial else [0]):
        group.unproven.add("training")
        given = own if per_trial else own * 2
        group.train_step(*(fuse_batches(own) if per_trial else own[0]))
        for solo, batch in zip(solos, given, strict=True):
            solo.step(*batch)
    assert_as_alone(group, solos)
    assert audit.done >= 3 + 1 and not audit.mismatches
    assert all(each.bound < 1e-6 for _, table in audit.tables for each in table), "else it would find nothing"
    kinds = [{each.key.kind for each in table if each.equal} for _, table in audit.tables]
    assert all(found >= {"loss", "update of"} or "score" in found for found in kinds)


class Faulty(nn.Module):
    """Computes something else for several trials at once than for one: what an audit is there to find."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made: Tensor = self.one(x)
        return made + (y.mean() if torch._C._functorch.is_batchedtensor(made) else 0.0)


def test_an_audit_finds_a_fault_in_a_forward_of_several_inputs() -> None:
    study = TreeStudy(lambda n: Faulty().double(), "adamw", [((x(n), x(n + 9)), None) for n in range(3)])
    audit = Audit(study)
    group = TrialGroup(study, members(study, range(2)), OpenGate(), audit)
    solos = solos_of(study, 2)
    for batch in study.data:
        group.train_step(*batch)
        for solo in solos:
            solo.step(*batch)
    assert_as_alone(group, solos)
    assert audit.mismatches and audit.way == "loop"


def test_two_tensors_are_traced_and_layers_run_by_rule() -> None:
    study = study_of("tuple")
    gate = RecordingGate()
    group = TrialGroup(study, members(study, range(2)), gate)
    group.train_step(*study.data[0])
    assert [how for _, how in group.ways()] == ["rule FusedLinear", "rule FusedDropout", "rule FusedLinear"]


def test_inputs_that_the_trace_does_not_know_run_the_users_own_code() -> None:
    study = study_of("mask now and then")
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    group.train_step(*study.data[0])
    assert not [name for name, _ in group.ways() if "as a whole" in name]
    group.train_step(*study.data[1])
    assert ("MaybeMasked as a whole", "vmap: a batch has other inputs than the trace") in group.ways()


class Noted(MaybeMasked):
    """Has what its own code may read, though its graph does not."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.note = n


def test_trials_that_may_differ_in_their_own_code_go_apart() -> None:
    data = [({"x": x(n, 6, 4), "mask": mask(n)}, None) for n in range(2)]
    study = TreeStudy(lambda n: Noted(n).double(), "adamw", data)
    with pytest.raises(ApartError, match="a batch has other inputs than the trace, and the trials' modules differ"):
        TrialGroup(study, members(study, range(2)), OpenGate()).train_step(*data[0])
    group, (solo, *_) = TrialGroup(study, members(study, range(1)), OpenGate()), solos_of(study, 1)
    for batch in data:
        group.train_step(*batch)
        solo.step(*batch)
    assert_as_alone(group, [solo])


Two = namedtuple("Two", ["x", "y"])


@pytest.mark.parametrize(
    "wrap", [lambda a, b: UserDict(x=a, y=b), lambda a, b: OrderedDict(x=a, y=b), Two, lambda a, b: UserDict(y=b, x=a)]
)
def test_other_containers(wrap: Any) -> None:
    """Such as the batches of a tokenizer of Hugging Face, which are no dict."""
    study = RichStudy(lambda n: Pair().double(), "adamw", own=lambda n, epoch: [(wrap(x(n), x(n + 9)), x(n))])
    study.data = [(wrap(x(3), x(4)), x(5))]
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    plain = study_of("tuple")
    solos = solos_of(plain, 2)
    plain.loss, plain.score = study.loss, study.score  # type: ignore[method-assign]
    plain.data = [((x(3), x(4)), x(5))]
    for batch in group.batches(0):
        group.train_step(*batch)
    for number, solo in enumerate(solos):
        solo.step((x(number), x(number + 9)), x(number))
    assert_as_alone(group, solos)


BAD: dict[str, tuple[Any, str]] = {
    "a dict": ({"x": 1, "y": 2}, r"Study\.batches gave a dict; allowed: pairs \(inputs, targets\)"),
    "three": ((1, 2, 3), r"Study\.batches gave a tuple of 3; allowed: pairs"),
    "one tensor": (torch.zeros(2, 3), r"Study\.batches gave a Tensor; allowed: pairs"),
    "an array": (({"x": np.zeros(3)}, None), "gave a batch with a ndarray; allowed: tensors and plain values"),
    "a set": ((torch.zeros(2), [{1}]), "gave a batch with a set; allowed: tensors and plain values"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_batch_is_refused(name: str) -> None:
    given, message = BAD[name]
    study = study_of("tuple")
    study.data = [given]
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    for read in (lambda: list(group.batches(0)), lambda: list(Pinned(study.batches(0)))):
        with pytest.raises(FuseError, match=message):
            read()
    with pytest.raises(FuseError, match=message.replace("batches", "validation")):
        group.evaluate()


def pair(**more: Any) -> Any:
    return {"x": x(0), "y": x(1), **more}, None


UNLIKE: dict[str, tuple[Any, Any]] = {
    "a plain value": (pair(scale=1), pair(scale=2)),
    "a plain value's type": (pair(scale=1), pair(scale=True)),
    "the sign of zero": (pair(scale=0.0), pair(scale=-0.0)),
    "None": (pair(z=None), pair(z=x(0))),
    "keys": (pair(z=None), pair(w=None)),
    "the order of keys": (pair(), (dict(reversed(pair()[0].items())), None)),
    "containers": (((x(0), x(1)), None), ([x(0), x(1)], None)),
    "shapes": (pair(), ({"x": x(0)[1:], "y": x(1)[1:]}, None)),
    "types": (pair(), ({"x": x(0).float(), "y": x(1)}, None)),
    "targets": ((x(0), None), (x(0), x(1))),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_own_batches_that_differ_in_form_are_refused(name: str) -> None:
    study = study_of("tuple")
    study.own = lambda n, epoch: [UNLIKE[name][n]]
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    with pytest.raises(FuseError, match=r"Study\.trial_batches gave batches that differ in .* plain values; allowed"):
        list(group.batches(0))
    with pytest.raises(FuseError, match=r"the trials' batches differ in .* plain values; allowed"):
        fuse_batches(UNLIKE[name])


def test_nan_is_equal_to_itself() -> None:
    assert shapes(pair(scale=float("nan"))) == shapes(pair(scale=float("nan")))


def test_kept_copies_every_leaf_and_puts_it_back() -> None:
    base = torch.arange(6.0)
    batch = {"a": base[:4], "b": [base[2:], 5]}, (base.clone(), None)
    kept = BatchCopy(*batch)
    base.add_(1)
    batch[1][0].mul_(3)
    torch.testing.assert_close(kept.inputs, {"a": torch.arange(4.0), "b": [torch.arange(2.0, 6), 5]})
    torch.testing.assert_close(kept.targets[0], torch.arange(6.0))
    kept.put_back()
    assert base.tolist() == list(range(6)) and batch[1][0].tolist() == list(range(6))


def test_examples_are_counted_by_the_first_tensor_with_an_axis() -> None:
    batch = as_batch(({"scale": torch.tensor(1.0), "x": x(0, 6, 4), "y": torch.zeros(2)}, None))
    assert examples(*batch) == B
    assert examples(*stacked([batch, batch]), per_trial=True) == B
    assert examples(3, torch.zeros(4, 2)) == 4
    with pytest.raises(FuseError, match="no tensor with an axis for its examples"):
        examples({"scale": torch.tensor(1.0)}, None)
