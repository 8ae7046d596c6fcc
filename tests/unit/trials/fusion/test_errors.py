"""What cannot be fused is named, with what is allowed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from tests.support.fused_and_solo import ToyStudy, members
from trials import FuseError, Member, TrialGroup, build_member, group_key
from trials.gate.base import OpenGate


def extra_state(n: int) -> nn.Module:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"n": n}

        def set_extra_state(self, state: Any) -> None:
            pass

    return Extra(2, 2)


def with_hook(n: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda *_: None)
    return model


def with_outer_hook(n: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_forward_pre_hook(lambda *_: None)
    return model


def with_tensor_hook(n: int) -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda g: None)
    return model


def with_state_hook(n: int) -> nn.Module:
    """It saves what it does not have."""
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}more": state["bias"]}))
    return model


class Late(nn.Module):
    """It makes a part of itself when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.late = nn.Linear(2, 2)
        return self.late(self.layer(x))


def encoder_layer(name: str, own: Any) -> nn.Module:
    """One that PyTorch's kernel for inference computes, but for its part `name`."""
    layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True)
    setattr(layer, name, own)
    return nn.Sequential(layer)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class AlwaysDropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.p)


class StaysOn(nn.Dropout):
    """Monte Carlo dropout."""

    def train(self, mode: bool = True) -> "StaysOn":
        return super().train(True)


class Wrapped(nn.Module):
    """An adapter of attention, which answers for it, as that of `peft` does."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(4, 2, batch_first=True)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inside" else getattr(super().__getattr__("inside"), name)

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, None]:
        return self.inside(*args, **options)[0] * 2, None


PASSED_OVER: dict[str, tuple[str, Any]] = {
    "adapter": ("linear1", Doubled(4, 5)),
    "dropout of its own": ("dropout2", AlwaysDropout()),
    "dropout that stays on": ("dropout1", StaysOn()),
    "adapter after dropout": ("dropout1", nn.Sequential(nn.Dropout(), nn.Linear(4, 4))),
    "another norm": ("norm1", nn.BatchNorm1d(4)),
    "attention to zeros": ("self_attn", nn.MultiheadAttention(4, 2, batch_first=True, add_zero_attn=True)),
    "attention in a wrapper": ("self_attn", Wrapped()),
    "another activation": ("activation", nn.SiLU()),
    "another method": ("_ff_block", lambda x: x),
}


@pytest.mark.parametrize("case", PASSED_OVER)
def test_what_a_kernel_for_inference_passes_over_is_refused(case: str) -> None:
    name, own = PASSED_OVER[case]

    def make(n: int) -> nn.Module:
        return encoder_layer(name, own)

    with pytest.raises(FuseError, match=f"module '0'.* does not call '{name}' .*allowed: .*set_fastpath_enabled"):
        members(ToyStudy(make), range(1))
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        members(ToyStudy(make), range(1))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class Adapted(nn.TransformerEncoderLayer):
    def _ff_block(self, x: Tensor) -> Tensor:
        return super()._ff_block(x) * 2


class Around(Adapted):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + x


class Instead(Adapted):
    """It has what PyTorch's lacks, and does without attention."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.norm1 = self.norm2 = nn.RMSNorm(4)  # type: ignore[assignment]
        del self.dropout1

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.norm2(x + self._ff_block(self.norm1(x)))


@pytest.mark.parametrize("kind", [Adapted, Around, Instead])
def test_a_subclass_is_refused_only_if_pytorchs_forward_may_run(kind: type[nn.TransformerEncoderLayer]) -> None:
    layer, x = kind(4, 2, 5, batch_first=True).eval(), torch.randn(3, 2, 4)
    with torch.no_grad():
        alone = layer(x)
    is_passed_over = not torch.allclose(alone, layer(x), atol=1e-4)  # with gradients the code runs
    assert is_passed_over == (kind is not Instead)
    study = ToyStudy(lambda n: layer)
    if is_passed_over:
        with pytest.raises(FuseError, match="does not call '_ff_block'"):
            members(study, range(1))
    else:
        members(study, range(1))


def test_another_form_of_an_activation_is_passed_over() -> None:
    """PyTorch takes any GELU for the exact one."""
    layer = nn.TransformerEncoderLayer(4, 2, 5, activation=nn.GELU("tanh"), batch_first=True).eval()
    x = torch.randn(3, 2, 4)
    with torch.no_grad():
        alone = layer(x)
    assert not torch.allclose(alone, layer(x), atol=1e-7), "or there is nothing to refuse any more"
    with pytest.raises(FuseError, match="does not call 'activation'"):
        members(ToyStudy(lambda n: layer), range(1))


REFUSED: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "a late layer": (lambda n: Late(), "the forward makes the module 'late'"),
    "sparse": (lambda n: nn.Embedding(3, 2, sparse=True), "sparse=True cannot be fused; allowed: False"),
    "hooks": (with_hook, r"module '0' \(Linear\) has hooks"),
    "hooks of the whole": (with_outer_hook, r"module '' \(Sequential\) has hooks; allowed: none"),
    "weights of a norm": (
        lambda n: nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2))),
        "has hooks; allowed: torch.nn.utils.parametrizations.spectral_norm",
    ),
    "pruned weights": (
        lambda n: nn.Sequential(prune.random_unstructured(nn.Linear(2, 2), "weight", amount=1)),
        "has hooks; allowed: torch.nn.utils.prune.remove",
    ),
    "tensor hooks": (with_tensor_hook, "parameter 'weight' has hooks; allowed: none"),
    "data parallel": (
        lambda n: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))),
        "module '0' is a DataParallel, .*; allowed: the module inside it",
    ),
    "extra state": (extra_state, "state_dict entry '_extra_state' is a dict; allowed: tensors"),
    "a saved tensor that is none of the model's": (
        with_state_hook,
        "state_dict entry 'more' is no parameter or buffer",
    ),
    "lazy": (lambda n: nn.Sequential(nn.LazyLinear(2)), "parameter '0.weight' has no shape yet"),
}


def test_hooks_on_all_modules_are_refused() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, y: y * 2)
    with pytest.raises(FuseError, match="there are hooks on all modules of the process; allowed: none"):
        members(ToyStudy(lambda n: nn.Linear(2, 2)), range(1))
    handle.remove()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_model(name: str) -> None:
    make, message = REFUSED[name]
    study = ToyStudy(make, lambda n, ps: torch.optim.SGD([nn.Parameter(torch.zeros(1)), *ps]))
    with pytest.raises(FuseError, match=message):
        TrialGroup(study, members(study, range(2)), OpenGate())


def scaled(n: int) -> nn.Module:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.scale = 1.0 + n

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.scale

    return Scaled()


def partly_frozen(n: int) -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(n == 0)
    return model


def sequence(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


DIFFERENT: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "width": (lambda n: sequence(nn.Linear(2, 2 + n)), "module '0': out_features is 3, there 2"),
    "type": (lambda n: sequence((nn.ReLU, nn.Tanh)[n]()), "module '0.0': type is 'torch.nn.*Tanh', there '.*ReLU'"),
    "depth": (lambda n: sequence(*[nn.Linear(2, 2)] * (n + 1)), "add|absent|node"),
    "axis": (lambda n: sequence(nn.Softmax(dim=n)), "module '0.0': dim is 1, there 0"),
    "bias": (lambda n: sequence(nn.Linear(2, 2, bias=n == 0)), "parameter '0.bias': shape is 'absent'"),
    "dtype": (lambda n: nn.Linear(2, 2, dtype=(torch.float32, torch.float64)[n]), "dtype is 'torch.float64'"),
    "momentum": (lambda n: nn.BatchNorm1d(2, momentum=(0.1, None)[n]), "momentum is None is True, there False"),
    "statistics": (lambda n: nn.BatchNorm1d(2, track_running_stats=n == 0), "track_running_stats is False"),
    "frozen": (partly_frozen, "parameter 'weight': requires_grad is False, there True"),
    "number in the code": (scaled, "node 'mul' .*2.0.* there .*1.0"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_models(name: str) -> None:
    make, message = DIFFERENT[name]
    study = ToyStudy(make, lambda n, ps: torch.optim.SGD([*ps] or [nn.Parameter(torch.zeros(1))]))
    if name in ("type", "axis"):  # models without parameters: give them some
        study.make = lambda n: sequence(make(n), nn.Linear(2, 2))
    pair = members(study, range(2))
    assert group_key(pair[0]) != group_key(pair[1])
    with pytest.raises(FuseError, match=f"trial 1 cannot join trial 0: .*({message}).*allowed: the same for all"):
        TrialGroup(study, pair, OpenGate())
    group = TrialGroup(study, pair[:1], OpenGate())
    with pytest.raises(FuseError, match=message):
        group.add(pair[1:])
    assert group.numbers == [0]


def test_equal_structures_have_equal_keys() -> None:
    study = ToyStudy(lambda n: sequence(nn.Linear(2, 2), nn.Dropout(0.1 * n), nn.LayerNorm(2, eps=0.1 + n)))
    keys = {group_key(member) for member in members(study, range(3))}
    assert len(keys) == 1


def refuse_optimizer(make: Callable[[int, Any], torch.optim.Optimizer], message: str) -> None:
    study = ToyStudy(lambda n: nn.Linear(2, 2), make)
    with pytest.raises(FuseError, match=message):
        TrialGroup(study, members(study, range(2)), OpenGate())


def test_refused_optimizers() -> None:
    optim = torch.optim
    refuse_optimizer(lambda n, ps: optim.LBFGS(ps), "optimizer .*LBFGS cannot be fused: its step.. evaluates the model")
    refuse_optimizer(lambda n, ps: optim.Adam(ps, capturable=True), "capturable=True cannot be fused; allowed: False")
    refuse_optimizer(lambda n, ps: optim.SGD(ps, differentiable=True), "differentiable=True cannot be fused")
    refuse_optimizer(lambda n, ps: (optim.Adam, optim.AdamW)[n](ps), "optimizer: type is '.*AdamW', there '.*Adam'")
    refuse_optimizer(lambda n, ps: optim.Adam(ps, amsgrad=n == 0), "optimizer group 0: amsgrad is False, there True")
    refuse_optimizer(lambda n, ps: optim.SGD(ps, maximize=n == 1), "maximize is True, there False")
    refuse_optimizer(lambda n, ps: optim.SGD([*ps][n:]), "optimizer group 0: parameters is")
    foreign = nn.Parameter(torch.zeros(7))
    refuse_optimizer(lambda n, ps: optim.SGD([*ps, foreign]), r"parameter of shape \[7\] that is not the model's")


def test_shared_parameters() -> None:
    shared = nn.Parameter(torch.ones(2, 2))

    def make(n: int) -> nn.Module:
        model = nn.Linear(2, 2)
        model.weight = shared
        return model

    study = ToyStudy(make)
    with pytest.raises(FuseError, match="models 0 and 1 share the tensor 'weight'; allowed: tensors of their own"):
        TrialGroup(study, members(study, range(2)), OpenGate())


def test_no_members() -> None:
    with pytest.raises(FuseError, match="at least one trial"):
        TrialGroup(ToyStudy(lambda n: nn.Linear(2, 2)), [], OpenGate())


def group_of(study: ToyStudy) -> TrialGroup:
    return TrialGroup(study, members(study, range(2)), OpenGate())


def test_loss_and_score_must_be_scalars() -> None:
    class Wrong(ToyStudy):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return outputs.sum(1)

        def score(self, outputs: Tensor, targets: Tensor) -> Any:
            return outputs.sum().item()

    batch = (torch.randn(3, 2), torch.zeros(3))
    group = group_of(Wrong(lambda n: nn.Linear(2, 2), batches=[batch]))
    with pytest.raises(FuseError, match=r"Study.loss returned \[3\]; allowed: a scalar tensor"):
        group.train_step(*batch)
    with pytest.raises(FuseError, match=r"Study\.score returned float; allowed: a scalar tensor"):
        group.evaluate()


def test_a_score_must_be_real() -> None:
    class Wrong(ToyStudy):
        def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return torch.complex(outputs, outputs).sum()

    group = group_of(Wrong(lambda n: nn.Linear(2, 2), batches=[(torch.randn(3, 2), torch.zeros(3))]))
    with pytest.raises(
        FuseError, match=r"Study\.score returned torch\.complex64; allowed: a scalar tensor of a real number"
    ):
        group.evaluate()


def test_no_validation_batches() -> None:
    with pytest.raises(FuseError, match=r"Study\.validation gave no batches"):
        group_of(ToyStudy(lambda n: nn.Linear(2, 2))).evaluate()


def test_input_that_no_model_takes() -> None:
    conv = group_of(ToyStudy(lambda n: nn.Conv2d(2, 2, 1)))
    with pytest.raises(RuntimeError, match=r"Expected 3D .* or 4D .* input to conv2d, but got input of size: \[5, 5\]"):
        conv.train_step(torch.randn(5, 5), torch.zeros(5))
    norm = group_of(ToyStudy(lambda n: nn.BatchNorm2d(2)))
    with pytest.raises(ValueError, match=r"expected 4D input \(got 2D input\)"):
        norm.train_step(torch.randn(2, 2), torch.zeros(2))


def test_members_keep_what_they_had() -> None:
    study = ToyStudy(lambda n: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), batches=[])
    member: Member = build_member(study, 3, {"n": 3})
    weight = member.model[0].weight.clone()  # type: ignore[index]
    group = TrialGroup(study, [member], OpenGate())
    group.train_step(torch.randn(3, 2), torch.zeros(3))
    assert torch.equal(weight, member.model[0].weight)  # type: ignore[index]
    assert member.model.training
