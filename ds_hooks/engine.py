"""What the hooks need of an engine, and which engines they can serve."""

import weakref
from typing import Any

from ds_hooks.clock.registry import CLOCKS
from ds_hooks.schedule import Waits

WRAPPED_METHODS = ("train_batch", "_exec_schedule", "_aggregate_total_loss")
HOOKED: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The engines that have hooks now."""


class AttachError(Exception):
    """The hooks cannot serve this engine; the message says why, and which engines they can serve."""


def check_engine(engine: Any) -> None:
    """Accept an engine that the hooks can serve.

    Raises:
        AttachError: it is no pipeline engine, on an unknown device, or has hooks already.
    """
    if not hasattr(engine, "_INSTRUCTION_MAP") or not all(hasattr(engine, name) for name in WRAPPED_METHODS):
        raise AttachError(
            f"{type(engine).__name__} is not a pipeline engine; allowed is what deepspeed.initialize returns for a "
            f"PipelineModule or a DualPipeVModule"
        )
    device_type(engine)
    if engine in HOOKED:
        raise AttachError("hooks are attached to this engine already; detach them first")


def device_type(engine: Any) -> str:
    """The type of the engine's device, which is one of `CLOCKS`; its name, such as ``"cuda:0"``, will do as well.

    Raises:
        AttachError: it is another.
    """
    device = getattr(engine.device, "type", str(engine.device).partition(":")[0])
    if device not in CLOCKS:
        raise AttachError(
            f"the engine's device is {device}; true bubble bounds are known only on {' and '.join(CLOCKS)} (elsewhere "
            f"the host's clock shows when work was issued, not when it ran)"
        )
    return str(device)


def waits_of(engine: Any) -> Waits:
    """Find which instructions of this engine wait on a peer."""
    return Waits(
        queued_p2p=any(kind.__name__ == "CommitP2P" for kind in engine._INSTRUCTION_MAP),
        tied=bool(engine.module.tied_comms),
        data_parallel=bool(engine.is_data_parallel),
    )
