"""The hooks' life: attach to an engine, and leave it by choice or after a fault."""

import gc
import os
import sys
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

from ds_hooks.clock.base import BubbleClock
from ds_hooks.clock.registry import clock_for
from ds_hooks.engine import HOOKED, AttachError, HasHooksError, check_engine, check_release, device_type, waits_of
from ds_hooks.instrument import Instrument
from ds_hooks.message_sender import MessageSender, NoRoomError
from ds_hooks.notice import notice
from ds_hooks.pyzmq import NoPyzmqError, load_pyzmq
from ds_hooks.shared.cuda_driver import DriverError
from ds_hooks.shared.page.file import Page, PageError, page_path, runtime_dir, socket_of
from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.processes.ranks import LOCAL_RANK, MASTER_PORT, first_number
from ds_hooks.shared.wire import Bye, Hello
from ds_hooks.side_process import SideProcess
from ds_hooks.step_hooks import StepHooks, Steps
from ds_hooks.successor import Successor
from ds_hooks.take_page import check_spare, take_page


def attach(engine: Any, *, directory: Path | str | None = None, local_rank: int | None = None) -> "Handle":
    """Publish the bubbles of `engine` to this device's daemon, whether one runs yet or not.

    It never raises and never blocks. If the hooks cannot work, they say so on stderr, and the returned handle is off.
    The hooks leave with `Handle.detach`, or with the engine when the script drops it.

    Args:
        engine: what `deepspeed.initialize` returned for a `PipelineModule` or `DualPipeVModule`.
        directory: where pages and sockets are; by default `$SQUEEZER_DIR`, else the user's own runtime directory.
        local_rank: this process's number on its machine; by default as the launcher says (`shared.ranks`),
            else the engine's.
    """
    handle = Handle(engine)
    try:
        handle.start(Path(directory) if directory is not None else runtime_dir(), local_rank)
    except HasHooksError as error:
        handle.fault = str(error)
        notice(handle.fault)
    except Exception as error:
        handle.switch_off(error)
    return handle


_HANDLES: "weakref.WeakSet[Handle]" = weakref.WeakSet()
"""Those of this process."""
_TURNS: dict[tuple[Path, int], Steps] = {}
"""Of each device, the steps of the engine that has the hooks, or had them when it was freed: see `successor`."""


class Handle:
    """The hooks of one engine.

    Attributes:
        enabled: whether they work. Another engine of this process may, see `successor`.
        fault: why they do not, if a fault switched them off or the engine had others already.
    """

    def __init__(self, engine: Any) -> None:
        self.enabled = False
        self.fault: str | None = None
        self._engine = engine
        self._rank = 0
        self._place: tuple[Path, int] | None = None
        self._steps = Steps()
        self._connection: _Connection | None = None
        self._engine_gone: weakref.finalize[[int], Any] | None = None
        self._hooks: StepHooks | None = None
        self._instrument: Instrument | None = None
        self._successor: Successor | None = None

    def start(self, directory: Path, local_rank: int | None) -> None:
        """Connect and wrap, or wait for those who have; only `attach` calls this.

        Raises:
            AttachError: the hooks cannot serve this engine.
            PageError: the page must not be used, or another main job does.
            DriverError: the device cannot tell when it comes to a wait.
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
        if HOOKED:
            gc.collect()  # an engine that the script has dropped gives its page back now, not in the middle of a step
        self._place = directory, local_rank
        if self._place not in _TURNS:
            self._begin(directory, local_rank)
            return
        self._successor = Successor(engine, self._steps, self._turn, self._take_over, self.switch_off)
        if self._others():
            notice(f"rank {self._rank}: this engine is squeezed once the one attached before it has stopped training")

    def _others(self) -> list["Handle"]:
        """Those that have hooks on the same device."""
        return [each for each in _HANDLES if each.enabled and each._place == self._place]

    def _turn(self) -> tuple[Steps, int] | None:
        steps = None if self._place is None else _TURNS.get(self._place)
        return None if steps is None else (steps, steps.begun)

    def _take_over(self) -> None:
        assert self._place is not None  # `start` has set it
        formers = self._others()
        for former in formers:
            former.detach()
        self._begin(*self._place)
        if formers:
            notice(f"rank {self._rank}: another engine is squeezed from now on; the former one trains without hooks")

    def _begin(self, directory: Path, local_rank: int) -> None:
        engine = self._engine
        waits, pyzmq = waits_of(engine), load_pyzmq()
        _HANDLES.add(self)
        page = take_page(directory, local_rank)
        try:
            sender = MessageSender(pyzmq, f"ipc://{socket_of(page.path)}")
            clock = clock_for(device_type(engine), page, time.monotonic_ns)
            if page.path != page_path(directory, local_rank):
                check_spare(page, follows_host=clock.follows_host)
                notice(f"rank {self._rank}: another job has this local rank; using {page.path}")
        except Exception:
            page.close()
            raise
        side = SideProcess(page.words, can_halt=clock.follows_host)
        side.halt()
        self._connection = _Connection(page, clock, side, sender, self._rank)
        # where a script drops its engine: the socket would hang the garbage collection, and the role stay taken
        self._engine_gone = weakref.finalize(engine, self._connection.leave, 0)
        self._engine_gone.atexit = False
        self._hooks = StepHooks(engine, waits, page.words, clock, side, sender, self._steps)
        self._instrument = Instrument(engine, self._hooks, self.switch_off)
        self._instrument.wrap()
        self.enabled = True
        _TURNS[directory, local_rank] = self._steps
        hello = Hello(
            os.getpid(),
            self._rank,
            engine.grid.world_size,
            engine.stage_id,
            engine.num_stages,
            engine.micro_batches,
            (first_number(os.environ, MASTER_PORT) or 0) & 0xFFFF,
        )
        sender.hello(time.monotonic_ns(), hello)

    def detach(self) -> None:
        """Restore the engine, say goodbye to the daemon, and give the page back. A second call does nothing."""
        self._leave(fault=0)

    def switch_off(self, error: BaseException) -> None:
        """Stop for good after a fault, once and loudly."""
        if self.fault is not None:
            return
        self.fault = f"{type(error).__name__}: {error}"
        notice(f"rank {self._rank}: switched off; training continues without squeezing: {error}")
        if not isinstance(error, (AttachError, DriverError, NoPyzmqError, NoRoomError, PageError)):
            notice("".join(traceback.format_exception(error)))
        try:
            self._leave(fault=1)
        except Exception as second:
            notice(f"rank {self._rank}: cleaning up failed too: {second}")

    def _leave(self, fault: int) -> None:
        self.enabled = False
        if self._place is not None and _TURNS.get(self._place) is self._steps:
            del _TURNS[self._place]
        if self._successor is not None:
            self._successor.leave()
        if self._instrument is not None:
            self._instrument.unwrap()
        if self._engine_gone is not None:
            self._engine_gone.detach()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.leave(fault, self._hooks)


class _Connection:
    """What a handle holds of the world outside. It knows no engine, so that it outlives one that is dropped."""

    def __init__(self, page: Page, clock: BubbleClock, side: SideProcess, sender: MessageSender, rank: int) -> None:
        self.sender = sender
        self.clock = clock
        self._page = page
        self._side = side
        self._rank = rank
        self._pid = os.getpid()

    def leave(self, fault: int, hooks: StepHooks | None = None) -> None:
        """Give the page back and say goodbye, after what `hooks` still know."""
        if os.getpid() != self._pid:
            return  # a forked child, such as a data-loading worker: all this is its parent's
        self._side.halt()  # it may be starting, and would run on
        self._side.leave()
        self._page.words[Field.HOOK_FAULTS] += fault
        self._page.words[Field.MAIN_PID] = 0
        self.clock.leave(wait=not fault)
        self._page.close()
        if hooks is not None:
            hooks.leave()
        self.sender.goodbye(time.monotonic_ns(), Bye(self._rank, fault))
        self.sender.close()
