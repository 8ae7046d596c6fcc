"""The kernel of `philox`. Importing it needs Triton.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", for the generator.
"""

import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _place(call, thread, threads, lane: tl.constexpr, vector: tl.constexpr):
    if vector <= 4:  # a call serves several rounds of a thread, or one
        return ((call * (4 // vector) + lane // vector) * threads + thread) * vector + lane % vector
    return (call // (vector // 4) * threads + thread) * vector + call % (vector // 4) * 4 + lane  # takes several calls


@triton.jit
def _value(bits, draws, keep, value):
    uniform = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return tl.where(tl.where(draws > 0, uniform.to(keep.dtype) < keep, keep > 0.5), value, 0.0)


@triton.jit
def masks(noise, after, states, numbers, n, threads, increment, vector: tl.constexpr, block: tl.constexpr):
    """Fill ``noise[K, n]``: where a trial keeps an element, its value, else zero. See `philox.Layout` for the order.

    ``states[2, K]`` are seeds and offsets, of which `after` gets the next. ``numbers[3, K]``: whether a trial draws
    at all (else it keeps everything or nothing), the probability that an element stays, and the value.
    """
    trial, trials = tl.program_id(1), tl.num_programs(1)
    seed, offset = tl.load(states + trial), tl.load(states + trials + trial)
    draws, keep = tl.load(numbers + trial), tl.load(numbers + trials + trial)
    value = tl.load(numbers + 2 * trials + trial)
    if tl.program_id(0) == 0:
        tl.store(after + trial, seed)
        tl.store(after + trials + trial, offset + tl.where(draws > 0, increment, 0).to(tl.int64))
    quad = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    call, thread = quad // threads, quad % threads
    counter = offset // 4 + call
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    sequence = thread.to(tl.uint32)
    first, second, third, fourth = tl.philox(seed, low, high, sequence, sequence * 0)
    row = noise + trial.to(tl.int64) * n
    place = _place(call, thread, threads, 0, vector)
    tl.store(row + place, _value(first, draws, keep, value), mask=place < n)
    place = _place(call, thread, threads, 1, vector)
    tl.store(row + place, _value(second, draws, keep, value), mask=place < n)
    place = _place(call, thread, threads, 2, vector)
    tl.store(row + place, _value(third, draws, keep, value), mask=place < n)
    place = _place(call, thread, threads, 3, vector)
    tl.store(row + place, _value(fourth, draws, keep, value), mask=place < n)
