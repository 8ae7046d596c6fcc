"""Models with the inputs that people give them, and batches for them: dicts, tuples, masks, plain values, None."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.fused_and_solo import Batch
from tests.support.rich_study import RichStudy

B = 5


class TreeStudy(RichStudy):
    """Its loss and its score take outputs and targets in any containers."""

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        loss = torch.stack([(leaf.sin() * leaf).mean() for leaf in made]).sum()
        for leaf in tree_leaves(targets):
            if isinstance(leaf, Tensor):
                loss = loss + (made[0].mean() - leaf.double().mean()).square()
        return loss

    def score(self, outputs: Any, targets: Any) -> Tensor:
        return self.loss(outputs, targets) + 1


class Two(nn.Module):
    """The base of models with two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)
        self.drop = nn.Dropout(0.3)


class Pair(Two):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.drop(self.one(x)).tanh() * self.other(y)


class ByName(Two):
    def forward(self, x: Tensor, *, y: Tensor) -> Any:
        return {"left": self.one(x).tanh(), "right": (self.other(y), None)}


class Masked(Two):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.one(x).masked_fill(~mask.unsqueeze(-1), 0.0)
        return self.drop(hidden).sum(1) / mask.sum(-1, keepdim=True).clamp(min=1)


class MaybeMasked(Masked):
    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        hidden = self.drop(self.one(x))
        return (hidden if mask is None else hidden.masked_fill(~mask.unsqueeze(-1), 0.0)) * scale


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        made: Tensor = self.attention(x, x, x, key_padding_mask=padding)[0]
        return made


class Weighing(Two):
    """Its mask is of numbers, of which a small change would change all."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = (self.one(x).sum(-1) + (1 - mask) * -1e12).softmax(-1)
        return (weights.unsqueeze(-1) * self.other(x)).sum(1)


class Nested(Two):
    def forward(self, batch: dict[str, Any], extra: Any = None) -> Tensor:
        x, rest = batch["x"], batch["rest"]
        made: Tensor = self.one(x) + self.other(rest[0])
        return made if rest[1] is None else made * rest[1]


class ByKeywords(Two):
    def forward(self, **given: Tensor) -> Tensor:
        made = [layer(given[name]) for layer, name in zip((self.one, self.other), given, strict=True)]  # in their order
        return made[0].tanh() - 2 * made[1]


class Starred(Two):
    def forward(self, *given: Tensor) -> Tensor:
        made: Tensor = self.one(given[0])
        return made if len(given) == 1 else made + self.other(given[1])


class First(Two):
    """The first of several inputs, and nothing of the rest."""

    def forward(self, *given: Tensor) -> Tensor:
        made: Tensor = self.one(given[0]).tanh()
        return made


class Tokens(nn.Module):
    """Whole numbers alone; the first input may be absent."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4), nn.Embedding(6, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, ids: Tensor | None = None, places: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        hidden = self.places(places) if ids is None else self.words(ids)
        if ids is not None and places is not None:
            hidden = hidden + self.places(places)
        made: Tensor = self.head(self.norm(hidden))
        return made if mask is None else made * mask.unsqueeze(-1)


class Branching(Two):
    """Which layer runs depends on the data."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        made: Tensor = self.one(x) if mask.any() else self.other(x)
        return made


class WithOwnLoss(Two):
    """Its labels are among its inputs."""

    def forward(self, x: Tensor, labels: Tensor | None = None, **options: Any) -> dict[str, Any]:
        logits = self.one(x)
        found = {"logits": logits}
        return found if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **found}


class Normed(Two):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made: Tensor = self.norm(self.one(x)) + self.other(y)
        return made


def x(n: int, *shape: int) -> Tensor:
    return torch.randn(B, *(shape or (4,)), generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def ids(n: int, most: int, *shape: int) -> Tensor:
    return torch.randint(most, (B, *shape), generator=torch.Generator().manual_seed(n))


def mask(n: int) -> Tensor:
    """The last batch's is all False."""
    return (ids(n, 2, 6) > 0) & (n % 3 != 2)


def infinite(n: int) -> Tensor:
    """A mask that is added: 0.5 or minus infinity, this never everywhere."""
    found = torch.full((B, 6), 0.5, dtype=torch.float64).masked_fill(ids(n, 2, 6) > 0, -torch.inf)
    found[:, 0] = 0.5
    return found


def views(n: int) -> tuple[Tensor, Tensor]:
    base = x(n, 6)
    return base[:, 1:5], base[:, :4]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "tuple": (Pair, lambda n: ((x(n), x(n + 50)), x(n, 1))),
    "list": (Pair, lambda n: ([x(n), x(n + 50)], x(n, 1))),
    "the same twice": (Pair, lambda n: ((x(n),) * 2, None)),
    "views of one another": (Pair, lambda n: (views(n), (views(n)[0], views(n)[0][1:]))),
    "dict": (Pair, lambda n: ({"y": x(n), "x": x(n + 50)}, {"a": x(n, 2), "b": (None, 3)})),
    "by name alone": (ByName, lambda n: ({"x": x(n), "y": x(n + 50)}, None)),
    "keys in another order": (Pair, lambda n: (dict(sorted({"y": x(n), "x": x(9)}.items(), reverse=n % 2 > 0)), None)),
    "keys whose order counts": (
        ByKeywords,
        lambda n: (dict(sorted({"y": x(n), "x": x(9)}.items(), reverse=n % 2 > 0)), None),
    ),
    "bool mask": (Masked, lambda n: ({"x": x(n, 6, 4), "mask": mask(n)}, x(n))),
    "mask by position": (Masked, lambda n: ((x(n, 6, 4), mask(n)), mask(n))),
    "mask where none is traced": (MaybeMasked, lambda n: ({"x": x(n, 6, 4), "mask": mask(n)}, None)),
    "None for a mask": (MaybeMasked, lambda n: ({"x": x(n, 6, 4), "mask": None}, None)),
    "mask now and then": (MaybeMasked, lambda n: ({"x": x(n, 6, 4), **({"mask": mask(n)} if n % 2 else {})}, None)),
    "plain values": (MaybeMasked, lambda n: ({"x": x(n, 6, 4), "scale": 1.0 + n // 2}, {"weight": n})),
    "padding of attention": (Attending, lambda n: ({"x": x(n, 6, 4), "padding": mask(n) & (ids(n, 6, 6) > 0)}, None)),
    "padding of -inf": (Attending, lambda n: ({"x": x(n, 6, 4), "padding": infinite(n)}, None)),
    "a mask of numbers": (Weighing, lambda n: ({"x": x(n, 6, 4), "mask": mask(n).double()}, None)),
    "nested": (Nested, lambda n: (({"x": x(n), "rest": (x(n + 50), None if n % 2 else 2.0)},), [x(n)])),
    "nested by name": (Nested, lambda n: ({"batch": {"x": x(n), "rest": [x(n), x(n, 1)]}, "extra": {}}, None)),
    "starred": (Starred, lambda n: ((x(n), x(n + 50))[: 1 + n % 2], None)),
    "starred, one tensor": (First, lambda n: (x(n), x(n))),
    "whole numbers": (Tokens, lambda n: ({"ids": ids(n, 7, 6), "places": ids(n + 9, 6, 6)}, ids(n, 3))),
    "the first is absent": (Tokens, lambda n: ({"places": ids(n, 6, 6), "mask": mask(n)}, None)),
    "the first now and then": (Tokens, lambda n: ({("ids", "places")[n % 2]: ids(n, 6, 6)}, None)),
    "a branch on a mask": (Branching, lambda n: ((x(n), mask(n)), None)),
    "labels inside": (WithOwnLoss, lambda n: ({"x": x(n), "labels": ids(n, 3)}, None)),
    "no labels, but options": (WithOwnLoss, lambda n: ({"x": x(n), "verbose": False}, x(n))),
    "statistics": (Normed, lambda n: ((x(n), x(n + 50)), x(n))),
    "numbers without axes": (MaybeMasked, lambda n: ({"scale": torch.tensor(0.5 * n), "x": x(n, 6, 4)}, x(n)[0, 0])),
}
"""By name: what makes a model, and the batch that is made of a number."""


def study_of(name: str, count: int = 4) -> TreeStudy:
    """The study of a case, with so many batches."""
    make, batch = CASES[name]
    return TreeStudy(lambda n: make().double(), "adamw", [batch(n) for n in range(count)])


def changed(batch: Batch, number: int) -> Batch:
    """Another batch of the same form."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        return leaf + 0.1 * number if (leaf.double() % 1).any() else leaf.roll(number, -1)

    made: Batch = tree_map(change, batch)
    return made


def own_batches(study: TreeStudy, numbers: list[int]) -> Iterator[list[Batch]]:
    """For each batch of the study, one for each trial."""
    for batch in study.data:
        yield [changed(batch, number) for number in numbers]
