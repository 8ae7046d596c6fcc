"""Fused training of hyperparameter trials: what a user writes (`study`), K trials as one model (`group`, `fused`,
`fusion/`, `optim/`), and the gate that is asked before every unit of device work (`gate`, `pause`).
"""

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
