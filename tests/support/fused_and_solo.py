"""What the tests of fused training share: a study around any model, its solo run, and a gate that remembers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trials import Member, Study, TrialGroup, build_member
from trials.gate.base import HOST_UNIT, OpenGate
from trials.training.member import Built, build

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other

Batch = tuple[Any, Any]

OPTIMIZERS: dict[str, Callable[[int, Iterable[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda n, ps: torch.optim.SGD(ps, lr=0.01 * (n + 1), momentum=0.3 * n, weight_decay=0.01 * n),
    "adam": lambda n, ps: torch.optim.Adam(
        ps, lr=0.003 * (n + 1), betas=(0.9 - 0.1 * n, 0.99 - 0.03 * n), eps=10.0 ** (-8 + n), weight_decay=0.02 * n
    ),
    "adamw": lambda n, ps: torch.optim.AdamW(
        ps, lr=0.004 * (n + 1), betas=(0.8, 0.9 + 0.02 * n), eps=1e-4, weight_decay=0.1 * n
    ),
}
"""Each with hyperparameters that depend on the trial's number, zero weight decay and momentum among them.

AdamW's eps is large: softmax and norms cancel biases, and a small one would turn that rounding noise into steps."""


class ToyStudy(Study):
    """A study around a function that makes a model for trial ``params["n"]``."""

    trials = 8
    epochs = 1

    def __init__(
        self, make: Callable[[int], nn.Module], optimizer: Any = "adamw", batches: Sequence[Batch] = ()
    ) -> None:
        self.make = make
        self.make_optimizer = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        self.data = batches

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {"n": trial.number}

    def model(self, params: dict[str, Any]) -> nn.Module:
        return self.make(params["n"])

    def optimizer(
        self, params: dict[str, Any], model: nn.Module
    ) -> torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]:
        return self.make_optimizer(params["n"], model.parameters())

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.sin() * outputs).mean() + 0.1 * outputs.square().sum() / len(targets)

    def batches(self, epoch: int) -> Iterable[Batch]:
        return self.data

    def validation(self) -> Iterable[Batch]:
        return self.data

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.mean()


class RecordingGate(OpenGate):
    """A gate that writes down which units it was asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.entered: list[str] = []

    @property
    def units(self) -> list[str]:
        """One after another, each once, though it may have been asked for between its parts as well."""
        return [name for name, _ in groupby(self.entered)]

    def use(self, units: Sequence[str], trials: int) -> None:
        self.names = list(units)

    def enter(self, unit: int) -> None:
        self.entered.append("host" if unit == HOST_UNIT else self.names[unit])

    def rest(self) -> None:
        self.entered.append("rest")


class AtOnce(Executor):
    """In this thread."""

    def submit(self, do: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(do(*args, **kwargs))
        return future


def only_optimizer(trial: Member | Built) -> torch.optim.Optimizer:
    """The optimizer of a trial that has one."""
    assert isinstance(trial.optimizer, torch.optim.Optimizer)
    return trial.optimizer


class Solo:
    """One trial trained alone by ordinary PyTorch, from the same seed. Nothing traces its model or looks at it."""

    def __init__(self, study: Study, number: int, params: dict[str, Any] | None = None) -> None:
        self.study, self.params = study, params or {"n": number}
        built = build(study, number, self.params)
        self.model, self.optimizer, self.rng_state = built.model, only_optimizer(built), built.rng_state
        self.loss = float("nan")

    def step(self, inputs: Any, targets: Any) -> None:
        with torch.random.fork_rng():
            torch.set_rng_state(self.rng_state)
            self.model.train()
            getattr(self.optimizer, "train", nothing)()
            self.optimizer.zero_grad()
            loss = given_params(self.study.loss, self.params, called(self.model, inputs), targets)
            loss.backward()
            self.optimizer.step()
            self.rng_state = torch.get_rng_state()
        self.loss = loss.item()

    @torch.no_grad()
    def score(self) -> float:
        self.model.eval()
        getattr(self.optimizer, "eval", nothing)()
        batches = list(self.study.validation())
        score = partial(given_params, self.study.score, self.params)
        with torch.random.fork_rng():
            torch.set_rng_state(self.rng_state)
            total = sum(score(called(self.model, x), y).item() * length(x) for x, y in batches)
            self.rng_state = torch.get_rng_state()
        return total / sum(length(x) for x, _ in batches)


def called(model: nn.Module, inputs: Any) -> Any:
    """What a model returns for the inputs of a batch; see `Study.batches`."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def given_params(function: Callable[..., Tensor], params: dict[str, Any], outputs: Any, targets: Any) -> Tensor:
    """What a study's loss or score returns, whether it takes the hyperparameters or not."""
    takes = "params" in signature(function).parameters
    return function(outputs, targets, params) if takes else function(outputs, targets)


def length(inputs: Any) -> int:
    """How many examples a batch has."""
    return next(len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim)


def nothing() -> None:
    """What most optimizers do between training and evaluation."""


def members(study: Study, numbers: Iterable[int]) -> list[Member]:
    return [build_member(study, number, {"n": number}) for number in numbers]


def close(actual: Any, expected: Any, what: str) -> None:
    """Equal to 1e-10, or to 1e-11 of the tensor's largest value: sums that cancel leave no more of one element."""
    largest = 1.0
    if isinstance(expected, Tensor) and expected.is_floating_point() and expected.numel():
        largest = max(1.0, float(expected.detach().abs().nan_to_num(0, 0, 0).max()))
    torch.testing.assert_close(
        actual,
        expected,
        rtol=1e-10,
        atol=1e-11 * largest,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def alike(actual: Any, expected: Any, what: str) -> None:
    """Nested containers of the same form, whose numbers are close and all else equal."""
    if isinstance(expected, (float, Tensor)):
        close(actual, expected, what)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), what
        for key in expected:
            alike(actual[key], expected[key], f"{what} {key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), what
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            alike(one, other, f"{what} {index}")
    else:
        assert actual == expected, what


def same_bits(one: Any, other: Any) -> bool:
    """Whether two states, however nested, are equal in every bit: NaN equals itself, and 0 is not -0."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same_bits(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other or (one != one and other != other))


def assert_same_trial(group: TrialGroup, row: int, solo: Solo) -> None:
    """The fused trial's weights, buffers and optimizer state are those of its solo run."""
    model, optimizer = group.extract(row)
    expected = solo.model.state_dict()
    assert list(model) == list(expected)
    for name, value in expected.items():
        assert model[name].dtype == value.dtype
        close(model[name], value, f"row {row} {name}")
    alike(optimizer, solo.optimizer.state_dict(), f"row {row} optimizer")


def assert_fused_is_solo(
    make: Callable[[int], nn.Module], inputs: Sequence[Tensor], optimizer: Any = "adamw", steps: int = 3, size: int = 3
) -> TrialGroup:
    """Train `size` trials fused and alone on the same batches, in float64, and compare everything."""

    def make_double(number: int) -> nn.Module:
        return make(number).double()

    batches = [(x.double() if x.is_floating_point() else x, torch.zeros(len(x))) for x in inputs]
    study = ToyStudy(make_double, optimizer, batches)
    gate = RecordingGate()
    group = TrialGroup(study, members(study, range(size)), gate)
    solos = [Solo(study, number) for number in range(size)]
    for step in range(steps):
        x, y = batches[step % len(batches)]
        group.train_step(x, y)
        for solo in solos:
            solo.step(x, y)
    close(group.losses_K(), torch.tensor([solo.loss for solo in solos], dtype=torch.float64), "loss")
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)
    close(group.evaluate(), [solo.score() for solo in solos], "score")
    return group
