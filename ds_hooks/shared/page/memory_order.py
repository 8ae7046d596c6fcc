"""Keeps a process's reads and writes of shared words in order where its processor would not.

A processor may make a write visible after a later read (all do), or reorder any two accesses of different words (ARM,
POWER, RISC-V; x86 does not). Python has no fence, but its locks are made of atomic instructions:

- On x86, taking a free lock is a locked instruction, which is a full fence.
- Elsewhere, releasing a lock keeps earlier accesses before it, taking one keeps later accesses after it, and a release
  comes before a take that follows it. So a second taking of the same lock is a full fence for what was before the first
  release.

Each fence makes a lock of its own: a signal handler, thread or forked child that fences too can never wait for it. It
costs some 100 ns, so it stands where a bubble begins and ends, and not before each unit.
"""

import os
from _thread import allocate_lock

KEEPS_STORE_ORDER = os.uname().machine in ("x86_64", "i686", "i586", "i386")
"""Whether the processor reorders nothing but a write with a later read."""


def full_fence() -> None:
    """Everything before comes before everything after. For "say, then look": a write, and then a read."""
    lock = allocate_lock()
    with lock:
        pass
    if not KEEPS_STORE_ORDER:
        with lock:
            pass


def _nothing() -> None:
    """The processor keeps this order by itself."""


light_fence = _nothing if KEEPS_STORE_ORDER else full_fence
"""The same, but a later read may overtake an earlier write. For "the data, then the word that announces it", and for
reading them the other way round."""
