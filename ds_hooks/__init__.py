"""Runs inside the main job: finds the bubbles of DeepSpeed's pipeline engine and publishes them.

Importing it loads the standard library only. `attach` loads pyzmq; torch and deepspeed are loaded by the main job.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_hooks.handle import Handle, attach

__all__ = ["Handle", "attach"]


def __getattr__(name: str) -> Any:
    """Load the hooks on first use, so that `ds_hooks.shared` is importable without pyzmq."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ds_hooks import handle

    return getattr(handle, name)
