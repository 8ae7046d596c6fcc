"""One trial of a group, alone: the user's own module, optimizer and random stream, in the state of its row."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.overrides import TorchFunctionMode

from trials.fusion.graph.inputs import arguments, moved
from trials.fusion.graph.memo import is_saved
from trials.fusion.graph.trace import FORWARD
from trials.fusion.own_code.one_by_one import fits
from trials.fusion.own_code.streams import continue_from, drawing_from, note, seeded_recurrence, undisturbed
from trials.fusion.own_code.trees import heads
from trials.fusion.registry import label, ruled
from trials.fusion.rows import generator
from trials.fusion.scores.params import given
from trials.fusion.units import ask_before_backward
from trials.optim.several import by_phase
from trials.shrinking.rules import Multipliers
from trials.shrinking.scaled_optimizer import clip_gradients, scaled
from trials.study import Study
from trials.training.audits.compare import is_continuous
from trials.training.audits.record import LOSS, SCALE, SCORE, STREAM, Record, named_batch
from trials.training.inputs.batches import parts
from trials.training.inputs.trees import copied, mapped, tensors
from trials.training.scores.objectives import joined_scores
from trials.training.shrunk import by_id, scales_of
from trials.training.trial_state import TrialState

Around = Callable[[], AbstractContextManager[Any]]
"""Makes what forward and loss run in."""


@dataclass(frozen=True, slots=True)
class Nudges:
    """Changes of numbers in size of one rounding, by random signs.

    Attributes:
        share: of each number of the input and of the parameters.
        gradients: phase -> the same for the gradients that its optimizer gets.
        seed: of the signs.
        inputs: whether the input is changed too: some are whole numbers, or must stay in a range.
    """

    share: float = 0.0
    gradients: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    inputs: bool = True


class Lone:
    """A trial that takes a step alone.

    Args:
        study: the user's.
        state: where it is.
        ask: asks the gate for a part of the work, by its name.
        nudges: of the step's operands.
    """

    def __init__(
        self,
        study: Study,
        state: TrialState,
        ask: Callable[[str], None] = lambda part: None,
        nudges: Nudges | None = None,
    ) -> None:
        nudges = nudges or Nudges()
        self._study, self._ask, self._nudges = study, ask, nudges
        self._draws = torch.Generator().manual_seed(nudges.seed)
        self._state = state = self._nudge_parameters(state)
        self._device = state.device
        self.model, given, _, self.schedulers, roles = state.revive(study, self._device)
        self.optimizers = by_phase(given)
        self._is_shrunk = roles is not None
        scales = {phase: scales_of(roles, optimizer) for phase, optimizer in self.optimizers.items()}
        self._scales = {phase: by_id(self.model, own) for phase, own in scales.items()}
        scaler = study.scaler(state.params)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self._scaler is not None:
            self._scaler.load_state_dict(dict(state.progress["scaler"]))
        self._stream = generator(self._device, state=state.stream)

    def train(self, inputs: Any, targets: Any, precision: Around, record: Record) -> None:
        """Take a training step, and keep in `record` what it makes. The batch stays as it is."""
        self.model.train()
        inputs, targets = moved(inputs, self._device), moved(copied(targets), self._device)
        with self._drawing(), self._watched(record):
            for phase, optimizer in self.optimizers.items():
                record.phase = "" if phase == FORWARD else f"{phase}: "
                if not self._train_phase(phase, optimizer, inputs, targets, precision, record):
                    return
            if self._study.scheduler_every == "step":
                for scheduler in self.schedulers:
                    if not isinstance(scheduler, ReduceLROnPlateau):
                        scheduler.step()
        record.phase = ""
        self._end(record)

    @torch.no_grad()
    def score(self, inputs: Any, targets: Any, precision: Around, record: Record) -> None:
        """Score a batch, and keep in `record` what that makes. The batch stays as it is."""
        self.model.eval()
        inputs, targets = moved(inputs, self._device), moved(copied(targets), self._device)
        with self._drawing(), self._watched(record), precision():
            outputs = self._call(FORWARD, inputs)
            record.outputs(outputs, per_trial=False)
            self._pause("score")
            if self._study.metric is None:
                score = self._study.score
                found = score(outputs, targets, **given(score, self._state.params))
                record.put(SCORE, "", joined_scores(self._study, found))
        self._end(record)

    def _train_phase(
        self,
        phase: str,
        optimizer: torch.optim.Optimizer,
        inputs: Any,
        targets: Any,
        precision: Around,
        record: Record,
    ) -> bool:
        """Train one phase. Returns whether the loss was finite."""
        study, params, scaler = self._study, self._state.params, self._scaler
        for parameter in self.model.parameters():
            parameter.grad = None
        batches, prefix = parts(study, inputs, targets), record.phase
        for number, (own_inputs, own_targets) in enumerate(batches):
            record.phase = prefix + named_batch(number, len(batches))
            with precision():
                outputs = self._call(phase, own_inputs)
                record.outputs(outputs, per_trial=False)
                self._pause("loss")
                loss = study.loss(outputs, own_targets, **given(study.loss, params))
            record.put(LOSS, record.phase, loss)
            if not torch.isfinite(loss):
                record.ended = True
                return False
            self._pause("loss")
            (loss if scaler is None else scaler.scale(loss)).div(len(batches)).backward()
        record.phase = prefix
        self._pause("optimizer step")
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in trained if phase in self._nudges.gradients else ():
            if parameter.grad is not None:
                parameter.grad = self._nudged(parameter.grad, self._nudges.gradients[phase])
        record.gradients([(name, p.grad) for name, p in self.model.named_parameters()], per_trial=False)
        if scaler is not None:
            scaler.unscale_(optimizer)
        clipped = list(self.model.parameters()) if phase == FORWARD else trained
        self._clip(clipped, self._scales[phase])
        with scaled(optimizer, self._scales[phase]) if self._is_shrunk else nullcontext():
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        return True

    def _clip(self, parameters: Sequence[Tensor], scales: Mapping[int, Multipliers]) -> None:
        norm, value = self._study.clip_norm(self._state.params), self._study.clip_value(self._state.params)
        if self._is_shrunk:
            clip_gradients([(p, scales[id(p)]) for p in parameters], norm, value)
            return
        if value is not None:
            nn.utils.clip_grad_value_(parameters, value)
        if norm is not None:
            nn.utils.clip_grad_norm_(parameters, norm)

    def _call(self, phase: str, inputs: Any) -> Any:
        forward = self.model if phase == FORWARD else getattr(self.model, phase)
        share = self._nudges.share if self._nudges.inputs else 0.0
        several = not isinstance(inputs, Tensor)
        nudged = share and any(_is_rounded(tensor, several) for tensor in tensors(inputs))

        def own(tensor: Tensor) -> Tensor:
            return self._nudged_input(tensor, share) if nudged and _is_rounded(tensor, several) else tensor.clone()

        args, kwargs = arguments(mapped(own, inputs))
        if not share or nudged:
            return forward(*args, **kwargs)
        with _FirstFloat(lambda tensor: self._nudged(tensor, share)):
            return forward(*args, **kwargs)

    def _nudged_input(self, tensor: Tensor, share: float) -> Tensor:
        return torch.where(tensor.isfinite(), self._nudged(tensor, share), tensor)  # a mask of -inf stays one

    def _nudged(self, tensor: Tensor, share: float) -> Tensor:
        """Change each number by `share` of itself, up or down."""
        signs = torch.randint(2, tensor.shape, generator=self._draws).to(tensor.device, tensor.dtype) * 2 - 1
        return tensor + tensor * (share * signs)

    def _nudge_parameters(self, state: TrialState) -> TrialState:
        share = self._nudges.share
        if not share:
            return state
        chosen = {n: t for n, t in state.tensors.items() if n not in state.buffers and is_continuous(t)}
        return replace(state, tensors={**state.tensors, **{n: self._nudged(t, share) for n, t in chosen.items()}})

    def _end(self, record: Record) -> None:
        """Keep what the step has left behind."""
        self._ask("comparison")
        after = {}
        for name, before in self._state.tensors.items():
            path, _, own = name.rpartition(".")
            found = getattr(self.model.get_submodule(path), own)
            # what the forward keeps in a buffer for later calls: a group puts it back after each, see `Memo`
            is_kept = not fits(found, before) and not is_saved(self.model, (path, own))
            after[name] = before if is_kept else found
        record.updates(self._state.tensors, after, self._state.buffers, self._state.seals)
        named = {id(p): name for name, p in self.model.named_parameters()}
        for phase, optimizer in self.optimizers.items():
            order = [named[id(p)] for group in optimizer.param_groups for p in group["params"]]
            record.optimizer("" if phase == FORWARD else f"{phase}: ", order, optimizer.state_dict())
        if self._scaler is not None:
            for name, value in self._scaler.state_dict().items():
                record.put(SCALE, name, value)
        if self._device.type == "cpu":
            record.put(STREAM, "", self._stream.get_state())

    def _pause(self, name: str) -> None:
        note(self._stream)  # what runs while the gate is closed may draw too
        self._ask(name)
        continue_from(self._stream)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        seeded = seeded_recurrence() if self._device.type == "cuda" and _drops_within(self.model) else nullcontext()
        with undisturbed(), drawing_from(self._stream), seeded, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user has seen them
            yield

    @contextmanager
    def _watched(self, record: Record) -> Iterator[None]:
        """Have the layers' outputs kept, and the gate asked before each layer, forward and backward."""
        handles = []
        for path, module in self.model.named_modules():
            name = label(module, path)
            handles.append(module.register_forward_hook(partial(self._after_layer, record, name, is_layer(module))))
            if is_layer(module):
                handles.append(module.register_forward_pre_hook(partial(self._before_layer, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_layer(self, name: str, module: nn.Module, args: Any) -> None:
        self._pause(f"{name} forward")

    def _after_layer(self, record: Record, name: str, asks: bool, module: nn.Module, args: Any, output: Any) -> Any:
        instead = record.layer(name, output, per_trial=False)
        for tensor in heads(output) if asks else ():
            ask_before_backward(tensor, lambda gradients: self._pause(f"{name} backward"))
        return instead


def is_layer(module: nn.Module) -> bool:
    """Whether no layers are inside `module`."""
    return ruled(type(module)) is not None or not list(module.children())


def _drops_within(model: nn.Module) -> bool:
    """Whether recurrent layers of the model drop what passes from one to the next."""
    return any(isinstance(layer, nn.RNNBase) and layer.dropout for layer in model.modules())


def part_names(model: nn.Module) -> list[str]:
    """Return all names of parts for which a trial of `model` asks the gate."""
    layers = [label(module, path) for path, module in model.named_modules() if is_layer(module)]
    passes = [f"{name} {way}" for name in layers for way in ("forward", "backward")]
    return [*passes, "loss", "score", "optimizer step", "comparison", "snapshot", "setup"]


def _is_rounded(tensor: Tensor, several: bool) -> bool:
    """Whether an input's numbers are rounded. Of `several`, one of whole numbers alone may be a mask.

    A model may add ``(1 - mask) * -1e9``, so that a nudge of the mask would change all.
    """
    if not is_continuous(tensor) or not several:
        return is_continuous(tensor)
    finite = tensor[tensor.isfinite()]
    return tensor.is_complex() or not torch.equal(finite, finite.round())


class _FirstFloat(TorchFunctionMode):
    """Changes the first floating-point tensor that is made, while it is entered."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._change = change
        self._done = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        output = func(*args, **(kwargs or {}))
        if not self._done and isinstance(output, Tensor) and output.is_floating_point():
            self._done = True
            return self._change(output)
        return output
