"""The ways of training in which losses are compared."""

from dataclasses import dataclass, field
from typing import Any

STEPS = 24
"""Of each run."""
WAITS_FROM = {1: 9, 0: 10}
"""Stage to the step before which it first waits until its peers have been squeezed; observing takes the steps before.
Until a bubble has come, it waits again before every second one after that, so that never both wait."""
MICRO_BATCHES = 4
EVERY = 3
"""Steps from one evaluation to the next, and from one checkpoint to the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One way.

    Attributes:
        title: for the table.
        ranks: in two stages; the rest is data parallelism.
        config: added to DeepSpeed's configuration.
        checkpoints: how activations are recomputed: "", "deepspeed" or "torch".
        is_tied: the first and the last layer share their weight.
        interrupts: evaluations and checkpoints are in between.
        is_dualpipev: DeepSpeed's DualPipeV engine.
    """

    title: str
    ranks: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    checkpoints: str = ""
    is_tied: bool = False
    interrupts: bool = False
    is_dualpipev: bool = False


MODES = {
    "fp32": Mode(title="fp32"),
    "bf16": Mode(title="bf16", config={"bf16": {"enabled": True}}),
    "fp16": Mode(title="fp16", config={"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "dp2": Mode(title="data parallel 2 × stages 2", ranks=4),
    "zero1": Mode(title="ZeRO-1, data parallel 2 × stages 2", ranks=4, config={"zero_optimization": {"stage": 1}}),
    "checkpointing": Mode(title="activation checkpointing, DeepSpeed's", checkpoints="deepspeed"),
    "torch_checkpointing": Mode(title="activation checkpointing, PyTorch's", checkpoints="torch"),
    "tied": Mode(title="tied layers", is_tied=True),
    "interrupted": Mode(title="evaluations and checkpoints in between", interrupts=True),
    "dualpipev": Mode(title="DualPipeV", is_dualpipev=True),
}
