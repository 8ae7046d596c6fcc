"""The hooks' life: attach to an engine, and leave it by choice or after a fault."""

import atexit
import gc
import os
import sys
import time
import traceback
import weakref
from contextlib import suppress
from multiprocessing import parent_process, util
from pathlib import Path
from typing import Any

from ds_hooks.connection import Connection, connect
from ds_hooks.engine import (
    HOOKED,
    WAITING,
    AttachError,
    HasHooksError,
    check_engine,
    check_release,
    device_type,
    waits_of,
)
from ds_hooks.instrument import Instrument
from ds_hooks.notice import notice
from ds_hooks.pyzmq import NoPyzmqError, load_pyzmq
from ds_hooks.several_engines import AT_ONCE, Successor, steps_to_wait
from ds_hooks.shared.cuda_driver import DriverError
from ds_hooks.shared.page.file import PageError, runtime_dir
from ds_hooks.shared.processes.ranks import LOCAL_RANK, MASTER_PORT, first_number
from ds_hooks.shared.processes.room import NoRoomError
from ds_hooks.shared.wire import Hello
from ds_hooks.step_hooks import StepHooks, Steps
from ds_hooks.whose_error import is_of_the_script


def attach(engine: Any, *, directory: Path | str | None = None, local_rank: int | None = None) -> "Handle":
    """Publish the bubbles of `engine` to this device's daemon, whether one runs yet or not.

    It never blocks, and raises nothing but what a signal handler or another thread of the script raises meanwhile. If
    the hooks cannot work, they say so on stderr, and the returned handle is off. They leave with `Handle.detach`, with
    the engine when the script drops it, or with the process.

    Args:
        engine: what `deepspeed.initialize` returned for a `PipelineModule` or `DualPipeVModule`.
        directory: where pages and sockets are; by default `$SQUEEZER_DIR`, else the user's own runtime directory.
        local_rank: this process's number on its machine; by default as the launcher says (`shared.ranks`),
            else the engine's.
    """
    handle = Handle(engine)
    try:
        handle.start(Path(directory).absolute() if directory is not None else runtime_dir(), local_rank)
    except HasHooksError as error:
        handle.fault = str(error)
        notice(handle.fault)
    except BaseException as error:
        if is_of_the_script(error):
            handle.detach()
            raise
        handle.switch_off(error)
    return handle


_HANDLES: "weakref.WeakSet[Handle]" = weakref.WeakSet()
"""Those of this process."""
_TURNS: dict[tuple[Path, int], Steps] = {}
"""Of each device, the steps of the engine that has the hooks, or had them when it was freed: see `several_engines`."""


@atexit.register
def _leave_with_process() -> None:
    """Without a daemon, nobody else would remove the page."""
    for handle in [*_HANDLES]:
        handle.detach()


def _forget_in_child() -> None:
    """A forked child may build engines of its own. What it has of its parent's hooks would write to that one's page."""
    for handle in [*_HANDLES]:
        handle.forget()
    _HANDLES.clear()
    _TURNS.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class Handle:
    """The hooks of one engine.

    Attributes:
        enabled: whether they work. Another engine of this process may, see `several_engines`.
        fault: why they do not, if a fault switched them off or the engine was attached before.
    """

    def __init__(self, engine: Any) -> None:
        self.enabled = False
        self.fault: str | None = None
        self._engine = engine
        self._rank = 0
        self._place: tuple[Path, int] | None = None
        self._steps = Steps()
        self._steps_before = 0  # when it got the hooks
        self._waits_steps = AT_ONCE
        self._connection: Connection | None = None
        self._engine_gone: weakref.finalize[[int], Any] | None = None
        self._hooks: StepHooks | None = None
        self._instrument: Instrument | None = None
        self._successor: Successor | None = None

    def start(self, directory: Path, local_rank: int | None) -> None:
        """Connect and wrap, or wait for those who have; only `attach` calls this.

        Raises:
            AttachError: the hooks cannot serve this engine.
            PageError: the page must not be used, or another main job does.
            DriverError: the device cannot report when it reaches a wait.
            NoPyzmqError: pyzmq cannot be used.
            NoRoomError: there is no room for a socket.
        """
        engine = self._engine
        load_pyzmq()
        check_engine(engine)
        self._rank = int(engine.global_rank)
        deepspeed = sys.modules.get("deepspeed")  # loaded by whoever made a true engine
        warning = None if deepspeed is None else check_release(str(getattr(deepspeed, "__version__", "")))
        if warning is not None:
            notice(f"rank {self._rank}: {warning}")
        if local_rank is None:
            local_rank = first_number(os.environ, LOCAL_RANK)
        if local_rank is None:
            local_rank = max(int(getattr(engine, "local_rank", 0) or 0), 0)
        if HOOKED or WAITING:
            gc.collect()  # an engine that the script has dropped gives its page back now, not in the middle of a step
        self._place = directory, local_rank
        _HANDLES.add(self)
        if parent_process() is not None:
            util.Finalize(None, _leave_with_process, exitpriority=0)  # such a process may end without `atexit`
        if self._place not in _TURNS:
            self._begin(connect(directory, local_rank, device_type(engine), self._rank))
            return
        self._wait()
        if self._holder() is not None:
            notice(f"rank {self._rank}: this engine is squeezed once the one attached before it has stopped training")

    def _holder(self) -> "Handle | None":
        """The one that has hooks on the same device."""
        return next((each for each in _HANDLES if each.enabled and each._place == self._place), None)

    def _turn(self) -> tuple[Steps, int] | None:
        steps = None if self._place is None else _TURNS.get(self._place)
        return None if steps is None else (steps, steps.begun)

    def _wait(self) -> None:
        take_over, on_fault = self._take_over, self.switch_off
        self._successor = Successor(self._engine, self._steps, self._turn, self._waits_steps, take_over, on_fault)

    def _take_over(self) -> None:
        assert self._place is not None  # `start` has set it
        former = self._holder()
        if former is None:
            self._begin(connect(*self._place, device_type(self._engine), self._rank))
            return
        try:
            self._begin(former._give())
        finally:
            former._wait()
        if self._waits_steps == AT_ONCE:
            notice(
                f"rank {self._rank}: another engine is squeezed from now on; the former one trains without hooks until "
                f"it has made {former._waits_steps} steps while the other made none"
            )

    def _give(self) -> Connection:
        """Leave the engine, and give what is needed to another one."""
        connection = self._connection
        assert connection is not None and self._hooks is not None
        self._waits_steps = steps_to_wait(self._waits_steps, self._steps.begun - self._steps_before)
        self._hooks.leave()
        connection.has_served = True
        self._connection = None
        self._unwrap()
        return connection

    def _begin(self, connection: Connection) -> None:
        engine = self._engine
        assert self._place is not None  # `start` has set it
        _TURNS[self._place] = self._steps
        self._connection = connection
        # where a script drops its engine: the socket would hang the garbage collection, and the role stay taken
        self._engine_gone = weakref.finalize(engine, connection.leave, 0)
        self._engine_gone.atexit = False
        self._hooks = StepHooks(engine, waits_of(engine), connection, self._steps)
        self._instrument = Instrument(engine, self._hooks, self.switch_off)
        self._instrument.wrap()
        self.enabled = True
        self._steps_before = self._steps.begun
        hello = Hello(
            os.getpid(),
            self._rank,
            engine.grid.world_size,
            engine.stage_id,
            engine.num_stages,
            engine.micro_batches,
            (first_number(os.environ, MASTER_PORT) or 0) & 0xFFFF,
        )
        connection.pending.hello(time.monotonic_ns(), hello)

    def detach(self) -> None:
        """Restore the engine, say goodbye to the daemon, and give the page back. A second call does nothing.

        It raises nothing but what a signal handler or another thread of the script raises meanwhile.
        """
        try:
            self._leave(fault=0)
        except Exception as error:
            if is_of_the_script(error):
                raise
            self._tell_of_the_end(error)

    def forget(self) -> None:
        """Leave the engine alone in a forked child: page and daemon are its parent's."""
        self._connection = None
        self.detach()

    def switch_off(self, error: BaseException) -> None:
        """Stop for good after a fault, once and loudly."""
        if self.fault is not None:
            return
        self.fault = type(error).__name__
        with suppress(Exception):  # as where the script lets no source be read
            self._tell(error)
        try:
            self._leave(fault=1)
        except Exception as second:
            self._tell_of_the_end(second)

    def _tell(self, error: BaseException) -> None:
        self.fault = f"{type(error).__name__}: {error}"
        notice(f"rank {self._rank}: switched off; training continues without squeezing: {error}")
        if not isinstance(error, (AttachError, DriverError, NoPyzmqError, NoRoomError, PageError)):
            notice("".join(traceback.format_exception(error)))

    def _tell_of_the_end(self, error: Exception) -> None:
        with suppress(Exception):  # see `switch_off`
            notice(f"rank {self._rank}: cleaning up failed: {type(error).__name__}: {error}")

    def _leave(self, fault: int) -> None:
        if self._place is not None and _TURNS.get(self._place) is self._steps:
            del _TURNS[self._place]
        if self._successor is not None:
            self._successor.leave()
        self._unwrap()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.leave(fault)

    def _unwrap(self) -> None:
        self.enabled = False
        if self._instrument is not None:
            self._instrument.unwrap()
        if self._engine_gone is not None:
            self._engine_gone.detach()
