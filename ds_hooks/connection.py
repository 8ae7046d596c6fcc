"""What the hooks hold of the world outside: the page, the clock, the side task and the socket."""

import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from ds_hooks.clock.base import BubbleClock
from ds_hooks.clock.registry import clock_for
from ds_hooks.message_sender import MessageSender
from ds_hooks.notice import notice
from ds_hooks.pending import PendingMessages
from ds_hooks.pyzmq import load_pyzmq
from ds_hooks.shared.cuda_driver import DriverError
from ds_hooks.shared.page.file import Page, PageError, endpoint_of, page_path, socket_of, why_too_long
from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.processes.room import NoRoomError
from ds_hooks.shared.wire import Bye
from ds_hooks.side_process import SideProcess
from ds_hooks.take_page import check_spare, take_page


class Connection:
    """It knows no engine, so that it outlives one that is dropped, and may be handed to another.

    Attributes:
        words: of the page.
        clock: writes the bubble word.
        side: woken when a bubble opens, halted when it closes.
        sender: takes messages whose time is known.
        pending: takes the others.
        has_served: another engine before.
    """

    def __init__(self, page: Page, clock: BubbleClock, sender: MessageSender, rank: int) -> None:
        self.words = page.words
        self.clock = clock
        self.side = SideProcess(page.words, can_halt=clock.follows_host)
        self.sender = sender
        self.pending = PendingMessages(sender, clock)
        self.has_served = False
        self._page = page
        self._rank = rank
        self._pid = os.getpid()

    def leave(self, fault: int) -> None:
        """Give the page back and say goodbye, after what is known by now."""
        if os.getpid() != self._pid:
            return  # a forked child, such as a data-loading worker: all this is its parent's
        with ExitStack() as in_reverse:  # each of it, whatever fails
            in_reverse.callback(self.sender.close)
            in_reverse.callback(self._say_goodbye, fault)
            in_reverse.callback(self._page.close)
            in_reverse.callback(self.clock.leave, wait=not fault)
            in_reverse.callback(self._give_back, fault)
            in_reverse.callback(self.side.leave)
            self.side.halt()  # it may be starting, and would run on

    def _give_back(self, fault: int) -> None:
        self.words[Field.HOOK_FAULTS] += fault
        self.words[Field.MAIN_PID] = 0

    def _say_goodbye(self, fault: int) -> None:
        with suppress(DriverError, NoRoomError):  # a device that refuses to say where it is; see `may_poll`
            self.pending.send_known()
        self.sender.goodbye(time.monotonic_ns(), Bye(self._rank, fault))


def connect(directory: Path, local_rank: int, device: str, rank: int) -> Connection:
    """Take a page, and halt the side task that it names.

    Args:
        directory: where pages and sockets are.
        local_rank: this process's number on its machine.
        device: as `engine.device_type` names it.
        rank: this process's global rank.

    Raises:
        AttachError: another engine of this process has the page, or a spare daemon could not find the device.
        PageError: the page must not be used, or another main job does.
        DriverError: the device cannot report when it reaches a wait.
        NoPyzmqError: pyzmq cannot be used.
        NoRoomError: there is no room for a socket.
    """
    pyzmq = load_pyzmq()
    with ExitStack() as if_it_fails:
        page = take_page(directory, local_rank)
        if_it_fails.callback(page.close)
        socket = socket_of(page.path)
        if (why := why_too_long(socket)) is not None:
            raise PageError(why)
        sender = MessageSender(pyzmq, endpoint_of(socket))
        if_it_fails.callback(sender.close)
        clock = clock_for(device, page, time.monotonic_ns)
        if_it_fails.callback(clock.leave, wait=True)
        if page.path != page_path(directory, local_rank):
            check_spare(page, follows_host=clock.follows_host)
            notice(f"rank {rank}: another job has this local rank; using {page.path}")
        connection = Connection(page, clock, sender, rank)
        connection.side.halt()
        if_it_fails.pop_all()
    return connection
