"""Which of several engines in one process is squeezed: a device has one page, and a script may train more than one.

The first one is, until it has stopped training and another has begun; and again once it trains on and the other has
stopped. The order of steps alone decides, so that all ranks squeeze the same engine: one that the script has dropped is
freed when Python happens to, and on a last stage never, since DeepSpeed keeps it alive in the graph of its outputs. A
teacher that only evaluates takes nothing from the engine that trains, in whatever order they were made.
"""

from collections.abc import Callable, Hashable
from typing import Any

from ds_hooks.engine import WAITING
from ds_hooks.instrument import Replaced, below, keep_out_of_copies
from ds_hooks.step_hooks import Steps
from ds_hooks.whose_error import is_of_the_script

AT_ONCE = 1
"""How many steps an engine waits that has never had the hooks."""
_LEAST_STEPS = 8
_WORTH = 4


def steps_to_wait(waited: int, had: int) -> int:
    """How many steps an engine waits that has lost the hooks.

    Engines that take turns must not hand them on and on: the daemon learns anew each time.

    Args:
        waited: how many it waited for them.
        had: how many it then made with them; if they were few, it waits twice as long.
    """
    return _LEAST_STEPS if had >= _WORTH * waited else max(_LEAST_STEPS, 2 * waited)


class Successor:
    """Waits for the hooks, beside an engine that another one's training keeps from having them.

    Args:
        engine: as `engine.check_engine` accepts it.
        steps: the engine's.
        others: changes with each step of the engine that has, or had, the hooks.
        patience: how many steps of `engine` without any of the other's.
        take_over: called once, after that many.
        on_fault: takes what `take_over` raised.
    """

    def __init__(
        self,
        engine: Any,
        steps: Steps,
        others: Callable[[], Hashable],
        patience: int,
        take_over: Callable[[], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._steps = steps
        self._others = others
        self._patience = patience
        self._take_over = take_over
        self._on_fault = on_fault
        self._seen = others()
        self._since = steps.begun
        self._waits = True
        self._replaced = Replaced(
            engine, "train_batch", self._around(below(engine, "train_batch")), vars(engine).get("train_batch")
        )
        engine.train_batch = self._replaced.ours
        self._copies = keep_out_of_copies(engine, [self._replaced])
        WAITING.add(engine)

    def leave(self) -> None:
        """Wait no longer, and restore the engine. A second call does nothing."""
        if self._waits:
            self._waits = False
            self._copies.restore()
            self._replaced.restore()
            WAITING.discard(self._engine)

    def _around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def train_batch(*args: Any, **kwargs: Any) -> Any:
            if self._waits:
                self._steps.begun += 1
            found = run(*args, **kwargs)
            if self._waits:
                try:
                    self._look()
                except Exception as error:
                    if is_of_the_script(error):
                        raise
                    self._on_fault(error)
            return found

        return train_batch

    def _look(self) -> None:
        now, begun = self._others(), self._steps.begun
        if now != self._seen:
            self._seen, self._since = now, begun
        elif begun - self._since >= self._patience:
            self.leave()
            self._take_over()
