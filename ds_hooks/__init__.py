"""Runs inside the main job: publishes the bubbles of DeepSpeed's pipeline engine.

Importing it loads the standard library only, and `attach` loads pyzmq; torch and deepspeed are the main job's own.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_hooks.handle import Handle, attach

__all__ = ["Handle", "attach"]


def __getattr__(name: str) -> Any:
    """Load what the main job uses on first use, so that `ds_hooks.shared` is importable without pyzmq."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ds_hooks import handle

    return getattr(handle, name)
