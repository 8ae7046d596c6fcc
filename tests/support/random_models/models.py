"""Random models: descriptions drawn by hypothesis, and the modules and studies that they describe."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from tests.support.fused_and_solo import OPTIMIZERS, Batch
from tests.support.layer_cases import LAYERS, SHAPES, before, fresh
from tests.support.own_optimizers import Adapting, Assigning, Averaging, Lookahead, Noisy, Remembering
from tests.support.random_models import calls, state, surroundings
from tests.support.random_models.blocks import COMMON, REFUSED, Block
from tests.support.random_models.losses import LOSSES, PURE, SCORES
from trials import Study

BLOCKS = {**COMMON, **REFUSED}
assert calls and state and surroundings  # they fill the tables

Shape = tuple[int, ...]
INNER: dict[str, Callable[[Shape, int], nn.Module]] = {
    "linear": lambda shape, n: nn.Linear(shape[-1], shape[-1]),
    "layer norm": lambda shape, n: nn.LayerNorm(shape[-1], eps=1e-3 * (n + 1)),
    "batch norm": lambda shape, n: _batch_norm(shape, 0.1 * (n + 1)),
    "dropout": lambda shape, n: nn.Dropout(0.1 + 0.1 * n),
    "prelu": lambda shape, n: nn.PReLU(init=0.1 * (n + 1)),
    "tanh": lambda shape, n: nn.Tanh(),
    "residual": lambda shape, n: Residual(nn.Sequential(nn.Linear(shape[-1], shape[-1]), nn.GELU())),
}
"""Layers that keep the shape of their input."""

LISTS: dict[str, tuple[Shape, Callable[[int], nn.Module]]] = {
    "mean pool of own sides": (SHAPES[2], lambda n: nn.AdaptiveAvgPool2d(_sides(n))),
    "max pool of own sides": (SHAPES[2], lambda n: nn.MaxPool2d(_sides(n))),
    "layer norm of a list": (SHAPES[1], lambda n: nn.LayerNorm([4, 8])),
    "own width": (SHAPES[0], lambda n: nn.Linear(6, 5 + n % 2)),
    "own depth": (SHAPES[0], lambda n: nn.Sequential(*(nn.Linear(6, 6) for _ in range(1 + n % 2)))),
}
"""Layers with lists as settings, or of another structure for other trials."""

CASES_DIFFER_FOR = 3
"""Trials with other numbers have the same settings again; some are probabilities."""
CASES = {**LAYERS, **LISTS}

OWN: dict[str, Callable[[int, Any], torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "groups": lambda n, ps: _grouped(n, list(ps)),
    "rmsprop": lambda n, ps: torch.optim.RMSprop(ps, lr=0.002 * (n + 1), eps=1e-2, momentum=0.2 * n),
    "nadam": lambda n, ps: torch.optim.NAdam(ps, lr=0.004 * (n + 1), eps=1e-3),
    "in param groups": lambda n, ps: Adapting(ps, lr=0.02 * (n + 1)),
    "two modes": lambda n, ps: Averaging(ps, lr=0.02 * (n + 1), beta=0.9 - 0.1 * n),
    "in attributes": lambda n, ps: Remembering(ps, lr=0.02 * (n + 1)),
    "around another": lambda n, ps: Lookahead(torch.optim.SGD(ps, lr=0.02 * (n + 1), momentum=0.5), 2 + n % 2),
    "assigned data": lambda n, ps: Assigning(ps, lr=0.002 * (n + 1)),
    "noise": lambda n, ps: Noisy(ps, lr=0.02 * (n + 1)),
}


@dataclass(frozen=True)
class Stage:
    """A part of a model.

    Attributes:
        name: of a layer in `CASES`, or of a block.
        inner: what a block computes with, or a layer in `INNER`; None: this is a layer of `CASES`.
    """

    name: str
    inner: "Stage | str | None" = None

    def blocks(self) -> list[str]:
        """The names of all blocks in it."""
        inside = self.inner.blocks() if isinstance(self.inner, Stage) else []
        return [] if self.inner is None else [self.name, *inside]


@dataclass(frozen=True)
class Spec:
    """A model and how it is trained.

    Attributes:
        stages: one after another.
        form: of the outputs, and of the container of the stages.
        loss: a name in `LOSSES`.
        score: a name in `SCORES`.
        optimizer: a name in `OWN`.
        size: how many trials.
        autocast: whether in bfloat16.
    """

    stages: tuple[Stage, ...]
    form: str
    loss: str
    score: str
    optimizer: str
    size: int
    autocast: bool

    @property
    def plain(self) -> bool:
        """Whether it is made of the layers of `layer_cases` alone."""
        own = self.optimizer in OPTIMIZERS and self.loss == self.score == "plain"
        return own and all(stage.name in LAYERS and stage.inner is None for stage in self.stages)

    def blocks(self) -> list[str]:
        """The names of all blocks."""
        return [name for stage in self.stages for name in stage.blocks()]


IMPOSSIBLE = {("checkpoint", "derivatives of a function")}
"""Outer block, inner block: what PyTorch itself cannot train, here `torch.func.grad` below hooks on saved tensors."""
SHARE_REFUSED = 0.01
"""How many of the blocks are ones that are always refused."""
FORMS = ("tensor", "tuple", "dict", "nested")


def specs(plain: bool = False) -> st.SearchStrategy[Spec]:
    """Descriptions of random models; `plain` ones have no blocks.

    Each is drawn from a seed, since hypothesis would repeat the parts of one in another.
    """
    return st.integers(0, 2**63 - 1).map(lambda seed: spec_of(random.Random(seed), plain))


def spec_of(draws: random.Random, plain: bool = False) -> Spec:
    """Draw one description."""
    return Spec(
        tuple(_stage(draws, plain) for _ in range(draws.randint(1, 3))),
        draws.choice(FORMS),
        "plain" if plain or draws.random() < 0.6 else draws.choice(sorted(LOSSES)),
        "plain" if plain or draws.random() < 0.6 else draws.choice(sorted(SCORES)),
        draws.choice(sorted(OPTIMIZERS if plain or draws.random() < 0.6 else OWN)),
        draws.randint(2, 4),
        draws.random() < 0.2,
    )


def _stage(draws: random.Random, plain: bool) -> Stage:
    kind = draws.random()
    if plain or kind < 0.2:
        return Stage(draws.choice(sorted(LAYERS)))
    if kind < 0.25:
        return Stage(draws.choice(sorted(LISTS)))
    inner: Stage | str = draws.choice(sorted(INNER))
    if kind >= 0.5:
        return Stage(_block(draws), inner)
    nested, outer = Stage(_block(draws), inner), _block(draws)
    while (outer, nested.name) in IMPOSSIBLE:
        outer = _block(draws)
    return Stage(outer, nested)


def _block(draws: random.Random) -> str:
    return draws.choice(sorted(REFUSED if draws.random() < SHARE_REFUSED else COMMON))


class RandomStudy(Study):
    """Trains what a `Spec` describes."""

    trials, epochs = 8, 1

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.autocast = torch.bfloat16 if spec.autocast else None
        self.kind = torch.float32 if spec.autocast else torch.float64
        pure = PURE if spec.form == "tensor" else {}
        # as methods of no instance, which can be traced
        vars(self).update(loss=pure.get(spec.loss, LOSSES[spec.loss]), score=pure.get(spec.score, SCORES[spec.score]))
        self.data = self.batches(0)

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {"n": trial.number}

    def model(self, params: dict[str, Any]) -> nn.Module:
        model = Net(self.spec, params["n"]).to(self.kind)
        for block in model.modules():
            if isinstance(block, Block):
                block.tie()
        return model

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return OWN[self.spec.optimizer](params["n"], model.parameters())

    def batches(self, epoch: int) -> Sequence[Batch]:
        shape = start_of(self.spec)
        stream = torch.Generator().manual_seed(len(self.spec.stages))
        return [(torch.randn(shape, generator=stream, dtype=self.kind), torch.ones(shape[0])) for _ in range(2)]

    def validation(self) -> Sequence[Batch]:
        return self.data

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        raise NotImplementedError  # each has its own

    def score(self, outputs: Any, targets: Tensor) -> Tensor:
        raise NotImplementedError


class Net(nn.Module):
    """Stages one after another, each fed with as many numbers as it needs."""

    def __init__(self, spec: Spec, n: int) -> None:
        super().__init__()
        shape = start_of(spec)
        stages: list[nn.Module] = []
        for index, stage in enumerate(spec.stages):
            made, shape = made_stage(stage, shape, n, index)
            stages.append(made)
        self.first, *rest = stages
        self.rest = nn.ModuleList(rest) if spec.form in ("tensor", "dict") else nn.Sequential(*rest)
        self.fit, self.head = Fit(shape, SHAPES[0]), nn.Linear(SHAPES[0][-1], 3)
        self.form = spec.form

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        seen = [x]
        if isinstance(self.rest, nn.Sequential):
            x = self.rest(x)
        else:
            for stage in self.rest:
                x = stage(x)
                seen.append(x)
        y = self.head(self.fit(x))
        if self.form == "tensor":
            return y
        if self.form == "tuple":
            return y, x
        return {"y": y, "seen": seen} if self.form == "dict" else {"all": [(y, {"x": x}), seen[0]]}


class Fit(nn.Module):
    """Repeats or drops numbers until they have another shape, and makes them differ."""

    def __init__(self, given: Shape, wanted: Shape) -> None:
        super().__init__()
        self.given, self.wanted = given, wanted
        self.count = torch.Size(wanted).numel()
        self.times = -(-self.count // torch.Size(given).numel())
        self.ramp: Tensor
        self.register_buffer("ramp", torch.linspace(-0.5, 0.5, self.count).view(wanted))

    def forward(self, x: Tensor) -> Tensor:
        if self.given != self.wanted:
            x = x.reshape(-1)
            x = torch.cat([x] * self.times)[: self.count].view(self.wanted)
        return x + self.ramp.to(x.dtype)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def start_of(spec: Spec) -> Shape:
    """The shape of a batch."""
    first = spec.stages[0]
    return SHAPES[len(spec.stages) % 3] if first.inner is not None else CASES[first.name][0]


def made_stage(stage: Stage, shape: Shape, n: int, index: int) -> tuple[nn.Module, Shape]:
    """Return the module of a stage, fed with an input of `shape`, and the shape of its output."""
    if stage.inner is not None:
        fit, shape = (nn.Identity(), shape) if len(shape) > 1 else (Fit(shape, SHAPES[0]), SHAPES[0])
        return nn.Sequential(fit, made_block(stage, shape, n)), shape
    wanted, make = CASES[stage.name]
    # a copy, for some are one object in all trials
    layer = copy.deepcopy(fresh(make(n % CASES_DIFFER_FOR)))
    weights = [before(stage.name)] if stage.name in LAYERS else []
    made = nn.Sequential(*([Fit(shape, wanted)] if index else []), *weights, layer)
    with torch.random.fork_rng(), torch.no_grad():
        return made, tuple(copy.deepcopy(made).eval()(torch.zeros(shape)).shape)


def made_block(stage: Stage, shape: Shape, n: int) -> Block:
    """Return a block, and what it computes with."""
    inner = stage.inner
    made = made_block(inner, shape, n) if isinstance(inner, Stage) else INNER[str(inner)](shape, n)
    return BLOCKS[stage.name](made, shape[-1], n)


def tensors_of(outputs: Any) -> list[Tensor]:
    """All tensors of a model's outputs, in order."""
    return [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor)]


def _batch_norm(shape: Shape, momentum: float) -> nn.Module:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    return kind(shape[1], momentum=momentum)


def _sides(n: int) -> Any:
    return [1, 2] if n % 2 else [2, 1]


def _grouped(n: int, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": parameters[::2]},
        {"params": parameters[1::2], "lr": 0.02 * (n + 1), "momentum": 0.1 * n},
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.01)
