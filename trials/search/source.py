"""By which version of a study's code its trials are trained: workers of one study may have different ones."""

import hashlib
import os
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import optuna

from trials.own_logger import own_logger

if TYPE_CHECKING:
    from trials.study import Study

CODE = "squeezer_code"
"""Optuna's attribute of a study: file -> hash, of the worker that began last."""
INSTALLED = "site-packages"
"""The directory of packages that nobody edits."""

log = own_logger(__name__)


def source_of(study: "Study") -> dict[str, str]:
    """Return hashes of the study's file, which comes first, and of the modules beside or below it that it has imported.

    Paths are relative to its directory, which hosts may have in different places.
    """
    main = getattr(sys.modules.get(type(study).__module__), "__file__", None)
    if main is None:
        return {}
    folder = Path(main).resolve().parent
    files = [main, *filter(None, [getattr(module, "__file__", None) for module in [*sys.modules.values()]])]
    # before any path is resolved, which takes a while: torch alone has a thousand files
    ours = (each for each in map(str, files) if each.endswith(".py") and not _is_installed(each))
    found = {}
    for file in dict.fromkeys(Path(each).resolve() for each in ours):
        if file.is_relative_to(folder) and INSTALLED not in file.parts:
            with suppress(OSError):  # it was removed since
                found[str(file.relative_to(folder))] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return found


def _is_installed(file: str) -> bool:
    """Whether it is an installed package's, and no link leads there to one that is edited."""
    home, _, path = file.partition(f"/{INSTALLED}/")
    return bool(path) and not os.path.islink(f"{home}/{INSTALLED}/{path.partition('/')[0]}")


def note_source(user_study: "Study", study: optuna.Study, others: Collection[str]) -> None:
    """Say which files have changed since the worker before began. The study goes on: its user may have mended them.

    Args:
        user_study: has them.
        study: Optuna's, under its lock.
        others: other workers that live. They have loaded the files as they were.
    """
    ours, theirs = source_of(user_study), study.user_attrs.get(CODE, {})
    changed = [name for at, name in enumerate(ours) if ours[name] != theirs.get(name, None if at == 0 else ours[name])]
    if theirs and changed:
        begun = len(study.get_trials(deepcopy=False))
        still = f"; workers that train with the one before: {', '.join(sorted(others))}" if others else ""
        log.warning(
            "study '%s': %s changed since a worker began: trials below %d were begun by another version%s",
            study.study_name,
            ", ".join(changed) + (" has" if len(changed) == 1 else " have"),
            begun,
            still,
        )
    if ours != theirs:
        study.set_user_attr(CODE, ours)
