"""A trial outside its group: the user's own module loads it, and any group takes it back where it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

from tests.support.fused_and_solo import ToyStudy, assert_same_trial, members, same_bits
from tests.support.own_optimizers import OWN_OPTIMIZERS
from tests.support.rich_study import RichSolo, RichStudy
from tests.support.states import reloaded, states
from trials import FuseError, TrialGroup
from trials.gate.base import OpenGate
from trials.training.trial_state import TrialState


class Tied(nn.Module):
    """A decoder that is its encoder's, a buffer that is not saved, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4, bias=False)  # the norm would cancel a bias
        self.norm = nn.BatchNorm1d(4)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight
        self.register_buffer("seen", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.encode(x)).tanh()
        self.seen += h.detach().mean(0)
        return self.decode(nn.functional.dropout(h, 0.3, self.training)) + self.seen


def batches(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    stream = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 4, dtype=dtype, generator=stream), torch.zeros(6)) for _ in range(2)]


def adam(n: int, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01 * (n + 1), amsgrad=True)


def rich(make: Callable[[int, Any], torch.optim.Optimizer] = adam) -> RichStudy:
    return RichStudy(
        lambda n: Tied().double(),
        make,
        batches(),
        schedule=lambda n, o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.5, 2), lrs.ExponentialLR(o, 0.9)], [2]),
        scale=lambda n: torch.amp.GradScaler("cpu", 64.0, growth_interval=2),
    )


def train(group: TrialGroup, epochs: int) -> None:
    for _ in range(epochs):
        for batch in group.batches(0):
            group.train_step(*batch)
        group.end_epoch()


@pytest.mark.parametrize("move", [lambda state: TrialState.from_plain(state.plain()), TrialState.on_host])
def test_a_trial_moves_between_groups_of_any_size(move: Callable[[TrialState], TrialState]) -> None:
    study = rich()
    wide, narrow = (TrialGroup(study, members(study, numbers), OpenGate()) for numbers in (range(4), [7]))
    train(wide, 2)
    train(narrow, 1)
    narrow.add([move(wide.export(2))])
    wide.keep([0, 1, 3])
    train(narrow, 2)
    assert narrow.numbers == [7, 2] and narrow.epochs_done == [3, 4]
    solo = RichSolo(study, 2)
    for _ in range(4):
        solo.epoch()
    assert_same_trial(narrow, 1, solo)
    assert narrow.progress(1)["scaler"] == solo.scaler.state_dict()
    assert narrow.progress(1)["schedulers"][0]["_last_lr"] == solo.schedulers[0].get_last_lr()


@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_any_optimizer_goes_to_disk_and_back(name: str) -> None:
    study = ToyStudy(lambda n: nn.Linear(4, 4).double(), OWN_OPTIMIZERS[name], batches())
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    train(group, 1)
    again = reloaded(group)
    assert same_bits(states(again), states(group))
    for each in (group, again):
        train(each, 2)
    assert same_bits(states(again), states(group))


def test_the_users_own_module_loads_it() -> None:
    study = rich()
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    train(group, 2)
    state = group.export(1)
    own = Tied().double()
    own.load_state_dict(state.model)  # strict: neither less nor more than its own
    assert state.model["decode.weight"] is state.model["encode.weight"]
    assert "seen" not in state.model and "seen" in state.tensors


def test_it_shares_nothing_with_its_group() -> None:
    study = rich()
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    train(group, 1)
    state = group.export(0)
    before = TrialState.from_plain(state.plain())
    again = TrialGroup(study, [state, group.export(1)], OpenGate())
    kept = {name: tensor.clone() for name, tensor in before.tensors.items()}
    for each in (group, again):
        train(each, 1)
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in kept.items())
    assert state.epoch == 1 and again.epochs_done == [2, 2]


def test_a_lost_trial_stays_lost() -> None:
    study = rich(lambda n, ps: torch.optim.SGD(ps, 1e300 if n else 0.01))
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    train(group, 2)
    assert [group.export(row).is_lost for row in range(2)] == [False, True]
    assert reloaded(group).finite_K().tolist() == [True, False]


def test_other_models_and_optimizers_are_refused() -> None:
    def study_of(model: Callable[[], nn.Module], make: Any = adam) -> ToyStudy:
        return ToyStudy(lambda n: model().double(), make, batches())

    whole = study_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    group = TrialGroup(whole, members(whole, [3]), OpenGate())
    train(group, 1)
    with pytest.raises(FuseError, match=r"checkpoint of trial 3 is of another structure: '1\.weight' is absent here"):
        reloaded(group, study_of(lambda: nn.Sequential(nn.Linear(4, 4))))
    with pytest.raises(FuseError, match=r"'1\.bias' is torch\.float64 \[4\] there, and absent here"):
        reloaded(group, study_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))))
    with pytest.raises(FuseError, match=r"'2\.bias' is absent there"):
        reloaded(group, study_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))))
    wider = study_of(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)))
    with pytest.raises(FuseError, match=r"'0\.weight' is torch\.float64 \[4, 4\] there, and torch\.float64 \[5, 4\] h"):
        reloaded(group, wider)
    halves = study_of(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        lambda n, ps: torch.optim.AdamW([{"params": [p]} for p in ps], amsgrad=True),
    )
    with pytest.raises(FuseError, match=r"another optimizer: AdamW; Study\.optimizer now gives this trial AdamW, or"):
        reloaded(group, halves)


def test_a_scheduler_that_cannot_continue_is_named() -> None:
    """As one of another version of PyTorch, or of the user's own."""

    class Older(lrs.ExponentialLR):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.warm_up = state_dict.pop("warm_up")
            super().load_state_dict(state_dict)

    study = RichStudy(lambda n: Tied().double(), adam, batches(), schedule=lambda n, o: lrs.ExponentialLR(o, 0.9))
    group = TrialGroup(study, members(study, [3]), OpenGate())
    train(group, 1)
    other = RichStudy(lambda n: Tied().double(), adam, batches(), schedule=lambda n, o: Older(o, 0.9))
    with pytest.raises(FuseError, match=r"checkpoint of trial 3 does not fit Older: KeyError: 'warm_up'"):
        reloaded(group, other)
