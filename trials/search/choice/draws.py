"""Makes seeded samplers draw each trial by its number.

A sampler with a seed repeats its draws in every process: in that of each device, and after every restart. So before
each trial its random streams get a seed of that trial's, made of the sampler's own and of the trial's number. Then a
random search has the same points, however many devices share it and whatever ends when.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from optuna.samplers import BaseSampler
from optuna.samplers._lazy_random_state import LazyRandomState


class Draws:
    """The random streams of a sampler that have a seed.

    Args:
        sampler: Optuna's, which has not drawn yet. Streams without a seed, and those of a user's own making, are left.
    """

    def __init__(self, sampler: BaseSampler) -> None:
        found = [each for each in _streams(sampler, set()) if each._rng is not None]
        self._streams = [(each, each.rng.get_state(legacy=False)["state"]["key"].tobytes()) for each in found]

    def begin(self, number: int) -> None:
        """Have the sampler draw for trial `number`."""
        for position, (stream, seed) in enumerate(self._streams):
            named = seed + number.to_bytes(8, "little") + position.to_bytes(4, "little")
            stream.rng.seed(np.frombuffer(hashlib.blake2b(named, digest_size=32).digest(), dtype=np.uint32))


def _streams(holder: object, known: set[int]) -> Iterator[LazyRandomState]:
    """Yield each random stream in the parts of a sampler once, in the order of attributes."""
    for part in vars(holder).values():
        if id(part) in known:
            continue
        known.add(id(part))
        if isinstance(part, LazyRandomState):
            yield part
        elif isinstance(part, BaseSampler) or type(part).__module__.startswith("optuna.samplers"):
            yield from _streams(part, known) if hasattr(part, "__dict__") else ()
