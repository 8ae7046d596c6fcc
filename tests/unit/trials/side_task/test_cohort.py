"""Trials at different epochs in one group: each is trained as alone, and where that is not sure, they are apart."""

from collections.abc import Callable, Iterator
from itertools import groupby, product
from types import MethodType
from typing import Any

import pytest
import torch
from optuna.trial import TrialState

from ds_hooks.shared import statuses
from ds_hooks.shared.trial_attributes import REASON
from tests.support.fused_and_solo import Batch
from tests.support.logged import logged
from tests.support.side_task_runs import Seven, Starving, assert_as_alone, data, make_study, run
from tests.support.slow_cases import others_slow
from tests.support.tree_models import Masked
from trials import Study
from trials.side_task.cohort import UNLIKE_EPOCHS
from trials.training.group import TrialGroup
from trials.training.inputs import batches as batches_module
from trials.training.inputs.batches import BATCHES, OWN, Pinned
from trials.training.inputs.side_by_side import DISTURBED


@pytest.fixture(autouse=True)
def set_up() -> Iterator[None]:
    with logged():
        yield


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
        ({0, 1}, 3),  # 1 has diverged, 2 is pruned
        ({0, 1, 2}, 4),
        ({0, 1, 2}, 3),  # 0 and 3 are done, and no trial is left but one
        ({1, 2}, 2),
        ({2}, 1),
    ]


@pytest.mark.parametrize("own", others_slow([False, True], [True]))
def test_trials_at_epochs_of_different_lengths_take_turns_and_each_is_trained_as_alone(
    own: bool, trained: list[tuple[set[int], int]], capsys: pytest.CaptureFixture[str]
) -> None:
    study = make_study(own, lambda epoch: 2 + epoch % 2)
    trials, _ = run(own, Starving(()), study)
    assert_as_alone(trials, study)
    assert capsys.readouterr().err.count(UNLIKE_EPOCHS) == 1
    mixed = [at for at, (epochs, _) in enumerate(trained) if len(epochs) > 1]
    assert mixed == [2, 3], "until the shorter epoch was over"


@pytest.mark.parametrize("own", others_slow([False, True], [False]))
def test_trials_that_have_nothing_to_train_on_in_an_epoch_fail(own: bool) -> None:
    trials, _ = run(own, Starving(()), make_study(own, lambda epoch: 0 if epoch == 1 else 3))
    assert {trial.state for trial in trials} == {TrialState.FAIL, TrialState.PRUNED}
    reasons = [trial.user_attrs[REASON] for trial in trials if trial.state is TrialState.FAIL]
    assert sum("the study gave no batches in epoch 1; allowed: at least one" in reason for reason in reasons) == 5


def test_batches_that_are_used_up_fail_trials() -> None:
    study, given = make_study(False), iter(data(0, 3))
    study.batches = lambda epoch: given  # type: ignore[assignment, method-assign, return-value]
    trials, _ = run(False, Starving(()), study)
    assert TrialState.COMPLETE not in {trial.state for trial in trials}


class Trees(Seven):
    """Its batches are dicts of several tensors, with a mask that is all False at times, and without targets."""

    def loss(self, outputs: torch.Tensor, targets: Any) -> torch.Tensor:
        return (outputs.sin() * outputs).mean() * targets["weight"]

    def score(self, outputs: torch.Tensor, targets: Any) -> torch.Tensor:
        return outputs.mean() + targets["weight"]


def in_dicts(batches: list[Batch], seed: int) -> list[Batch]:
    draws = torch.Generator().manual_seed(seed)
    masks = [torch.rand(5, 4, generator=draws) > n % 3 / 2 for n in range(len(batches))]
    inputs = [
        {"x": x.unsqueeze(1).repeat(1, 4, 1)[..., [0, 1, 2, 0]], "mask": mask}
        for (x, _), mask in zip(batches, masks, strict=True)
    ]
    return [(own, {"weight": own["x"][:, 0, 0].exp().mean(), "name": "w"}) for own in inputs]


@pytest.mark.parametrize("own", others_slow([False, True], [True]))
def test_batches_of_dicts_are_mixed(own: bool, trained: list[tuple[set[int], int]]) -> None:
    study = Trees(lambda n: Masked().double(), make_study(False).make_optimizer, in_dicts(data(0, 3), 0))
    study.length = lambda epoch: 3
    study.batches = lambda epoch: in_dicts(data(epoch, 3), epoch)  # type: ignore[method-assign]
    study.own = lambda n, epoch: in_dicts(data(100 * n + epoch, 3), n) if own else None
    trials, reported = run(own, Starving(()), study)
    assert_as_alone(trials, study)
    assert any(len(epochs) > 1 for epochs, _ in trained)
    assert reported[-1] == statuses.Finished(5 * sum(size for _, size in trained))


class Loader:
    """Draws the order of an epoch with its first batch, by the epoch that it was last given."""

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


def test_a_loss_that_vmap_cannot_compute_is_mixed_all_the_same(trained: list[tuple[set[int], int]]) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs[targets > -1].square().mean()  # how many rows are left depends on the data

    study, alone = make_study(False), make_study(False)
    study.loss = alone.loss = loss  # type: ignore[method-assign]
    trials, _ = run(False, Starving(()), study)
    assert [trial.state for trial in trials].count(TrialState.COMPLETE) == 5
    assert_as_alone(trials, alone)
    assert any(len(epochs) == 3 for epochs, _ in trained)


def as_it_is(loader: Any) -> Any:
    return loader


def in_a_generator(loader: Any) -> Any:
    yield from loader


@pytest.mark.parametrize(
    ("is_known", "wrap"),
    others_slow(
        product([False, True], [as_it_is, Pinned, in_a_generator]),
        [(False, Pinned), (True, as_it_is), (False, in_a_generator)],
    ),
)
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
    assert capsys.readouterr().err.count(DISTURBED[BATCHES]) == (not is_known)
    assert all(len(epochs) == 1 for epochs, _ in trained)
    assert all(len(list(steps)) % 3 == 0 for _, steps in groupby(trained)), "each epoch to its end"


@pytest.mark.parametrize("own", [False, True])
def test_batches_that_are_drawn_from_global_streams_are_those_of_the_trial_alone(
    own: bool, trained: list[tuple[set[int], int]]
) -> None:
    def drawn(seed: int) -> Iterator[Batch]:
        torch.manual_seed(seed)
        for _ in range(3):
            yield torch.randn(5, 3, dtype=torch.float64), torch.zeros(5)

    study = make_study(False)
    study.batches = drawn  # type: ignore[assignment, method-assign]
    study.own = lambda n, epoch: drawn(100 * n + epoch) if own else None
    trials, _ = run(own, Starving(()), study)
    assert_as_alone(trials, study)
    assert any(len(epochs) == 3 for epochs, _ in trained)


def test_trials_whose_own_batches_share_a_loader_are_trained_alone(
    trained: list[tuple[set[int], int]], capsys: pytest.CaptureFixture[str]
) -> None:
    study, loader = make_study(True), LoaderWithOneIterator()

    def own(n: int, epoch: int) -> Iterator[Batch]:
        loader.epoch = 100 * n + epoch
        yield from loader

    study.own = own
    trials, _ = run(True, Starving(()), study)
    assert_as_alone(trials, make_study(True))
    assert {size for _, size in trained} == {1}
    assert DISTURBED[OWN] in capsys.readouterr().err


def test_trials_begin_an_epoch_anew_that_another_has_disturbed(
    trained: list[tuple[set[int], int]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That shows late in the epoch, when what was tried has been found the same."""
    monkeypatch.setattr(batches_module, "AHEAD", 1)
    study, alone = make_study(False, lambda epoch: 7), make_study(False, lambda epoch: 7)
    study.trial_batches = MethodType(Study.trial_batches, study)  # type: ignore[method-assign]
    left: list[Batch] = []

    def batches(epoch: int) -> Iterator[Batch]:
        own = data(epoch, 7)
        yield from own[:4]
        left[:] = own[4:]
        for _ in range(3):
            yield left[0]
            left[:] = left[1:] or left

    study.batches = batches  # type: ignore[assignment, method-assign]
    trials, _ = run(False, Starving(()), study)
    assert_as_alone(trials, alone)
    assert f"had other batches than alone: {DISTURBED[BATCHES]}" in capsys.readouterr().err
    mixed = [at for at, (epochs, _) in enumerate(trained) if len(epochs) > 1]
    assert len(mixed) == 7, "one epoch"
