"""Fused training of hyperparameter trials: what a user writes (`study`), K trials as one model (`group`, `fused`,
`fusion/`, `optim/`), and the gate that is asked before every unit of device work (`gate`, `pause`).

Names are looked up when they are used: a side task must block its signals before an import starts threads.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trials.fused import FusedModule, PerTrial, fuse, fuse_optimizers
    from trials.fusion import FuseError
    from trials.group import TrialGroup
    from trials.member import Member, build_member, group_key
    from trials.study import Study, StudyError, load_study

__all__ = [
    "FuseError",
    "FusedModule",
    "Member",
    "PerTrial",
    "Study",
    "StudyError",
    "TrialGroup",
    "build_member",
    "fuse",
    "fuse_optimizers",
    "group_key",
    "load_study",
]

_HOMES = {
    "fused": ("FusedModule", "PerTrial", "fuse", "fuse_optimizers"),
    "fusion": ("FuseError",),
    "group": ("TrialGroup",),
    "member": ("Member", "build_member", "group_key"),
    "study": ("Study", "StudyError", "load_study"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
