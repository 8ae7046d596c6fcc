"""Compares the kernel of the masks, in Triton's interpreter, with the generator's published rounds, thread by thread.

Run with TRITON_INTERPRET=1. Source: Salmon et al. 2011; NVIDIA's `curand_uniform4`, and PyTorch's Dropout.cu.
"""

from collections.abc import Iterator

import numpy as np
import torch

from trials.fusion.layers.philox_kernel import BLOCK, masks

WORD = 0xFFFFFFFF
THREADS = 512
CASES = [(1, 1), (64, 4), (35, 1), (34, 2), (3000, 4), (3001, 1), (3002, 2), (3008, 8)]
"""How many elements a trial has, and how many neighbours a thread takes."""
SEEDS, OFFSETS = (0x9E3779B97F4A7C15, 5, 7), (4 * (2**32 - 1), 8, 0)
KEEPS, VALUES, DRAWS = (0.5, 0.25, 1.0), (2.0, 4.0, 1.0), (1.0, 1.0, 0.0)


def rounds(counter: list[int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10."""
    low, high = key
    for _ in range(10):
        one, other = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [other >> 32 ^ counter[1] ^ low, other & WORD, one >> 32 ^ counter[3] ^ high, one & WORD]
        low, high = (low + 0x9E3779B9) & WORD, (high + 0xBB67AE85) & WORD
    return counter


def numbers(seed: int, offset: int, thread: int) -> Iterator[np.float32]:
    """What one thread draws."""
    call = offset // 4
    while True:
        for bits in rounds([call & WORD, call >> 32, thread, 0], (seed & WORD, seed >> 32)):
            yield np.float32(bits) * np.float32(2.0**-32) + np.float32(2.0**-33)
        call += 1


def drawn(seed: int, offset: int, n: int, vector: int) -> list[float]:
    """What all threads draw, by element."""
    found = [0.0] * n
    for thread in range(min(THREADS, n)):
        own = numbers(seed, offset, thread)
        for first in range(thread * vector, n, THREADS * vector):
            for element in range(first, first + vector):
                found[element] = float(next(own))
    return found


def main() -> None:
    """Compare all cases."""
    signed = [seed - 2**64 if seed >= 2**63 else seed for seed in SEEDS]
    states, own = torch.tensor([signed, OFFSETS]), torch.tensor([DRAWS, KEEPS, VALUES])
    for n, vector in CASES:
        increment = ((n - 1) // (THREADS * 4) + 1) * 4
        noise, after = torch.full((3, n), -1.0), torch.zeros_like(states)
        grid = -(-increment // 4 * THREADS // BLOCK), 3
        masks[grid](noise, after, states, own, n, THREADS, increment, vector=vector, block=BLOCK)
        for row in (0, 1):
            kept = torch.tensor(drawn(SEEDS[row], OFFSETS[row], n, vector)) < KEEPS[row]
            assert torch.equal(noise[row], kept * VALUES[row]), (n, vector, row)
        assert (noise[2] == 1).all(), "a trial that draws nothing keeps everything"
        moved = [[0, 0, 0], [increment, increment, 0]]
        assert torch.equal(after, states + torch.tensor(moved)), (n, vector)


if __name__ == "__main__":
    main()
