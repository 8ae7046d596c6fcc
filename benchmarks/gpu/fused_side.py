"""A side task of `gpu_suite` that is the product's own: fused trials of a small GPT, behind a CUDA device's gate.

It differs from a real side task in what surrounds the training: one batch over and over, no search, no checkpoints.
"""

from collections.abc import Callable

from benchmarks.shared.fused_models import Classes
from ds_hooks.shared.page.file import Page
from trials import TrialGroup, build_member
from trials.gate.base import HOST_UNIT, Gate, OpenGate
from trials.gate.unit_records import UnitRecords
from trials.side_task.devices import make_side_device

TRIALS = 16
MODEL = "gpt_64"
MEMORY_FRACTION = 0.2
_REHEARSED_STEPS = 3


def train(page: Page, ready: Callable[[], None]) -> None:
    """Train until the gate is told to end. Kernels are loaded and chosen before `ready`, without the gate.

    Raises:
        StopRequested: the side task must end.
    """
    device = make_side_device("cuda", MEMORY_FRACTION)
    study = Classes(MODEL)
    device.adopt(study)
    rehearsed = _group(study, OpenGate())
    for _ in range(_REHEARSED_STEPS):
        for inputs, targets, per_trial in rehearsed.batches(0):
            rehearsed.train_step(inputs, targets, per_trial)
    gate = device.gate(page, UnitRecords(), lambda slot, overrun_ns: None)
    ready()
    try:
        gate.enter(HOST_UNIT)
        group = _group(study, gate)
        while True:
            for inputs, targets, per_trial in group.batches(0):
                group.train_step(inputs, targets, per_trial)
    finally:
        gate.close()


def _group(study: Classes, gate: Gate) -> TrialGroup:
    return TrialGroup(study, [build_member(study, row, {"lr": 1e-3 / (1 + row)}) for row in range(TRIALS)], gate)
