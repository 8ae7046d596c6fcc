"""A study that writes down what its process was given, and needs a lot of memory for more than one trial."""

import json
import os
import resource
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import torch
from tiny import Tiny
from torch import Tensor

MEGABYTES = int(os.environ.get("SPIES_MB", "0"))

found = {
    "environment": dict(os.environ),
    "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
    "data": resource.getrlimit(resource.RLIMIT_DATA)[1],
}
Path(os.environ["SPIES"]).write_text(json.dumps(found))


class Spies(Tiny):
    trials = 3
    epochs = 1
    rungs = ()

    def batches(self, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        return islice(super().batches(epoch), 2)  # each fills all that memory

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        padding = outputs.detach().mean() * torch.ones(MEGABYTES << 18)  # for each trial
        return super().loss(outputs, targets) + 0 * padding[:1].sum()
