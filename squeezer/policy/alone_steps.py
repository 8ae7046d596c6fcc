"""Draws the steps that are left alone, the baseline of the slowdown. Pure, and the same on every rank.

A job's steps come in blocks, and the blocks in rounds. Each round leaves one block alone, at a place drawn from the
job's seed and the round's number, so no rhythm of the job can keep step with it. A pipeline is as slow as its slowest
rank. All ranks know seed and step, so all leave the same blocks alone without a message. A rank that knows little, or
is suspicious, draws *densely*: of each two neighbours it leaves one alone, among them those of all ranks. The more
closely one knows the slowdown, the more often it *halves* the draw: it spares one of each two rounds. What it leaves
alone then, it would leave alone before, so ranks that know more or less still agree on some blocks.
"""

from dataclasses import dataclass

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

    def is_alone(self, block: int, seed: int, *, dense: bool = False, halvings: int = 0) -> bool:
        """Whether `block` is left alone, after so many halvings."""
        if block < 0:
            return True
        if not self.round_blocks:
            return False
        number, place = divmod(block, self.round_blocks)
        if _is_spared(number, seed, halvings):
            return False
        first = block - place
        drawn = [_hashed(seed, each) for each in range(first, first + self.round_blocks)]
        neighbour = place ^ 1
        is_lower = neighbour < self.round_blocks and drawn[place] < drawn[neighbour]
        return drawn[place] == min(drawn) or (dense and is_lower)


_ROUNDS = 1 << 37
"""Numbers of rounds begin here, beyond those of blocks, and at its multiples those that further halvings leave."""


def _is_spared(number: int, seed: int, halvings: int) -> bool:
    """Whether no block of a round is left alone. Each halving spares one of two neighbours, drawn at random."""
    for halving in range(1, halvings + 1):
        number, place = divmod(number, 2)
        if _hashed(seed, halving * _ROUNDS + number) % 2 != place:
            return True
    return False


def _hashed(seed: int, block: int) -> int:
    """A number of 64 bits that looks random (splitmix64: Steele et al. 2014, OOPSLA)."""
    mixed = ((seed << 40) + block + 1) * 0x9E3779B97F4A7C15 & _64_BITS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _64_BITS
    return mixed ^ mixed >> 31
