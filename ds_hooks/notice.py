"""What the hooks print for the user, on the main job's stderr."""

import sys
from contextlib import suppress


def notice(text: str) -> None:
    """Print `text`, with where it comes from.

    Where that fails, nothing is said: the terminal may be gone, and the script's own stderr may raise anything.
    """
    with suppress(Exception):
        if sys.stderr is not None:
            print(f"[ds_hooks] {text}", file=sys.stderr)
