"""Wraps one engine object and DeepSpeed's communication object at run time, and restores both.

Only attributes of these two objects are set. What others set over them later stays theirs: a wrapper of ours below it
only passes through from then on. Around every hook stands a barrier: an exception of the hook goes to
`on_fault` and never reaches the training; an exception of the training passes through, and so does one that a signal
handler or another thread of the script raises while a hook happens to run.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ds_hooks.engine import HOOKED
from ds_hooks.step_hooks import StepHooks
from ds_hooks.whose_error import is_of_the_script


class Replaced(NamedTuple):
    """An attribute that holds a wrapper."""

    owner: Any
    name: str
    ours: Any
    before: Any
    """What the object itself held; None: nothing, so that its class's was used."""

    def restore(self) -> None:
        """Unless others have set something over it since."""
        if vars(self.owner).get(self.name) is not self.ours:
            return
        if self.before is not None:
            setattr(self.owner, self.name, self.before)
        else:
            vars(self.owner).pop(self.name)


def below(owner: Any, name: str) -> Callable[..., Any]:
    """What an attribute that is set on `owner` hides: its own, or what its class has at the time of the call.

    Scripts patch DeepSpeed's classes, also after their engine was built.
    """
    before = getattr(owner, name)
    if name in vars(owner):
        return before  # type: ignore[no-any-return]

    def current(*args: Any, **kwargs: Any) -> Any:
        kind = type(owner)
        for each in kind.__mro__:
            if name in vars(each):
                found = vars(each)[name]
                bind = getattr(type(found), "__get__", None)
                return (found if bind is None else bind(found, owner, kind))(*args, **kwargs)
        return before(*args, **kwargs)

    return current


def keep_out_of_copies(engine: Any, replaced: Sequence[Replaced]) -> Replaced:
    """Let copies of `engine` be without our wrappers, which would train `engine` itself."""
    state_of = below(engine, "__getstate__")

    def state() -> Any:
        found = state_of()
        if not isinstance(found, dict):
            return found
        found = dict(found)
        for each in (ours, *reversed(replaced)):
            if each.owner is engine and found.get(each.name) is each.ours:
                del found[each.name]
                if each.before is not None:
                    found[each.name] = each.before
        return found

    ours = Replaced(engine, "__getstate__", state, vars(engine).get("__getstate__"))
    engine.__getstate__ = state
    return ours


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
        self.hooks = hooks
        self._on_fault = on_fault
        self._replaced: list[Replaced] = []
        self._instructions: dict[type, tuple[Any, Any]] = {}
        """Kind of instruction to our wrapper and what it wraps."""
        self._map_before: dict[type, Any] | None = None
        """The map that the engine itself held; None: its class's is used."""

    def wrap(self) -> None:
        """Set the wrappers."""
        engine, hooks = self._engine, self.hooks
        self._map_before = vars(engine).get("_INSTRUCTION_MAP")
        self._instructions = {}
        self._replace(engine, "_INSTRUCTION_MAP", {})
        self._follow_map()
        around = (
            ("train_batch", hooks.begin_step, hooks.end_step),
            ("_exec_schedule", self._begin_schedule, hooks.end_schedule),
            ("_aggregate_total_loss", hooks.begin_loss, hooks.end_loss),
        )
        for name, before, after in around:
            self._replace(engine, name, self._around(below(engine, name), before, after))
        backend = getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None)
        if backend is not None:
            # it outlives an engine that the script drops, and must not hold it
            self._replace(backend, "all_reduce", _around_collective(weakref.ref(self), below(backend, "all_reduce")))
            weakref.finalize(engine, self._replaced[-1].restore).atexit = False
        self._replaced.append(keep_out_of_copies(engine, tuple(self._replaced)))
        HOOKED.add(engine)
        self.active = True

    def unwrap(self) -> None:
        """Leave both objects as they were, but for what others have set since. A second call does nothing."""
        self.active = False
        for each in self._replaced:
            if not self._was_changed(each.ours):
                each.restore()
        self._replaced = []
        HOOKED.discard(self._engine)

    def _replace(self, owner: Any, name: str, ours: Any) -> None:
        self._replaced.append(Replaced(owner, name, ours, vars(owner).get(name)))
        setattr(owner, name, ours)

    def _begin_schedule(self, *schedule: Any) -> None:
        self._follow_map()
        self.hooks.begin_schedule(*schedule)

    def _follow_map(self) -> None:
        """Take over what a script has changed since in the map that ours hides. What it has set in ours stays."""
        hidden = type(self._engine)._INSTRUCTION_MAP if self._map_before is None else self._map_before
        known, ours = self._instructions, self._replaced[0].ours
        if hidden == {kind: run for kind, (_, run) in known.items()}:
            return
        for kind in {**known, **hidden}:
            wrapper, run = known.pop(kind, (None, None))
            is_ours = ours.get(kind) is wrapper
            if kind not in hidden:
                if is_ours:
                    del ours[kind]
                continue
            if hidden[kind] is not run:
                wrapper, run = self._around_instruction(kind, hidden[kind]), hidden[kind]
            known[kind] = wrapper, run
            if is_ours:
                ours[kind] = wrapper

    def _was_changed(self, ours: Any) -> bool:
        """Whether others have set instructions of their own in our map. It stays then, without our wrappers."""
        if not isinstance(ours, dict):
            return False
        wrappers = {kind: wrapper for kind, (wrapper, _) in self._instructions.items()}
        if ours == wrappers:
            return False
        for kind, (wrapper, run) in self._instructions.items():
            if ours.get(kind) is wrapper:
                ours[kind] = run
        return True

    def fault(self, error: Exception) -> None:
        """What a hook raised is no error of the training, but what the script itself raises in it is."""
        if is_of_the_script(error):
            raise error
        self._on_fault(error)

    def _around(self, run: Callable[..., Any], before: Callable[..., None], after: Callable[[], None]) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            try:
                if self.active:
                    try:
                        before(*args)
                    except Exception as error:
                        self.fault(error)
                return run(*args, **kwargs)
            finally:
                if self.active:
                    try:
                        after()
                    except Exception as error:
                        self.fault(error)

        return method

    def _around_instruction(self, kind: type, run: Callable[..., Any]) -> Callable[..., Any]:
        name = kind.__name__
        hooks = self.hooks

        def instruction(engine: Any, **kwargs: Any) -> Any:
            if not (self.active and hooks.in_schedule):
                return run(engine, **kwargs)
            begin_ns = 0
            try:
                begin_ns = hooks.before_instruction(name)
            except Exception as error:
                self.fault(error)
            try:
                return run(engine, **kwargs)
            finally:
                if self.active:
                    try:
                        hooks.after_instruction(begin_ns)
                    except Exception as error:
                        self.fault(error)

        return instruction


def _around_collective(of_engine: "weakref.ref[Instrument]", run: Callable[..., Any]) -> Callable[..., Any]:
    """A blocking collective inside the optimizer's instruction is a wait, too. No other wrapper sees it."""

    def collective(*args: Any, **kwargs: Any) -> Any:
        instrument = of_engine()
        if instrument is None or not (instrument.active and instrument.hooks.in_optimizer):
            return run(*args, **kwargs)
        opened = False
        try:
            opened = instrument.hooks.begin_collective(*args, **kwargs)
        except Exception as error:
            instrument.fault(error)
        try:
            return run(*args, **kwargs)
        finally:
            if opened and instrument.active:
                try:
                    instrument.hooks.close_bubble()
                except Exception as error:
                    instrument.fault(error)

    return collective
