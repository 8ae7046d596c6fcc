"""Trials without end; each process that imports this has shared memory, and notes its name."""

import os
from multiprocessing.shared_memory import SharedMemory

from endless import Endless

KEPT = SharedMemory(create=True, size=1)
with open(os.environ["SHARES"], "a") as noted:
    noted.write(f"{KEPT.name}\n")


class Shares(Endless):
    pass
