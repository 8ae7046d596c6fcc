"""What the user's own code does in a backward pass: in hooks, and in the backward of an `autograd.Function`.

There a module has no trial's tensors any more, nor may it keep anything. Random numbers are the trial's own where its
code ran for it alone.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode

from trials.fusion.errors import RefusedError
from trials.fusion.graph.module_attributes import ModuleAttributes
from trials.fusion.own_code.asked import ASKED, asking
from trials.fusion.own_code.drawing import draws_numbers, may_draw_unseen
from trials.fusion.own_code.lending import hooks_aside, lend, may_draw
from trials.fusion.own_code.streams import foreign_streams, kept_streams, refuse_foreign
from trials.fusion.own_code.trees import apart, heads, know
from trials.fusion.units import LayerUnits, ask_before_backward

_ALLOWED = (
    "allowed: a tensor that the forward has taken from the module before (weight = self.weight), save_for_backward, or "
    "to change buffers and attributes in the forward"
)

_DRAWS = (
    "the backward pass draws random numbers where they are no trial's own: in the loss, in a hook on a parameter, or "
    "in an autograd.Function with a rule for vmap; allowed: to draw them in the forward (noise = torch.randn_like(x)), "
    "or in hooks on values and in the backward of a Function without such a rule"
)


class Backward:
    """The modules whose own code has run for the first time, until a backward pass has shown what follows.

    It also lends trials' random streams to what runs in that pass.
    """

    def __init__(self) -> None:
        """None yet."""
        self._watched: dict[int, tuple[str, nn.Module, ModuleAttributes, list[int]]] = {}
        self._asked: list[tuple[str, Tensor]] = []
        self._has_own_code = False

    @contextmanager
    def first(
        self, trained: Sequence[tuple[str, Tensor]], others: Sequence[tuple[str, Tensor]], own: Iterable[str]
    ) -> Iterator[None]:
        """Enter it around the first forward of a module.

        What stands for `trained` parameters answers no question, not even about its `own` attributes; the `others`
        answer none about their memory.
        """
        self._asked += trained
        with asking(trained, (*ASKED, *own), buffers=others) if trained or others else nullcontext():
            yield

    def watch(self, label: str, module: nn.Module, kept: ModuleAttributes) -> None:
        """Notice what happens to a `module` that runs for all trials, after its first forward has ended well.

        Args:
            label: the module's name for messages.
            module: its parameters and buffers are no trial's.
            kept: its attributes as they were made.
        """
        if torch.is_grad_enabled():
            kept.put_back()  # a call leaves a trial's tensors in a module that it has under two names
            self._asked += module.named_parameters()
            self._watched[id(module)] = label, module, kept, _versions(module)

    def expect_own_code(self) -> None:
        """Have the next pass watched for random numbers: code of the user's has run, and may have hooks in it.

        To watch takes 2 µs for each call from Python. Where graphs and rules alone have run, there is nothing to see.
        """
        self._has_own_code = True

    def lend(self, output: Any, stream: torch.Generator | None, units: LayerUnits, own: Iterable[Tensor] = ()) -> Any:
        """Return the output of a module's code, whose backward is a unit, and draws from `stream`.

        It is lent when the gradient of the output is there, until that of another module's is, or the pass ends.
        Autograd runs nodes in the reverse order of their creation, so one trial's come one after another.

        Args:
            output: of a call.
            stream: the trial's that it was for; None: it was for all of them.
            units: the module's.
            own: the trial's parameters. Their hooks run when all trials' gradients are there, so they get no stream.
        """
        self.expect_own_code()
        for tensor in own:
            hooks_aside(tensor)
        know(output)
        tensors, together = apart(output)
        output = together([_alias(tensor) for tensor in tensors])  # of hooks on a node, those on its tensors come first
        units.before_backward(output)
        for tensor in heads(output):
            ask_before_backward(tensor, lambda gradients: lend(stream))
        return output

    def _differentiate(self, total: Tensor, watches: bool) -> None:
        if not watches:
            torch.autograd.backward(total)
            return
        with _Drawing():  # `torch.autograd.backward` would hide from it what runs inside
            engine: Any = Variable._execution_engine
            engine.run_backward((total,), (torch.ones_like(total),), False, False, (), True, True)

    def check(self) -> None:
        """Look at the modules that are watched, and watch them no longer.

        Raises:
            RefusedError: a backward pass has changed one.
        """
        watched, self._watched, self._asked = self._watched, {}, []
        for label, module, kept, versions in watched.values():
            changed = [name for _, name in kept.changed()]
            kept.put_back()
            pairs = zip(_named(module), _versions(module), versions, strict=True)
            changed += [name for (name, _), now, before in pairs if now != before]
            if changed:
                raise RefusedError(
                    f"in the backward pass, such as in a hook, '{changed[0]}' of module '{label}' changes, which is no "
                    f"trial's there; {_ALLOWED}"
                )

    def run(self, total: Tensor) -> None:
        """Differentiate `total`, which all trials add to.

        Raises:
            RefusedError: the user's code uses or changes what is no trial's there, asks what none can answer, or draws
                random numbers that are no trial's.
        """
        streams = foreign_streams() if self._watched else None
        watches, self._has_own_code = self._has_own_code, False
        try:
            with asking(self._asked) if self._asked else nullcontext():
                self._differentiate(total, watches)
        except (RuntimeError, NotImplementedError) as error:
            if "randomness error mode" in str(error):  # so says `vmap`
                raise RefusedError(_DRAWS) from error
            if not re.search(r"\bmeta\b", str(error)):
                raise
            raise RefusedError(
                "the backward pass, such as a hook, uses a parameter or a buffer of its module, which is no trial's "
                f"there; {_ALLOWED}"
            ) from error
        finally:
            lend(None)
        if streams is not None:
            refuse_foreign(streams, "the backward pass")
        self.check()


class _Drawing(TorchFunctionMode):
    """Refuses code that draws random numbers while no stream is lent, also where it catches the error.

    Whether PyTorch's stream has moved would tell less: another thread, which reads batches, may draw as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self._drew = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        own = kwargs or {}
        if draws_numbers(func) and not may_draw() and own.get("generator") is None:
            self._refuse()
        unseen = kept_streams() if may_draw_unseen(func) and not may_draw() else None
        found = self._call(func, args, own)
        if unseen is not None and unseen():
            self._refuse()
        return found

    def _refuse(self) -> NoReturn:
        self._drew = True
        raise RefusedError(_DRAWS)

    def _call(self, func: Any, args: Any, own: dict[str, Any]) -> Any:
        if isinstance(func, property):  # what stands for a method while questions are noticed
            return func.__get__(args[0])(*args[1:], **own)
        return func(*args, **own)

    def __exit__(self, kind: Any, *error: Any) -> None:
        """See `TorchFunctionMode`."""
        super().__exit__(kind, *error)
        if kind is None and self._drew:
            raise RefusedError(_DRAWS)


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor with a node of its own in autograd's graph, if that has one of it."""
    plain = tensor.layout is torch.strided and not tensor.is_nested
    return tensor if tensor.grad_fn is None or not plain else tensor.view_as(tensor)


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _versions(module: nn.Module) -> list[int]:
    return [tensor._version for _, tensor in _named(module)]
