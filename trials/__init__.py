"""Fused training of hyperparameter trials. Users import `Study`, `fuse`, `fuse_optimizers`, `shrink` and `TrialGroup`.

Each name is loaded on first use, because a side task must block its signals before an import starts threads.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ds_hooks.shared.renamed_commands import refuse_moved_module

if TYPE_CHECKING:
    from trials.fused import FusedModule, PerTrial, fuse, fuse_optimizers
    from trials.fusion import FuseError
    from trials.shrinking.errors import ShrinkError, ShrinkWarning
    from trials.shrinking.roles import Role, Roles, roles
    from trials.shrinking.rules import Multipliers, multipliers
    from trials.shrinking.scaled_optimizer import scaled_groups
    from trials.shrinking.settings import Shrink
    from trials.shrinking.slicing import Shrunk, shrink
    from trials.study import Study, load_study
    from trials.study_error import StudyError
    from trials.training.group import TrialGroup
    from trials.training.member import Member, build_member, group_key

__all__ = [
    "FuseError",
    "FusedModule",
    "Member",
    "Multipliers",
    "PerTrial",
    "Role",
    "Roles",
    "Shrink",
    "ShrinkError",
    "ShrinkWarning",
    "Shrunk",
    "Study",
    "StudyError",
    "TrialGroup",
    "build_member",
    "fuse",
    "fuse_optimizers",
    "group_key",
    "load_study",
    "multipliers",
    "roles",
    "scaled_groups",
    "shrink",
]

refuse_moved_module()

_HOMES = {
    "fused": ("FusedModule", "PerTrial", "fuse", "fuse_optimizers"),
    "fusion": ("FuseError",),
    "shrinking.errors": ("ShrinkError", "ShrinkWarning"),
    "shrinking.scaled_optimizer": ("scaled_groups",),
    "shrinking.roles": ("Role", "Roles", "roles"),
    "shrinking.rules": ("Multipliers", "multipliers"),
    "shrinking.settings": ("Shrink",),
    "shrinking.slicing": ("Shrunk", "shrink"),
    "training.group": ("TrialGroup",),
    "training.member": ("Member", "build_member", "group_key"),
    "study": ("Study", "load_study"),
    "study_error": ("StudyError",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
