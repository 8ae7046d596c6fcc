"""The role of each parameter: how its fans have shrunk from the target to the surrogate.

Sources: TP5 is Tensor Programs V, Yang et al. 2022 (arXiv 2203.03466); CompleteP is Dey et al. 2025 (2505.01618).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal
from weakref import ref

from torch import Tensor, nn

from trials.shrinking.errors import ShrinkError
from trials.shrinking.fans import Axes, Fans, fans_of, refuse_owner

Kind = Literal["hidden", "input", "vector", "output", "scalar"]

BranchPart = Literal["none", "last", "inner"]
"""Whether a parameter is in a residual branch of a stack that has become shallower: in its last layer, or before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """How one parameter has shrunk. All ratios are the surrogate's size ÷ the target's.

    Attributes:
        r_in: of its fan-in.
        r_out: of its fan-out.
        shape: the surrogate's.
        target_shape: the target's.
        branch: where it is in a stack that has become shallower.
        r_depth: of the depth of that stack.
        tied: whether it is an embedding and the weight of the head too.
    """

    r_in: float
    r_out: float
    shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    branch: BranchPart = "none"
    r_depth: float = 1.0
    tied: bool = False

    @property
    def kind(self) -> Kind:
        """Its name in TP5's table 8: `hidden` if both fans have shrunk, and so on."""
        if self.r_in != 1:
            return "output" if self.r_out == 1 else "hidden"
        if self.r_out == 1:
            return "scalar"
        return "input" if len(self.shape) > 1 else "vector"


class Roles(dict[str, Role]):
    """Parameter name in the surrogate -> its role. It knows the surrogate, but does not keep it."""

    def __init__(self, surrogate: nn.Module, found: Mapping[str, Role]) -> None:
        super().__init__(found)
        self._surrogate = ref(surrogate)

    def names(self) -> dict[int, str]:
        """The id of each parameter of the surrogate -> its name.

        Raises:
            ShrinkError: the surrogate exists no more.
        """
        surrogate = self._surrogate()
        if surrogate is None:
            raise ShrinkError("the surrogate for which these roles were found exists no more; allowed: keep the model")
        return {id(p): name for name, p in surrogate.named_parameters()}


def roles(
    target: nn.Module,
    surrogate: nn.Module,
    fans: Mapping[str, Axes] | None = None,
    uses: Mapping[str, Axes] | None = None,
) -> Roles:
    """Compare the parameters of `surrogate` with those of its `target`, by name.

    Args:
        target: the model whose hyperparameters are wanted. Its tensors' values do not matter; they may be on the meta
            device.
        surrogate: the same model, narrower.
        fans: for parameters that the model's own classes hold: patterns of names -> the axes of their outputs and of
            their inputs, None where there is no such axis, as in ``{"blocks.*.gate": (0, 1), "position": (2, None)}``.
        uses: the same for single names, for those parameters about which nothing else is known.

    Raises:
        ShrinkError: they do not match, the surrogate is wider, or the fans of a parameter are not known.
    """
    ours, theirs = _owners(surrogate), _owners(target)
    _refuse_other_names(ours, theirs)
    found = {}
    for name, (tensor, owners) in ours.items():
        target_tensor, target_owners = theirs[name]
        if tensor.ndim != target_tensor.ndim:
            raise ShrinkError(
                f"parameter '{name}' has {tensor.ndim} axes in the surrogate and {target_tensor.ndim} in the target; "
                "allowed: the same"
            )
        pairs = list(zip(owners, target_owners, strict=True))
        found[name] = _role(name, tensor, target_tensor, pairs, (fans or {}, uses or {}))
    return Roles(surrogate, found)


_Owner = tuple[nn.Module, str, str]
"""A module, its path, and the parameter's name in it."""


def _role(
    name: str,
    tensor: Tensor,
    target: Tensor,
    pairs: list[tuple[_Owner, _Owner]],
    given: tuple[Mapping[str, Axes], Mapping[str, Axes]],
) -> Role:
    shape, target_shape = tuple(tensor.shape), tuple(target.shape)
    shrinks = shape != target_shape
    wider = next((axis for axis, (one, other) in enumerate(zip(shape, target_shape, strict=True)) if one > other), None)
    if wider is not None:
        raise ShrinkError(
            f"parameter '{name}' is wider in the surrogate: axis {wider} is {shape[wider]}, the target's "
            f"{target_shape[wider]}; allowed: at most the target's size. Are the two exchanged?"
        )
    ratios: dict[tuple[float, float], nn.Module] = {}
    for (owner, path, own), (target_owner, _, _) in pairs:
        refuse_owner(owner, path, shrinks, target_owner)
        fans, target_fans = (
            fans_of(each, name, own, t, *given) for each, t in ((owner, tensor), (target_owner, target))
        )
        ratios.setdefault(_ratios(name, owner, shape, fans, target_fans, shrinks), owner)
    tied = _is_tied([owner for (owner, _, _), _ in pairs])
    if tied:  # the head takes the embedding's role, and its logits a factor
        ratios = {r: owner for r, owner in ratios.items() if isinstance(owner, nn.Embedding)} or ratios
    if len(ratios) > 1:
        raise ShrinkError(
            f"parameter '{name}' is shared by {' and '.join(sorted({type(o).__name__ for o in ratios.values()}))}, "
            "which want different rates for it; allowed: an embedding tied to a Linear, or parameters of their own"
        )
    ((r_in, r_out),) = ratios
    return Role(r_in=r_in, r_out=r_out, shape=shape, target_shape=target_shape, tied=tied and shrinks)


def _ratios(
    name: str, owner: nn.Module, shape: tuple[int, ...], fans: Fans | None, target: Fans | None, shrinks: bool
) -> tuple[float, float]:
    if fans is None or target is None:
        if shrinks:
            raise ShrinkError(
                f"parameter '{name}' of {type(owner).__name__} has shape {list(shape)}: which axes are its outputs and "
                f"inputs is not known; allowed: name them, as in fans={{'{name}': (0, 1)}}, None where there is none"
            )
        return 1.0, 1.0
    return fans.into / target.into, fans.out / target.out


def _is_tied(owners: list[nn.Module]) -> bool:
    return any(isinstance(o, nn.Embedding) for o in owners) and any(isinstance(o, nn.Linear) for o in owners)


def _owners(model: nn.Module) -> dict[str, tuple[Tensor, list[_Owner]]]:
    """Each parameter's name -> the parameter, and the modules that hold it: several if it is tied."""
    found: dict[str, tuple[Tensor, list[_Owner]]] = {}
    names: dict[int, str] = {}
    for path, own, owner, parameter in _held(model):
        name = names.setdefault(id(parameter), f"{path}.{own}" if path else own)
        found.setdefault(name, (parameter, []))[1].append((owner, path, own))
    return found


def _held(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, Tensor]]:
    for path, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                yield path, own, module, parameter


def _refuse_other_names(ours: Mapping[str, object], theirs: Mapping[str, object]) -> None:
    missing = next((name for name in theirs if name not in ours), None)
    if missing is not None:
        raise ShrinkError(
            f"parameter '{missing}' of the target is absent in the surrogate; allowed: the same names. Blocks are "
            "dropped by trials.shrink(..., depth=2) or trials.Shrink(..., depth=2) alone"
        )
    foreign = next((name for name in ours if name not in theirs), None)
    if foreign is not None:
        raise ShrinkError(f"parameter '{foreign}' of the surrogate is absent in the target; allowed: the same names")
