"""A member: one trial before it is fused with others."""

import hashlib
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakIdKeyDictionary

from trials.fusion import FuseError, Structure, structure
from trials.fusion.compared.structure import Facts, canonical_names
from trials.fusion.graph.trace import FORWARD
from trials.fusion.own_code.streams import seed_all, undisturbed
from trials.fusion.rows import Rows
from trials.fusion.ways import FOUND_UNEQUAL, Way
from trials.optim import fuse_optimizers, holder_of, optimizer_facts
from trials.optim.duplicate import act_on
from trials.optim.several import Given, Optimizers, as_given, by_phase
from trials.shrinking.roles import Roles
from trials.study import Study
from trials.training.inputs.batches import batch_params_of
from trials.training.inputs.building import building
from trials.training.inputs.schedulers import new_schedulers
from trials.training.progress import Progress, new_progress
from trials.training.shrunk import model_of, scales_of
from trials.training.transferable import refuse_what_does_not


@dataclass(frozen=True, slots=True)
class Member:
    """One trial before it is fused: what the study builds from its hyperparameters.

    Attributes:
        number: the trial's number in the study.
        params: its hyperparameters.
        model: its module. The tensors are copied when it joins a group.
        optimizer: its optimizer over `model`, or several by phase; see `Study.optimizer`.
        rng_state: where its random stream (dropout) continues; None: it begins with seed `number`.
        schedulers: its schedulers over `optimizer`. The group uses copies.
        way: how it is to be trained with others.
        epoch: how many epochs it has finished.
        loss: of its last step; NaN before the first.
        progress: the `state_dict` of its `Progress`; None: as it begins.
        history: its `History`, as plain containers; empty: as it begins.
        batch_params: the hyperparameters on which its batches depend.
        roles: of its parameters, if the model is a surrogate.
        structure: what must be equal in the models of fused trials.

    Raises:
        FuseError: the model cannot be fused with any other. The message names the cause.
    """

    number: int
    params: dict[str, Any]
    model: nn.Module
    optimizer: Given
    rng_state: Tensor | None = None
    schedulers: Sequence[LRScheduler] = ()
    way: Way = "rules"
    epoch: int = 0
    loss: float = nan
    progress: Mapping[str, Any] | None = None
    history: Mapping[str, Any] = field(default_factory=dict)
    batch_params: Mapping[str, Any] = field(default_factory=dict)
    roles: Roles | None = None
    structure: Structure = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Trace the model once, for all later questions about it."""
        phases = list(by_phase(self.optimizer))
        for phase in phases:
            if not callable(getattr(self.model, phase, None)):
                raise FuseError(
                    f"Study.optimizer returned one for '{phase}', which {type(self.model).__name__} lacks; allowed: "
                    "names of methods of the model, each taking the inputs of a batch"
                )
        untraced = "" if self.way == "rules" else FOUND_UNEQUAL
        object.__setattr__(self, "structure", structure(self.model, phases, untraced))

    @property
    def place(self) -> int:
        """How many batches of the epoch under way it has trained on."""
        return int(self.history.get("steps", 0))


def build_member(study: Study, number: int, params: dict[str, Any]) -> Member:
    """Build trial `number` of `study` from its own seed. The global random state stays as it was.

    Exceptions of the study's code pass through.

    Raises:
        FuseError: its model cannot be fused with any other.
    """
    own = batch_params_of(study, params)
    refuse_what_does_not(study)
    built = build(study, number, params)
    return Member(number, params, *built[:4], batch_params=own, roles=built.roles)


_devices: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Study -> where its models train, if not where they are built."""


def build_on(study: Study, device: torch.device) -> None:
    """Move each model of `study` to `device` once it is built, so that a trial begins as it would on the host."""
    _devices[study] = device


class Built(NamedTuple):
    """The parts of a trial as the study builds them."""

    model: nn.Module
    optimizer: Given
    rng_state: Tensor
    schedulers: list[LRScheduler]
    roles: Roles | None


def build(study: Study, number: int, params: dict[str, Any]) -> Built:
    """Build the parts of a trial. See `build_member`."""
    with undisturbed(), building(study) as parts:
        seed_all(study.seed(params, number))
        model, roles = model_of(study, params, number)
        if study in _devices:
            model.to(_devices[study])
        optimizer = study.optimizer(params, model)
        rng_state = torch.get_rng_state()
        parts += [model, *by_phase(optimizer).values()]
        return Built(model, optimizer, rng_state, new_schedulers(study, params, optimizer), roles)


def in_way(member: Member, way: Way) -> Member:
    """The same trial, to be trained in `way`."""
    return member if member.way == way else replace(member, way=way)


def group_key(member: Member) -> Hashable:
    """Return a key that is equal for members that can be fused."""
    return tuple(facts_of(member).items())


def structure_name(key: Hashable) -> str:
    """Return a short name for what `group_key` returned: the same in all processes, on all hosts and devices."""
    assert isinstance(key, tuple)
    facts = sorted(_text(fact) for fact in key if fact[0][1] != "device")
    return hashlib.blake2b(_STUDY_MODULE.sub("", "\n".join(facts)).encode(), digest_size=8).hexdigest()


_STUDY_MODULE = re.compile("_squeezer_study_[0-9a-f]{12}")
"""How `load_study` names a study's module, by its path, which differs between hosts."""


def _text(value: object) -> str:
    """Like `repr`, but the order of sets, which differs between processes, does not matter."""
    if isinstance(value, tuple):
        return f"({','.join(map(_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{','.join(sorted(map(_text, value)))}}}"
    return repr(value)


def facts_of(member: Member) -> Facts:
    """Return what must be equal for members to be fused."""
    names, facts = canonical_names(member.model), dict(member.structure.facts)
    facts.update({("trial", f"params['{name}']"): repr(value) for name, value in member.batch_params.items()})
    for phase, optimizer in by_phase(member.optimizer).items():
        prefix = "" if phase == FORWARD else f"{phase}: "
        facts.update({(prefix + owner, name): v for (owner, name), v in optimizer_facts(names, optimizer).items()})
        scales = scales_of(member.roles, optimizer)
        facts.update({(f"{prefix}parameter '{name}'", "scales"): own for name, own in scales.items()})
    return facts


def fuse_optimizers_of(study: Study, members: Sequence[Member], rows: Rows) -> tuple[Optimizers, list[Progress]]:
    """Fuse the optimizers of `members`, whose tensors are `rows`.

    Optimizer states and schedulers are copied; the copied schedulers act on the copied optimizers.
    """
    given_K = [by_phase(member.optimizer) for member in members]
    way = members[0].way
    holders_K = [{phase: holder_of(own, way) for phase, own in given.items()} for given in given_K]
    names_K = [canonical_names(member.model) for member in members]
    widest = max(study.rows, len(members))
    progress = []
    for member, holders in zip(members, holders_K, strict=True):
        pairs = [pair for holder in holders.values() for pair in holder.pairs]
        schedulers = act_on(list(member.schedulers), pairs, "Study.scheduler")
        progress.append(new_progress(study, member.params, schedulers))
    fused = {
        phase: fuse_optimizers(
            *([given[phase] for given in given_K], rows, names_K),
            *([holders[phase].made for holders in holders_K], widest, way),
            scales_of(members[0].roles, given_K[0][phase]),
        )
        for phase in given_K[0]
    }
    return Optimizers(fused), progress


def restored(study: Study, params: dict[str, Any], holders: dict[str, torch.optim.Optimizer]) -> Progress:
    """Return a trial's progress with fresh schedulers, and leave the learning rates of `holders` as they are."""
    copies = {phase: holder_of(holder) for phase, holder in holders.items()}
    schedulers = new_schedulers(study, params, as_given({phase: each.made for phase, each in copies.items()}))
    pairs = [(new, old) for each in copies.values() for old, new in each.pairs]
    return new_progress(study, params, act_on(schedulers, pairs, "Study.scheduler"))
