"""Gives each trial a random stream of its own in code that draws from PyTorch's, and undoes failed tries."""

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy
import torch
from torch import Tensor

from trials.fusion.errors import RefusedError
from trials.fusion.graph.surroundings import kept
from trials.fusion.own_code.drawing import WITH_RULES


def saved(buffers: dict[str, Tensor], generators: Sequence[torch.Generator]) -> Callable[[], None]:
    """Return a function that puts tensors, streams and surroundings back to their present state."""
    surroundings = kept()
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    states = [generator.get_state() for generator in generators]

    def restore() -> None:
        surroundings()
        for name, tensor in before.items():
            buffers[name].data.copy_(tensor)  # uncounted: earlier calls in this forward saw these very values
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    return restore


def continue_from(generator: torch.Generator) -> None:
    """Let PyTorch's own random numbers continue from the state of `generator`."""
    state = generator.get_state()
    if generator.device.type == "cuda":
        torch.cuda.set_rng_state(state, generator.device)
    else:
        torch.set_rng_state(state)


def note(generator: torch.Generator) -> None:
    """Store the state of PyTorch's own random numbers in `generator`."""
    cuda = generator.device.type == "cuda"
    generator.set_state(torch.cuda.get_rng_state(generator.device) if cuda else torch.get_rng_state())


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave all global random numbers as they are."""
    with torch.random.fork_rng():
        python, arrays = random.getstate(), numpy.random.get_state()
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


def seed_all(seed: int) -> None:
    """Seed all global random numbers."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # the same; the function above also keeps its stack as text, in up to 1 ms, for a device that may come
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # it takes no others


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """While entered, PyTorch's own random numbers come from `generator`."""
    others = torch.get_rng_state()
    device = torch.cuda.get_rng_state(generator.device) if generator.device.type == "cuda" else None
    continue_from(generator)
    try:
        yield
    finally:
        note(generator)
        torch.set_rng_state(others)
        if device is not None:
            torch.cuda.set_rng_state(device, generator.device)


_lendings = 0


def lendings() -> int:
    """How often a stream was lent so far."""
    return _lendings


@contextmanager
def lent(generator: torch.Generator) -> Iterator[None]:
    """While entered, operations on the CUDA device of `generator` draw from it where they can be given none.

    Nothing is copied, unlike in `drawing_from`, so what runs meanwhile must be short.
    """
    global _lendings
    _lendings += 1
    index = generator.device.index
    default = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    others = default.graphsafe_get_state()
    default.graphsafe_set_state(generator)
    try:
        yield
    finally:
        default.graphsafe_set_state(others)


@contextmanager
def seeded_recurrence() -> Iterator[None]:
    """While entered, recurrent layers on a CUDA device drop by PyTorch's own kernels.

    Those of cuDNN draw from one stream of the process, which no seed sets.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


@contextmanager
def drawing_nothing(what: str) -> Iterator[None]:
    """Refuse PyTorch's own random numbers meanwhile, as `vmap` does, where all trials would share them.

    Raises:
        RuntimeError: `what` has drawn some.
    """
    put_back = kept_streams()
    yield
    if put_back():
        raise RuntimeError(f"{what} draws random numbers; {WITH_RULES}")


def kept_streams() -> Callable[[], bool]:
    """Return a function that puts PyTorch's own random numbers back, and returns whether any have been drawn."""
    before = _own_states()

    def put_back() -> bool:
        now = _own_states()
        if len(before) == len(now) and all(map(torch.equal, before, now)):
            return False
        torch.set_rng_state(before[0])
        if len(before) > 1:
            torch.cuda.set_rng_state_all(before[1:])
        return True

    return put_back


def _own_states() -> list[Tensor]:
    """The host's, and those of the CUDA devices if they are in use: code may draw there without naming its input's."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def foreign_streams() -> dict[str, object]:
    """Return the states of random numbers of which no trial has its own, each by a name for messages."""
    return {"Python's random": random.getstate(), "numpy.random": _numpy_state()}


def _numpy_state() -> bytes:
    return pickle.dumps(numpy.random.get_state(legacy=False))  # as text it takes a fifth of a trial's building


def refuse_foreign(before: dict[str, object], owner: str) -> None:
    """Refuse code of `owner` that has drawn from `foreign_streams`, whose states were `before`.

    Raises:
        RefusedError: it has.
    """
    for name, state in foreign_streams().items():
        if state != before[name]:
            raise RefusedError(
                f"{owner} draws from {name}, which no seed of a trial sets; allowed: PyTorch's random numbers"
            )
