"""Wraps one engine object and DeepSpeed's communication object at run time, and restores both.

Only attributes of these two objects are set. Around every hook stands a barrier: an exception of the hook goes to
`on_fault` and never reaches the training; an exception of the training passes through.
"""

import sys
from collections.abc import Callable
from typing import Any

from ds_hooks.engine import WRAPPED_METHODS, WRAPPER_MARK
from ds_hooks.step_hooks import StepHooks


class Instrument:
    """The wrappers of one engine.

    Args:
        engine: as `engine.check_engine` accepts it.
        hooks: called around instructions, schedules, steps, the loss and collectives.
        on_fault: takes what a hook raised. It calls `unwrap`.
    """

    def __init__(self, engine: Any, hooks: StepHooks, on_fault: Callable[[BaseException], None]) -> None:
        self.active = False
        """Whether hooks are called. Checked in each call, since a step may be under way when the wrappers go."""
        self._engine = engine
        self._hooks = hooks
        self._on_fault = on_fault
        self._replaced: list[tuple[Any, str, Any]] = []

    def wrap(self) -> None:
        """Set the wrappers."""
        engine, hooks = self._engine, self._hooks
        self._replaced = [(engine, name, vars(engine).get(name)) for name in ("_INSTRUCTION_MAP", *WRAPPED_METHODS)]
        wrapped_map = {kind: self._around_instruction(kind, run) for kind, run in engine._INSTRUCTION_MAP.items()}
        train_batch, exec_schedule = engine.train_batch, engine._exec_schedule
        aggregate_total_loss = engine._aggregate_total_loss
        engine._INSTRUCTION_MAP = wrapped_map
        engine.train_batch = self._around(train_batch, hooks.begin_step, hooks.end_step)
        setattr(engine.train_batch, WRAPPER_MARK, True)
        engine._exec_schedule = self._around(exec_schedule, hooks.begin_schedule, hooks.end_schedule)
        engine._aggregate_total_loss = self._around(aggregate_total_loss, hooks.begin_loss, hooks.end_loss)
        backend = getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None)
        if backend is not None:
            self._replaced.append((backend, "all_reduce", vars(backend).get("all_reduce")))
            backend.all_reduce = self._around_collective(backend.all_reduce)
        self.active = True

    def unwrap(self) -> None:
        """Leave both objects as they were. A second call does nothing."""
        self.active = False
        for owner, name, before in self._replaced:
            if before is not None:
                setattr(owner, name, before)
            else:
                vars(owner).pop(name, None)
        self._replaced = []

    def _around(self, run: Callable[..., Any], before: Callable[..., None], after: Callable[[], None]) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            if self.active:
                try:
                    before(*args)
                except Exception as error:
                    self._on_fault(error)
            try:
                return run(*args, **kwargs)
            finally:
                if self.active:
                    try:
                        after()
                    except Exception as error:
                        self._on_fault(error)

        return method

    def _around_instruction(self, kind: type, run: Callable[..., Any]) -> Callable[..., Any]:
        name = kind.__name__
        hooks = self._hooks

        def instruction(engine: Any, **kwargs: Any) -> Any:
            if not hooks.in_schedule:
                return run(engine, **kwargs)
            begin_ns = 0
            try:
                begin_ns = hooks.before_instruction(name)
            except Exception as error:
                self._on_fault(error)
            try:
                return run(engine, **kwargs)
            finally:
                if self.active:
                    try:
                        hooks.after_instruction(begin_ns)
                    except Exception as error:
                        self._on_fault(error)

        return instruction

    def _around_collective(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A blocking collective inside the optimizer's instruction is a wait, too. No other wrapper sees it."""
        hooks = self._hooks

        def collective(*args: Any, **kwargs: Any) -> Any:
            if not hooks.in_optimizer:
                return run(*args, **kwargs)
            opened = False
            try:
                opened = hooks.begin_collective(*args, **kwargs)
            except Exception as error:
                self._on_fault(error)
            try:
                return run(*args, **kwargs)
            finally:
                if opened and self.active:
                    try:
                        hooks.close_bubble()
                    except Exception as error:
                        self._on_fault(error)

        return collective
