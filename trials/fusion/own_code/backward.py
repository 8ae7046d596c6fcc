"""What the user's own code does in a backward pass: in hooks, and in the backward of an `autograd.Function`.

There a module has no trial's tensors any more, nor may it keep anything.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from trials.fusion.errors import RefusedError
from trials.fusion.graph.module_attributes import ModuleAttributes
from trials.fusion.own_code.asked import ASKED, asking

_ALLOWED = (
    "allowed: a tensor that the forward has taken from the module before (weight = self.weight), save_for_backward, or "
    "to change buffers and attributes in the forward"
)


class Backward:
    """The modules whose own code has run for the first time, until a backward pass has shown what follows."""

    def __init__(self) -> None:
        """None yet."""
        self._watched: dict[int, tuple[str, nn.Module, ModuleAttributes, list[int]]] = {}
        self._asked: list[tuple[str, Tensor]] = []

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

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Enter it around a backward pass.

        Raises:
            RefusedError: the user's code uses or changes what is no trial's there, or asks what none can answer.
        """
        try:
            with asking(self._asked) if self._asked else nullcontext():
                yield
        except (RuntimeError, NotImplementedError) as error:
            if not re.search(r"\bmeta\b", str(error)):
                raise
            raise RefusedError(
                "the backward pass, such as a hook, uses a parameter or a buffer of its module, which is no trial's "
                f"there; {_ALLOWED}"
            ) from error
        self.check()


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _versions(module: nn.Module) -> list[int]:
    return [tensor._version for _, tensor in _named(module)]
