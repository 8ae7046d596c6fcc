"""Loads pyzmq when the hooks attach: not before, since the training may not need it, and never a user's module."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ds_hooks.whose_error import is_of_the_script


class NoPyzmqError(Exception):
    """Pyzmq is not there, does not load, or is hidden by another module."""


def load_pyzmq() -> Any:
    """Return pyzmq.

    Raises:
        NoPyzmqError: why it cannot be used.
    """
    if "zmq" in sys.modules and "zmq.backend" in sys.modules:  # a user's has none; files may be out of reach by now
        return sys.modules["zmq"]
    try:
        spec = find_spec("zmq")
        if spec is None:
            raise NoPyzmqError("pyzmq is not installed")
        if not any(Path(folder, "backend").is_dir() for folder in spec.submodule_search_locations or ()):
            where = spec.origin or next(iter(spec.submodule_search_locations or ("a module",)))
            raise NoPyzmqError(f"{where} hides the package pyzmq, which is imported as zmq. Rename it")
        import zmq
    except (ImportError, OSError, ValueError) as error:  # ValueError: a module without a spec, not found, but made
        if is_of_the_script(error):
            raise
        raise NoPyzmqError(f"pyzmq does not load: {error}") from error
    return zmq
