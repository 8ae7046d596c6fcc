"""Draws the steps that are left alone, the baseline of the slowdown. Pure, and the same on every rank.

A job's steps come in blocks, and the blocks in rounds. Each round leaves one block alone, at a place drawn from the
job's seed and the round's number, so no rhythm of the job can keep step with it. A pipeline is as slow as its slowest
rank. All ranks know seed and step, so all leave the same blocks alone without a message. A rank that knows little, or
is suspicious, draws *densely*: it leaves further blocks alone, besides those of all ranks. One that knows the slowdown
closely draws *sparsely*: it leaves the block of only some rounds alone, the same on all such ranks.
"""

from dataclasses import dataclass

DENSE = 0.5
"""The share of blocks left alone while the guard knows little, or is suspicious.

To leave no two of them alone side by side makes more comparisons of fewer steps, but more false alarms, too: where
every other step is twice as long, the guard then took 7% of the squeezing (`benchmarks.guard_power`; now at most 4%).
"""
SPARSE_ROUNDS = 2
"""While the slowdown is known closely, one round in this many, drawn at random, has a block left alone."""
_64_BITS = 2**64 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Which steps are left alone.

    Attributes:
        observe_steps: the first steps of a job, all left alone.
        alone_block_steps: steps in a block.
        round_blocks: blocks in a round, one of which is left alone; 0: none ever is.
    """

    observe_steps: int
    alone_block_steps: int
    round_blocks: int

    def block_of(self, step: int) -> int:
        """The block of `step` (counted from 1); below 0 while the job is only observed."""
        since = step - 1 - self.observe_steps
        return since // self.alone_block_steps if since >= 0 else -1

    def is_alone(self, block: int, seed: int, *, dense: bool = False, sparse: bool = False) -> bool:
        """Whether `block` is left alone."""
        if block < 0:
            return True
        if not self.round_blocks:
            return False
        number, place = divmod(block, self.round_blocks)
        if sparse and _hashed(seed, _ROUNDS + number // SPARSE_ROUNDS) % SPARSE_ROUNDS != number % SPARSE_ROUNDS:
            return False
        first = block - place
        drawn = [_hashed(seed, each) for each in range(first, first + self.round_blocks)]
        own = drawn[place]
        alone = max(1, round(self.round_blocks * DENSE)) if dense else 1
        return sum(each < own for each in drawn) < alone


_ROUNDS = 1 << 39
"""Numbers of rounds begin here, beyond those of blocks."""


def _hashed(seed: int, block: int) -> int:
    """A number of 64 bits that looks random (splitmix64: Steele et al. 2014, OOPSLA)."""
    mixed = ((seed << 40) + block + 1) * 0x9E3779B97F4A7C15 & _64_BITS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _64_BITS
    return mixed ^ mixed >> 31
