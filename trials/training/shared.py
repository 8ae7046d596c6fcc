"""What the trials of a group hold in common: frozen parameters that are equal in all of them."""

from collections.abc import Sequence

from torch import nn

from trials.fusion.compared.structure import canonical_names
from trials.fusion.rows import Rows
from trials.fusion.shared_base import Bases, find, part, refuse_other_bits
from trials.fusion.ways import Way
from trials.optim.several import by_phase
from trials.study import Study
from trials.training.member import Member, in_way
from trials.training.trial_state import TrialState


def held_once(study: Study, members: Sequence[Member]) -> frozenset[str]:
    """Return the names of the parameters that `members`, which can be fused, are to hold once.

    Others that had one memory while they waited have their own again.
    An optimizer that is not PyTorch's own may change parameters that have no gradient, so what it has is not shared.

    Raises:
        FuseError: one that `Study.shared` names cannot be shared.
    """
    apart: set[str] = set()
    for member in members:
        names = canonical_names(member.model)
        for optimizer in by_phase(member.optimizer).values():
            if not type(optimizer).__module__.startswith("torch.optim"):
                apart.update(names[id(p)] for group in optimizer.param_groups for p in group["params"])
    models = [member.model for member in members]
    once = find(models, study.shared, apart)
    part(models, once)
    return once


def refuse_unequal(study: Study, ours: Rows, theirs: Rows) -> None:
    """Refuse trials that join, if they differ in what `Study.shared` names.

    Raises:
        FuseError: they do.
    """
    names = {**{name: name for name in ours.parameters}, **ours.aliases}
    refuse_other_bits(ours.once, theirs.once, names, study.shared)


def revived(study: Study, trials: Sequence[Member | TrialState], way: Way) -> list[Member]:
    """Return `trials` as members to be trained in `way`. Those made from states hold equal frozen parameters once."""
    bases, members = Bases(), []
    for each in trials:
        if isinstance(each, TrialState):
            member = each.member(study, way)
            bases.adopt(member.model)
        else:
            member = in_way(each, way)
        members.append(member)
    return members


def let_go(model: nn.Module, rows: Rows) -> None:
    """Let a model whose tensors are in `rows`, but which is needed for its code, hold no base of its own."""
    for name, parameter in model.named_parameters():
        if name in rows.once:
            parameter.data = rows.once[name]
