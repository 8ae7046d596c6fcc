"""The coordinate check of a study's model: how far activations move in the first steps, against the width.

Where rates transfer, surrogates move as far as the target, so that lines are flat (Tensor Programs V, appendix D.1).
The control trains the same surrogates without multipliers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import exp, inf, log, log2
from typing import Any

import numpy as np
import optuna
import torch
from optuna.distributions import BaseDistribution, CategoricalDistribution
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.utils._pytree import tree_leaves

from trials.fusion.own_code.streams import undisturbed
from trials.gate.base import OpenGate
from trials.shrinking.axes.run import copied, run
from trials.shrinking.settings import Shrink
from trials.study import Study
from trials.surrogates import settings_of, shrinking, that_fuse
from trials.training.group import TrialGroup
from trials.training.member import build_member
from trials.training.shrunk import for_target, inputs_of

STEPS, SEEDS = 4, 3

STEEP = 0.3
"""A layer that moves with a steeper power of the width is named. Noise of three seeds is about half of it."""


@dataclass(frozen=True, slots=True)
class Moved:
    """How far the activations of each layer have moved.

    Attributes:
        scales: the factors of width, the narrowest model first; 1 is the target.
        shrunk: layer -> the mean of |x after - x before|, for each scale.
        plain: the same for surrogates without multipliers.
    """

    scales: list[int]
    shrunk: dict[str, list[float]]
    plain: dict[str, list[float]]

    def steep(self) -> dict[str, float]:
        """The layers whose movement depends on the width: layer -> the power of the width, the steepest first."""
        found = {name: slope_of(self.scales, moved) for name, moved in self.shrunk.items()}
        return dict(sorted(((n, s) for n, s in found.items() if abs(s) > STEEP), key=lambda each: -abs(each[1])))


def slope_of(scales: Sequence[int], moved: Sequence[float]) -> float:
    """The power of the width with which a layer moves; 0 if it does not move, infinity if it has diverged."""
    if not all(each < inf for each in moved):  # NaN, too
        return inf
    if not all(moved):
        return 0.0
    return float(np.polyfit([-log2(scale) for scale in scales], [log2(each) for each in moved], 1)[0])


def coordinates(study: Study, scale: int | None) -> Moved:
    """Train the study's model at several scales for a few steps, with hyperparameters from the middle of their ranges.

    Args:
        study: the user's.
        scale: the largest; None: the study's.

    Raises:
        ShrinkError: it cannot be shrunk, or no scale is given.
    """
    settings = replace(settings_of(study, scale), regularizers=True)
    with undisturbed():
        params = study.suggest(Middle({}))
    scales = [settings.by]
    while scales[-1] % 2 == 0:
        scales.append(scales[-1] // 2)
    scales += [] if scales[-1] == 1 else [1]
    found = {
        way: [_at(study, settings, params, each, way == "plain") for each in scales] for way in ("shrunk", "plain")
    }
    alike = {
        way: {name: [each[name] for each in of] for name in of[0] if all(name in o for o in of)}
        for way, of in found.items()
    }
    return Moved(scales, alike["shrunk"], alike["plain"])


def _at(study: Study, settings: Shrink, params: dict[str, Any], scale: int, is_plain: bool) -> dict[str, float]:
    """How far each layer moves, as the mean over some seeds, which are trained together if they can be."""
    own = for_target(settings) if scale == 1 else replace(settings, by=scale)
    with shrinking(study, own), undisturbed():
        made = [build_member(study, seed, params) for seed in range(SEEDS)]
        inputs = [inputs_of(study, params, member.number) for member in made]
        before = [_activations(member.model, own) for member, own in zip(made, inputs, strict=True)]
        for alike in that_fuse(replace(each, roles=None) if is_plain else each for each in made):
            group = TrialGroup(study, alike, OpenGate())
            for batch in islice(group.batches(0), STEPS * study.accumulate):
                group.train_step(*batch)
            for row, number in enumerate(group.numbers):
                made[number].model.load_state_dict(group.extract(row)[0])
        after = [_activations(member.model, own) for member, own in zip(made, inputs, strict=True)]
    pairs = list(zip(before, after, strict=True))
    same = [n for n in before[0] if all(a[n].shape == b[n].shape for a, b in pairs)]  # others got other examples
    return {n: sum(float((b[n] - a[n]).abs().mean()) for a, b in pairs) / SEEDS for n in same}


@torch.no_grad()
def _activations(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The first output of each layer that holds parameters."""
    found: dict[str, Tensor] = {}

    def note(name: str, made: Any) -> None:
        first = next((each for each in tree_leaves(made) if isinstance(each, Tensor)), None)
        if first is not None and first.is_floating_point():
            found[name] = first.double().clone()

    handles = [
        module.register_forward_hook(lambda _m, _a, made, name=name: note(name, made))
        for name, module in model.named_modules()
        if name and _is_layer(module)
    ]
    training = model.training
    note("the output", run(model.eval(), copied(batch)))
    model.train(training)
    for handle in handles:
        handle.remove()
    return found


def _is_layer(module: nn.Module) -> bool:
    """Whether it holds parameters; what makes a layer's weight of them puts out no activations."""
    return bool(module._parameters or is_parametrized(module)) and not isinstance(module, ParametrizationList)


class Middle(optuna.trial.FixedTrial):  # type: ignore[misc]  # of an untyped package
    """Suggests the middle of whatever range is asked for, or the first choice."""

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        self._distributions[name] = distribution
        if isinstance(distribution, CategoricalDistribution):
            return distribution.choices[0]
        low, high = distribution.low, distribution.high
        middle = exp((log(low) + log(high)) / 2) if distribution.log else (low + high) / 2
        return type(low)(middle)


_WIDE, _HIGH, _LEFT, _TOP, _GAP = 330, 260, 60, 50, 40
_COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
)


def svg(moved: Moved) -> str:
    """Two panels, with multipliers and without: a line for each layer, over the width."""
    every = [each for way in (moved.shrunk, moved.plain) for own in way.values() for each in own if 0 < each < inf]
    low, high = (log(min(every)), log(max(every))) if every else (0.0, 1.0)
    high = high if high > low else low + 1
    rows = len(moved.shrunk)
    width, height = _LEFT + 2 * _WIDE + _GAP + 20, _TOP + _HIGH + 50 + 16 * -(-rows // 2)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">How far activations move in {STEPS} steps: mean |x after − x before|'
        "</text>",
    ]
    for row, (title, own) in enumerate((("with multipliers", moved.shrunk), ("without", moved.plain))):
        drawn += _panel(_LEFT + row * (_WIDE + _GAP), title, own, moved.scales, (low, high))
    for row, name in enumerate(moved.shrunk):
        x, y = _LEFT + (row % 2) * (_WIDE + _GAP), _TOP + _HIGH + 50 + 16 * (row // 2)
        slope = slope_of(moved.scales, moved.shrunk[name])
        drawn.append(
            f'<line x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}" stroke="{_colour(row)}" stroke-width="2"/>'
        )
        drawn.append(f'<text x="{x + 24}" y="{y}">{_text(name)}: width^{slope:+.2f}</text>')
    return "\n".join([*drawn, "</svg>", ""])


def _panel(
    left: int, title: str, own: Mapping[str, Sequence[float]], scales: Sequence[int], bounds: tuple[float, float]
) -> list[str]:
    low, high = bounds
    xs = [left + _WIDE * (log2(scales[0] / scale) / max(log2(scales[0]), 1)) for scale in scales]

    def y_of(value: float) -> float:
        return _TOP + _HIGH * (high - log(value)) / (high - low)

    drawn = [
        f'<rect x="{left}" y="{_TOP}" width="{_WIDE}" height="{_HIGH}" fill="none" stroke="#999"/>',
        f'<text x="{left}" y="{_TOP - 8}">{title}</text>',
        *(
            f'<text x="{x:.0f}" y="{_TOP + _HIGH + 16}" text-anchor="middle">÷ {s}</text>'
            for x, s in zip(xs, scales, strict=True)
        ),
        *(
            f'<text x="{_LEFT - 4}" y="{y_of(exp(v)) + 4:.0f}" text-anchor="end">{exp(v):.2g}</text>'
            for v in (low, high)
        ),
    ]
    for row, moved in enumerate(own.values()):
        points = " ".join(f"{x:.1f},{y_of(v):.1f}" for x, v in zip(xs, moved, strict=True) if 0 < v < inf)
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{_colour(row)}" stroke-width="1.5"/>')
    return drawn


def _colour(row: int) -> str:
    return _COLOURS[row % len(_COLOURS)]


def _text(name: str) -> str:
    return name.replace("&", "&amp;").replace("<", "&lt;")
