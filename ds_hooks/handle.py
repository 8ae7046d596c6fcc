"""The hooks' life: attach to an engine, and leave it by choice or after a fault."""

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ds_hooks.clock.base import BubbleClock
from ds_hooks.clock.registry import clock_for
from ds_hooks.engine import AttachError, check_engine, device_type, waits_of
from ds_hooks.instrument import Instrument
from ds_hooks.publisher import Publisher
from ds_hooks.shared.driver import DriverError
from ds_hooks.shared.page import Field, Role
from ds_hooks.shared.page_file import Page, PageError, page_path, runtime_dir, socket_path
from ds_hooks.shared.wire import Bye, Hello
from ds_hooks.side_process import SideProcess
from ds_hooks.step_hooks import StepHooks


def attach(engine: Any, *, directory: Path | str | None = None, local_rank: int | None = None) -> "Handle":
    """Publish the bubbles of `engine` to this device's daemon, whether one runs yet or not.

    It never raises and never blocks. If the hooks cannot work, they say so on stderr, and the returned handle is off.

    Args:
        engine: what `deepspeed.initialize` returned for a `PipelineModule` or `DualPipeVModule`.
        directory: where pages and sockets are; by default `$SQUEEZER_DIR`, else the user's own runtime directory.
        local_rank: this process's number on its machine; by default `$LOCAL_RANK`, else the engine's.
    """
    handle = Handle(engine)
    try:
        handle.start(Path(directory) if directory is not None else runtime_dir(), local_rank)
    except Exception as error:
        handle.switch_off(error)
    return handle


class Handle:
    """The hooks of one engine.

    Attributes:
        enabled: whether they work.
        fault: why they do not, if a fault switched them off.
    """

    def __init__(self, engine: Any) -> None:
        self.enabled = False
        self.fault: str | None = None
        self._engine = engine
        self._rank = 0
        self._page: Page | None = None
        self._clock: BubbleClock
        self._side: SideProcess
        self._publisher: Publisher | None = None
        self._hooks: StepHooks | None = None
        self._instrument: Instrument | None = None

    def start(self, directory: Path, local_rank: int | None) -> None:
        """Connect and wrap; only `attach` calls this.

        Raises:
            AttachError: the hooks cannot serve this engine.
            PageError: the page must not be used, or another main job does.
            DriverError: the device cannot tell when it comes to a wait.
        """
        engine = self._engine
        check_engine(engine)
        if local_rank is None:
            local_rank = int(os.environ.get("LOCAL_RANK", max(int(getattr(engine, "local_rank", 0) or 0), 0)))
        self._rank = int(engine.global_rank)
        waits = waits_of(engine)
        page = Page.open(page_path(directory, local_rank))
        try:
            page.claim(Role.MAIN)
        except PageError:
            page.close()  # its words are another job's: leave them alone
            raise
        try:
            self._clock = clock_for(device_type(engine), page, time.monotonic_ns)
        except Exception:
            page.close()
            raise
        self._page = page
        self._side = SideProcess(page.words, can_halt=self._clock.follows_host)
        self._side.halt()
        self._publisher = Publisher(f"ipc://{socket_path(directory, local_rank)}")
        self._hooks = StepHooks(engine, waits, page.words, self._clock, self._side, self._publisher)
        self._instrument = Instrument(engine, self._hooks, self.switch_off)
        self._instrument.wrap()
        self.enabled = True
        hello = Hello(
            os.getpid(), self._rank, engine.grid.world_size, engine.stage_id, engine.num_stages, engine.micro_batches
        )
        self._publisher.hello(time.monotonic_ns(), hello)

    def detach(self) -> None:
        """Restore the engine, say goodbye to the daemon, and give the page back. A second call does nothing."""
        self._leave(fault=0)

    def switch_off(self, error: BaseException) -> None:
        """Stop for good after a fault, once and loudly."""
        if self.fault is not None:
            return
        self.fault = f"{type(error).__name__}: {error}"
        print(
            f"[ds_hooks] rank {self._rank}: switched off; training continues without squeezing: {error}",
            file=sys.stderr,
        )
        if not isinstance(error, (AttachError, DriverError, PageError)):
            traceback.print_exception(error, file=sys.stderr)
        try:
            self._leave(fault=1)
        except Exception as second:
            print(f"[ds_hooks] rank {self._rank}: and could not tidy up: {second}", file=sys.stderr)

    def _leave(self, fault: int) -> None:
        self.enabled = False
        if self._instrument is not None:
            self._instrument.unwrap()
        page, publisher, self._page, self._publisher = self._page, self._publisher, None, None
        if page is not None:
            self._side.leave()
            page.words[Field.HOOK_FAULTS] += fault
            page.words[Field.MAIN_PID] = 0
            self._clock.leave(wait=not fault)
            page.close()
        if publisher is not None:
            if self._hooks is not None:
                self._hooks.leave()
            publisher.send(time.monotonic_ns(), Bye(self._rank, fault))
            publisher.close()
