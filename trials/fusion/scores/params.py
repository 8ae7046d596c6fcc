"""The trials' hyperparameters in the user's loss or score, which is computed for all trials at once."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten

from trials.fusion.errors import FuseError, RefusedError

NAME = "params"
"""A function that has a parameter of this name gets each trial's hyperparameters."""


def takes_params(function: Callable[..., Any]) -> bool:
    """Whether `function` has a parameter for them."""
    try:
        return NAME in inspect.signature(function).parameters
    except ValueError:  # it is not written in Python
        return False


def given(function: Callable[..., Any], params: Any) -> dict[str, Any]:
    """Return what `function` is given by name, of a trial with these hyperparameters."""
    return {NAME: params} if takes_params(function) else {}


def leaving(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `function`, called `name`, so that it refuses to change the hyperparameters that it is given.

    They are the trial's for good, and stand for those of all trials under `vmap`.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        params = kwargs[NAME]
        before = list(_contents(params))
        found = function(*args, **kwargs)
        if not _are_same(before, list(_contents(params))):
            raise RefusedError(
                f"{name} changes params, which are the trial's in all later calls; allowed: to change a copy, as "
                "copy.deepcopy(params) is; a number that changes from step to step can be a buffer of the model"
            )
        return found

    return call


def _contents(value: Any) -> Iterator[Any]:
    """Yield the form of nested containers, and what is in them."""
    if isinstance(value, dict):
        yield dict.__len__(value)
        for key, inside in dict.items(value):
            yield key
            yield from _contents(inside)
    elif isinstance(value, (list, tuple)):
        yield len(value)
        for inside in value:
            yield from _contents(inside)
    elif isinstance(value, Tensor):
        yield value
        with torch._C.DisableTorchFunction():  # or code under `vmap` would seem to ask
            version = value._version
        yield version
    else:
        yield value


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(
        ours is theirs or (not isinstance(ours, Tensor) and _are_equal((ours, theirs)))
        for ours, theirs in zip(one, other, strict=True)
    )


class Params:
    """The hyperparameters of K trials: what is equal in all, the numbers that are not, and the rest.

    Attributes:
        unlike: the numbers in which the trials differ: the key of each, and its position there.
    """

    def __init__(self, params_K: Sequence[dict[str, Any]]) -> None:
        self._has_same_keys = all(list(params) == list(params_K[0]) for params in params_K)
        self._refused: dict[str, str] = {}
        self._trees: dict[str, tuple[list[Any], Any]] = {}
        self._columns: list[Sequence[float]] = []
        unlike: list[tuple[str, int]] = []
        for key in dict.fromkeys(key for params in params_K for key in params):
            if not all(key in params for params in params_K):
                self._refused[key] = f"not all trials have params['{key}']"
                continue
            leaves_K, specs = zip(*(tree_flatten(params[key]) for params in params_K), strict=True)
            columns = [own for own in enumerate(zip(*leaves_K, strict=False)) if not _are_equal(own[1])]
            if any(spec != specs[0] for spec in specs) or not all(_are_numbers(own) for _, own in columns):
                first = params_K[0][key]
                other = next(p[key] for p in params_K if not _are_equal((first, p[key])))
                self._refused[key] = f"params['{key}'] is {first!r} in one trial and {other!r} in another"
                continue
            self._trees[key] = leaves_K[0], specs[0]
            unlike += [(key, at) for at, _ in columns]
            self._columns += [own for _, own in columns]
        self.unlike = tuple(unlike)
        self._made: tuple[torch.dtype, torch.device, list[Tensor]] | None = None

    def numbers(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Return the numbers in which the trials differ, ``[K]`` each: integers, or of the type `dtype`."""
        if self._made is None or self._made[:2] != (dtype, device):
            whole = [all(isinstance(value, int) for value in own) for own in self._columns]
            made = [
                torch.tensor(own, dtype=torch.int64 if is_whole else dtype, device=device)
                for own, is_whole in zip(self._columns, whole, strict=True)
            ]
            self._made = dtype, device, made
        return self._made[2]

    def forget_numbers(self) -> None:
        """Make the tensors of `numbers` anew: the present ones were changed."""
        self._made = None

    def of_one(self, numbers: Sequence[Tensor]) -> dict[str, Any]:
        """Return the hyperparameters of one trial, with these tensors as the numbers."""
        own = {key: list(leaves) for key, (leaves, _) in self._trees.items()}
        for (key, at), number in zip(self.unlike, numbers, strict=True):
            own[key][at] = number
        made = {key: tree_unflatten(own[key], spec) for key, (_, spec) in self._trees.items()}
        return _OfOne(made, self._refused, self._has_same_keys)

    def may_smooth(self, at: int) -> bool:
        """Whether the number that is the one after `at` others is a share in each trial, as of labels' smoothing."""
        return all(0 <= value <= 1 for value in self._columns[at])


class _OfOne(dict[str, Any]):
    """The hyperparameters of one trial, under `vmap`. It refuses to say what no tensor can.

    Raises:
        FuseError: it is asked for what differs in more than numbers.
    """

    def __init__(self, known: dict[str, Any], refused: dict[str, str], has_same_keys: bool) -> None:
        super().__init__(known)
        self._refused, self._has_same_keys = refused, has_same_keys

    def _check(self, key: object) -> None:
        if isinstance(key, str) and key in self._refused:
            raise FuseError(self._refused[key])

    def _check_all(self) -> None:
        for key in self._refused:
            self._check(key)
        if not self._has_same_keys:
            raise FuseError("the trials' params have keys in different orders")

    def __getitem__(self, key: str) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """See `dict`."""
        self._check(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """See `dict`."""
        self._check(key)
        return super().pop(key, *default)


def _refusing(name: str) -> Callable[..., Any]:
    """Return a dict's method of this name, for the dict as a whole."""
    method = getattr(dict, name)

    def call(self: _OfOne, *args: Any, **kwargs: Any) -> Any:
        self._check_all()
        return method(self, *args, **kwargs)

    return call


for _name in (
    *("__iter__", "__reversed__", "__len__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__repr__"),
    *("keys", "values", "items", "copy", "popitem", "setdefault", "update"),
):
    setattr(_OfOne, _name, _refusing(_name))


def smoothed(
    params: Params | None, numbers: Sequence[Tensor], function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Compute a cross entropy whose smoothing is a trial's own. It wants a plain number, but is linear in that.

    Args:
        params: of all trials.
        numbers: one trial's, under `vmap`.
        function: any; of others the result is NotImplemented.
        args: its inputs.
        kwargs: those by name.
    """
    share = kwargs.get("label_smoothing")
    if params is None or function is not functional.cross_entropy or not isinstance(share, Tensor):
        return NotImplemented
    at = next((index for index, number in enumerate(numbers) if number is share), None)
    if at is None or not params.may_smooth(at):
        return NotImplemented
    none, whole = (function(*args, **{**kwargs, "label_smoothing": end}) for end in (0.0, 1.0))
    return (1 - share) * none + share * whole


def _are_equal(values: Sequence[Any]) -> bool:
    """Whether code cannot tell the values apart; 0.0 is not -0.0 here, and NaN equals itself."""
    first = values[0]
    if isinstance(first, (bool, int, float, str, list, tuple, dict)):  # of which JSON is made
        return all(type(value) is type(first) and repr(value) == repr(first) for value in values)
    return all(value is first for value in values)


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
