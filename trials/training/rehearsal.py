"""Throw-away training: the rehearsal before a study, and the rate that a dedicated device would reach."""

import hashlib
import sys
import time
from collections.abc import Hashable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import optuna
import torch

from trials.fusion.own_code.streams import undisturbed
from trials.fusion.shared_base import Bases
from trials.gate.base import HOST_UNIT, Gate, OpenGate
from trials.own_logger import own_logger
from trials.study import Study
from trials.training.group import TrialGroup
from trials.training.inputs.batches import fuse_batches, shapes, work_of
from trials.training.member import Member, build_member, group_key, structure_name
from trials.training.most_fused import Known, MostFused, describe, most_fused

log = own_logger(__name__)


def train_ungated(study: Study, trials: int) -> Iterator[tuple[int, float]]:
    """Train `trials` fused trials with random hyperparameters, again and again, as long as the caller asks.

    Yields:
        The work of each step, in trials × examples, and its seconds, see `measure_dedicated`. Building trials, and what
        the caller does meanwhile, does not count.

    Raises:
        FuseError: an epoch has no batches.
    """
    while True:
        group = _random_group(study, trials, OpenGate())
        began_s = _own_s()
        for epoch in range(study.epochs):  # schedulers may allow no more
            for inputs, targets, per_trial in group.batches(epoch):
                group.train_step(inputs, targets, per_trial)
                yield work_of(study, trials, inputs, targets, per_trial), _own_s() - began_s
                began_s = _own_s()
            group.end_epoch()
        group.keep([])  # it refers to itself, and the next one needs its memory


def rehearse(study: Study, known: Known | None = None) -> MostFused:
    """Train two throw-away trials for some steps, so that imports, compilations and errors come first.

    Args:
        study: the user's.
        known: what was found before; None: nothing.

    Returns:
        How many trials to fuse.
    """
    try:
        members = _random_members(study, 2)
        of_study, seen = _structures(members), list[Hashable]()
        group = TrialGroup(study, members, OpenGate())
        for inputs, targets, per_trial in islice(group.batches(0), STEPS_TRIED):
            seen.append((shapes((inputs, targets)), per_trial))
            group.train_step(inputs, targets, per_trial)
        group.end_epoch()
        _try_mixed(study, _random_group(study, 2, OpenGate()), OpenGate())
        if known is None or not _is_measured(study):
            return how_many(study)
        situation = _situation(study, of_study, seen)
        found = known.find(situation)
        if found is None:
            found = how_many(study)
            known.keep(situation, found)
        else:
            log.info("trials that train at once: %d, as measured before (%s)", found.trials, describe(found))
        return found
    except (Exception, SystemExit) as error:
        _say_rehearsal_failed(study, error)
        return MostFused(study.rows)


def how_many(study: Study) -> MostFused:
    """Return how many trials to fuse: what the study says, or what trains fastest on this machine.

    Not on a GPU: the host's time, which counts here, is not the device's.
    """
    if not _is_measured(study):
        return MostFused(study.rows)
    with undisturbed():
        found = most_fused(study, _most(study), lambda trials: _random_group(study, trials, OpenGate()))
    log.info("trials that train at once: %d (%s)", found.trials, describe(found))
    return found


def _is_measured(study: Study) -> bool:
    return study.fused == "auto" and _most(study) > 1 and not torch.cuda.is_initialized()


def _most(study: Study) -> int:
    return min(study.rows, study.trials)


def _structures(members: list[Member]) -> list[str]:
    return [structure_name(group_key(member)) for member in members]


def _situation(study: Study, structures: list[str], seen: list[Hashable]) -> str:
    """Name all of the study that decides how many trials train fastest: its code, models, optimizers and batches."""
    modules = [sys.modules.get(each.__module__) for each in type(study).__mro__]
    files = dict.fromkeys(getattr(module, "__file__", None) for module in modules)
    code = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if file is not None]
    facts = code, structures, seen, _most(study), study.accumulate, study.autocast
    return hashlib.sha256(repr(facts).encode()).hexdigest()


STEPS_TRIED = 3
"""The first step allocates, the second has the optimizer's state, and the third is as all later ones."""


def try_out(study: Study, gate: Gate, trials: int) -> None:
    """Train `trials` throw-away trials for some steps, and evaluate them, through `gate`.

    An error of the study is logged, and comes again with the first real trials.

    Raises:
        torch.OutOfMemoryError: they do not fit.
    """
    try:
        gate.enter(HOST_UNIT)
        group = _random_group(study, trials, gate)
        for inputs, targets, per_trial in islice(group.batches(0), STEPS_TRIED):
            group.train_step(inputs, targets, per_trial)
            gate.enter(HOST_UNIT)
        _try_mixed(study, group, gate)
        group.evaluate()
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:
        _say_rehearsal_failed(study, error)
    gate.enter(HOST_UNIT)  # its tensors are freed in a bubble


SLICES, MOST_OF_A_SLICE = 4, 4.0


def measure_dedicated(study: Study, trials: int, seconds: float) -> dict[str, float]:
    """Train fused trials without a gate for `seconds`, to measure the rate of a dedicated device.

    Both numbers of trials take turns, so that a machine whose speed drifts is as fast for one as for the other. Time in
    which the processor ran something else does not count. Where trials are short, building them may take up to three
    times as long again.

    Returns:
        ``{"trials": K, "work_per_s": trials × examples per second}``, without the first steps, and the same for a
        quarter of the trials as ``few_trials`` and ``few_work_per_s``. K is `trials`, halved until they fit into the
        device's memory.
    """
    while True:
        steps = train_ungated(study, trials)
        try:
            _warm_up(steps)
            break
        except torch.OutOfMemoryError:
            if trials == 1:
                raise
        trials //= 2
    few = max(1, trials // 4)
    few_steps = train_ungated(study, few)
    _warm_up(few_steps)
    each_s = seconds / SLICES / 2
    slices = [(_trained(steps, each_s), _trained(few_steps, each_s)) for _ in range(SLICES)]
    many_per_s, few_per_s = (
        sum(work for work, _ in own) / sum(took_s for _, took_s in own) for own in zip(*slices, strict=True)
    )
    return {"trials": trials, "work_per_s": many_per_s, "few_trials": few, "few_work_per_s": few_per_s}


def _warm_up(steps: Iterator[tuple[int, float]]) -> None:
    for _ in islice(steps, STEPS_TRIED):
        pass


def _trained(steps: Iterator[tuple[int, float]], seconds: float) -> tuple[int, float]:
    """Return work and seconds of steps that take `seconds` together, or of as many as pass in a multiple of that."""
    work, took_s, until_s = 0, 0.0, time.monotonic() + MOST_OF_A_SLICE * seconds
    while took_s <= 0 or (took_s < seconds and time.monotonic() < until_s):  # one that waited may seem to take no time
        more, step_s = next(steps)
        work, took_s = work + more, took_s + step_s
    return work, took_s


def _own_s() -> float:
    """The time, but for that in which this thread has waited for a processor."""
    return time.monotonic() - _waited_s()


def _waited_s() -> float:
    """How long this thread has been ready to run while its processor ran others; 0 where the kernel does not count it.

    A side task of the idle class would else seem slow wherever anything else runs on the machine. A GPU continues while
    the thread waits, so there it is 0.
    """
    if torch.cuda.is_initialized():
        return 0.0
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _random_group(study: Study, trials: int, gate: Gate) -> TrialGroup:
    """Return a group of trials with random hyperparameters."""
    return TrialGroup(study, _random_members(study, trials), gate)


def _random_members(study: Study, trials: int) -> list[Member]:
    """Return trials with random hyperparameters: the first one's, where others would not join it."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    draws = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    bases, members = Bases(), [build_member(study, 0, _suggested(study, draws))]
    for number in range(1, trials):
        member = build_member(study, number, _suggested(study, draws))
        is_like = group_key(member) == group_key(members[0])
        members.append(member if is_like else build_member(study, number, members[0].params))
    for member in members:
        bases.adopt(member.model)
    return members


MOST_PRUNED = 100


def _suggested(study: Study, draws: optuna.Study) -> dict[str, Any]:
    """Return the hyperparameters of a random trial that is not pruned before it begins."""
    for _ in range(MOST_PRUNED):
        with suppress(optuna.TrialPruned):
            return study.suggest(draws.ask())
    return study.suggest(draws.ask())


def _try_mixed(study: Study, group: TrialGroup, gate: Gate) -> None:
    """Train some steps with a batch per trial, as for trials at different epochs. These take more memory.

    If they fail, trials at different epochs will not be fused.

    Raises:
        torch.OutOfMemoryError: they do not fit.
    """
    if not study.mix_epochs:
        return
    try:
        for inputs, targets, per_trial in islice(group.batches(0), STEPS_TRIED):
            if not per_trial:
                group.train_step(*fuse_batches([(inputs, targets) for _ in range(group.size)]))
            gate.enter(HOST_UNIT)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        study.mix_epochs = False
        cause = f"{type(error).__name__}: {error}"
        log.warning("trials at different epochs are not fused, but take turns: %s", cause)


def _say_rehearsal_failed(study: Study, error: BaseException) -> None:
    log.warning("a rehearsal of %s failed: %s: %s", type(study).__name__, type(error).__name__, error)
