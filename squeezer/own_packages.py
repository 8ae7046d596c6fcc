"""Makes sure that what is imported as our packages is ours.

`launch` and `trials` are common names. A user's module of that name stands in for ours where PYTHONPATH names its
folder, since Python looks there first.
"""

import importlib.util
from pathlib import Path

COMMON = "launch", "trials"


class HiddenPackageError(Exception):
    """A user's module stands in for one of our packages; the text says which, and what to do."""


def check_own_packages() -> None:
    """Find our packages without importing anything.

    Raises:
        HiddenPackageError: one of them is hidden.
    """
    ours = Path(__file__).resolve().parent.parent
    for name in COMMON:
        spec = importlib.util.find_spec(name)
        found = "nothing" if spec is None else next(iter(spec.submodule_search_locations or [str(spec.origin)]))
        if Path(found).resolve() != ours / name:
            raise HiddenPackageError(
                f"Python finds {found} in place of our package {name} in {ours}; put that folder behind {ours} in "
                f"PYTHONPATH, or rename it"
            )
