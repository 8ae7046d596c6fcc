"""Runs inside the main job: publishes the bubbles of DeepSpeed's pipeline engine.

Importing it loads the standard library and pyzmq only; torch and deepspeed are the main job's own.
"""

from ds_hooks.attach import Handle, attach

__all__ = ["Handle", "attach"]
