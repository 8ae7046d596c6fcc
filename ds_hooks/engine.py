"""What the hooks need of an engine, and which engines they can serve."""

import re
import weakref
from typing import Any

from ds_hooks.clock.registry import CLOCKS
from ds_hooks.schedule import Waits

WRAPPED_METHODS = ("train_batch", "_exec_schedule", "_aggregate_total_loss")
OLDEST_TESTED, NEWEST_TESTED = (0, 16, 9), (0, 19, 8)
"""Releases of DeepSpeed. A change here is one in setup.cfg, constraints.txt and README.md too."""
BROKEN = (0, 18, 3), (0, 19, 3)
"""From the first of these on, and before the second, pipelines train wrongly."""
HOOKED: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The engines that have hooks now."""
WAITING: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Those that wait for them, see `several_engines`."""


class AttachError(Exception):
    """The hooks cannot serve this engine; the message says why, and which engines they can serve."""


class HasHooksError(AttachError):
    """The engine has hooks, which keep working, or waits for them."""


def check_release(release: str) -> str | None:
    """Judge a release of DeepSpeed by its version, such as "0.19.8+cu128".

    Returns:
        None for a tested one, else a warning for the user.

    Raises:
        AttachError: its pipelines are broken, with or without hooks.
    """
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", release)
    number = tuple(map(int, found.groups())) if found else ()
    first, last = OLDEST_TESTED, NEWEST_TESTED
    broken_from, broken_until = BROKEN
    if broken_from <= number < broken_until:
        raise AttachError(
            f"pipelines of DeepSpeed {release} hang or scale gradients wrongly; allowed: {_text(first)} or "
            f"newer but older than {_text(broken_from)}, or {_text(broken_until)} or newer"
        )
    if first <= number <= last:
        return None
    return f"DeepSpeed {release} is untested; tested: {_text(first)} to {_text(last)}. The hooks are attached anyway"


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def check_engine(engine: Any) -> None:
    """Accept an engine that the hooks can serve.

    Raises:
        HasHooksError: it has hooks already, or waits for them.
        AttachError: it is no pipeline engine, or on an unknown device.
    """
    if not hasattr(engine, "_INSTRUCTION_MAP") or not all(hasattr(engine, name) for name in WRAPPED_METHODS):
        raise AttachError(
            f"{type(engine).__name__} is not a pipeline engine; allowed: what deepspeed.initialize returns for a "
            f"PipelineModule or a DualPipeVModule"
        )
    device_type(engine)
    if engine in HOOKED:
        raise HasHooksError(
            "this engine already has hooks, which keep working; a script under ds_squeeze or ds_hooks need not attach"
        )
    if engine in WAITING:
        raise HasHooksError(
            "this engine was attached before, and is squeezed once the one that has the hooks has stopped"
        )


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
