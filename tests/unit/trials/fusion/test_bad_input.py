"""What cannot be done for K trials at once is refused before any of them is trained, by name, with the way out."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import trials
from tests.support.fused_and_solo import ToyStudy, members
from trials import FuseError, TrialGroup
from trials.gate.base import OpenGate

COUNT = 0
SEEN: list[int] = []


class Model(nn.Module):
    """A layer, and a forward given by the test; `looks` makes it one that cannot be traced."""

    def __init__(self, forward: Callable[["Model", Tensor], Tensor], looks: bool) -> None:
        super().__init__()
        self.call, self.looks = forward, looks
        self.a = nn.Linear(3, 3)
        self.calls, self.kept = 0, {"last": 0}
        self.cache: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.looks and len(x) < 1:
            return x
        return self.call(self, x)


class CountsGlobally(Model):
    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return super().forward(x)


class AppendsGlobally(Model):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(1)
        return super().forward(x)


def counts(m: Model, x: Tensor) -> Tensor:
    m.calls += 1
    return m.a(x)


def keeps(m: Model, x: Tensor) -> Tensor:
    m.kept["last"] += 1
    return m.a(x)


def caches(m: Model, x: Tensor) -> Tensor:
    m.cache = m.a(x) + getattr(m, "cache", 0.0)
    return m.cache * 2


def adds(m: Model, x: Tensor) -> Tensor:
    x += 1
    return m.a(x)


def assigns(m: Model, x: Tensor) -> Tensor:
    x[:, 0] = 0
    return m.a(x)


def plain(m: Model, x: Tensor) -> Tensor:
    return m.a(x)


def appends(m: Model, x: Tensor) -> Tensor:
    SEEN.append(1)
    return m.a(x)


def around(inside: Callable[[Model, Tensor], Tensor]) -> Callable[[Model, Tensor], Tensor]:
    return lambda m, x: inside(m, x) * 2


CHANGES: dict[str, tuple[type[Model], Callable[[Model, Tensor], Tensor], str]] = {
    "a global number": (CountsGlobally, plain, "changes the global variable 'COUNT'"),
    "a global list": (AppendsGlobally, plain, "changes the global variable 'SEEN'"),
    "a global list, in an enclosed function": (Model, around(appends), "changes the global variable 'SEEN'"),
    "an attribute": (Model, counts, "changes the attribute 'calls'"),
    "inside an attribute": (Model, keeps, "changes the attribute 'kept'"),
    "a new attribute": (Model, caches, "changes the attribute 'cache'"),
    "the input": (Model, adds, "changes .*input"),
    "a part of the input": (Model, assigns, "changes its input in place"),
    "the input by a method": (Model, lambda m, x: m.a(x.mul_(2)), "changes .*input"),
    "a view of the input": (Model, lambda m, x: m.a(x.view(-1, 3).mul_(2)), "changes .*input"),
}


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_forward_that_changes_more_than_its_output(name: str, looks: bool) -> None:
    kind, forward, message = CHANGES[name]
    study = ToyStudy(lambda n: kind(forward, looks))
    group = None
    with pytest.raises(FuseError, match=f"(Model|Globally|node).*({message}).*allowed"):
        pair = members(study, range(2))
        weights = copy.deepcopy(pair[1].model.state_dict())
        group = TrialGroup(study, pair, OpenGate())
        group.train_step(torch.randn(4, 3), torch.zeros(4))
    if group is not None:
        assert all(torch.equal(value, weights[key]) for key, value in group.extract(1)[0].items())


def linear(*sizes: int, **options: object) -> nn.Module:
    return nn.Sequential(nn.Linear(*sizes, **options), nn.ReLU())  # type: ignore[arg-type]


def tied_pair() -> list[nn.Module]:
    one, other = linear(2, 2), linear(2, 2)
    other[0].bias = one[0].bias  # type: ignore[index]
    return [one, other]


def two_devices() -> list[nn.Module]:
    models: list[nn.Module] = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    models[0].get_submodule("1").to("meta")
    return models


class Untraced(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.options = {"scale": [number]}
        self.act = lambda x: x * number

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.a(x)) if len(x) else x


def local_class(number: float) -> nn.Module:
    class Local(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * number if len(x) else x

    return Local()


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.others = nn.Linear(2, 2), [nn.Linear(2, 2)]

    def forward(self, x: Tensor) -> Tensor:
        return self.others[0](self.a(x))


MODELS: dict[str, tuple[Callable[[], list[nn.Module]], str]] = {
    "none": (lambda: [], "no models to fuse; allowed: at least one"),
    "other sizes": (
        lambda: [linear(2, 2), linear(2, 3)],
        "model 1 .*: module '0': out_features is 3, there 2; allowed",
    ),
    "other layers": (lambda: [linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh())], "module '1': type is .*Tanh"),
    "other dtypes": (
        lambda: [linear(2, 2), linear(2, 2, dtype=torch.float64)],
        "parameter '0.weight': dtype is 'torch.float64', there 'torch.float32'; allowed",
    ),
    "other devices": (
        lambda: [linear(2, 2), linear(2, 2, device="meta")],
        "parameter '0.weight': device is 'meta', there 'cpu'; allowed",
    ),
    "two devices": (two_devices, "'1.weight' is on meta, and '0.weight' on cpu; allowed: one device"),
    "shared state": (tied_pair, "models 0 and 1 share the tensor '0.bias'; allowed: tensors of their own"),
    "the same model twice": (lambda: [linear(2, 2)] * 2, "models 0 and 1 share the tensor '0.weight'"),
    "other numbers in code": (lambda: [Untraced(1.0), Untraced(2.0)], "module '': (options|act) is .*2.0.*there.*1.0"),
    "other classes of one name": (lambda: [local_class(1.0), local_class(2.0)], "module '': class is .*2.0.*1.0"),
    "modules in a list": (lambda: [Hidden(), Hidden()], "module '': others is"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_fused(name: str) -> None:
    make, message = MODELS[name]
    with pytest.raises(FuseError, match=message):
        trials.fuse(make())


def test_generators_for_other_models() -> None:
    with pytest.raises(FuseError, match="1 generators for 2 models; allowed: one for each"):
        trials.fuse([linear(2, 2), linear(2, 2)], [torch.Generator()])


def test_optimizer_over_two_models() -> None:
    models = [nn.Linear(2, 2) for _ in range(2)]
    both = [parameter for model in models for parameter in model.parameters()]
    study = ToyStudy(lambda n: models[n], lambda n, ps: torch.optim.SGD(both, lr=0.1))
    with pytest.raises(FuseError, match=r"optimizer .*has a parameter of shape .* that is not the model's"):
        TrialGroup(study, members(study, range(2)), OpenGate())


def test_tracing_leaves_the_users_model() -> None:
    model = Model(caches, looks=False)
    before = dict(vars(model))
    with pytest.raises(FuseError, match="cache"):
        trials.fuse([model])(torch.randn(2, 3))
    assert vars(model) == before
