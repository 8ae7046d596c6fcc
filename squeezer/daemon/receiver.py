"""The daemon's ears: the socket for the hooks' messages, which it checks, and a socket for signals."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import zmq

from ds_hooks.shared import wire
from ds_hooks.shared.page.file import DIRECTORY_VARIABLE, endpoint_of, why_too_long
from ds_hooks.shared.processes.priority import starting_patient_threads
from ds_hooks.shared.processes.room import NoRoomError, make_sure_of_room
from ds_hooks.shared.processes.signals import asked_to_end

MAXIMUM_BATCH = 64
MAXIMUM_MESSAGE_BYTES = 4096


class DaemonError(Exception):
    """The daemon cannot work here; the message says why and what would be allowed."""


class Receiver:
    """The receiving end of `ds_hooks.message_sender`.

    The process that holds the daemon's role on the page may replace what an earlier daemon left at `path`.

    Args:
        path: of the socket.
        fault: takes a sentence about whatever is lost or foreign.

    Raises:
        DaemonError: the path is too long, or taken by something that is not a socket, or this process may open no more
            files, or start no more threads.
    """

    def __init__(self, path: Path, fault: Callable[[str], None]) -> None:
        if (why := why_too_long(path)) is not None:
            raise DaemonError(why)
        if path.exists() and not path.is_socket():
            raise DaemonError(
                f"{path} is taken by something that is not a socket; remove it or set ${DIRECTORY_VARIABLE}"
            )
        try:
            make_sure_of_room()
        except NoRoomError as error:
            raise DaemonError(str(error)) from error
        self._path = path
        self._fault = fault
        self._seq: int | None = None
        self.lost = self.foreign = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with starting_patient_threads():
            self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAXIMUM_MESSAGE_BYTES)
        before = os.umask(0o077)
        try:
            self._socket.bind(endpoint_of(path))  # type: ignore[arg-type]
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._context.term()
            raise DaemonError(
                f"cannot listen on {path}: {error}; set ${DIRECTORY_VARIABLE} to another directory"
            ) from error
        finally:
            os.umask(before)

    @property
    def fd(self) -> int:
        """Becomes readable when something arrives. Check `has_more` before waiting on it."""
        return int(self._socket.getsockopt(zmq.FD))

    def has_more(self) -> bool:
        """Whether a message waits. The descriptor becomes readable only once."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def comes(self, within_s: float) -> bool:
        """Whether a message is there, or comes in time."""
        return bool(self._socket.poll(int(within_s * 1e3)))

    def parts(self) -> Iterator[bytes]:
        """The messages that have arrived, in order; not all of a flood at once, since the daemon has other duties."""
        for _ in range(MAXIMUM_BATCH):
            try:
                yield from self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return

    def decode(self, part: bytes) -> wire.Envelope | None:
        """The message in `part`, its number checked for a gap; None if it is not for us. For each part once."""
        try:
            envelope = wire.decode(part)
        except wire.ProtocolError as error:
            self.refuse(str(error))
            return None
        if not isinstance(envelope.message, wire.Hello):
            self._count_lost(envelope.seq)
        return envelope

    def refuse(self, why: str) -> None:
        """Count a message that is not for us; only the first ones are worth a record each."""
        self.foreign += 1
        if self.foreign <= 10:
            self._fault(f"foreign message: {why}")

    def new_job(self) -> None:
        """Another sender begins, with its own numbers."""
        self._seq = None

    def close(self) -> None:
        """Close and remove the socket."""
        self._socket.close(linger=0)
        self._context.term()
        with suppress(OSError):  # others have removed it, or put something else there
            self._path.unlink()

    def _count_lost(self, seq: int) -> None:
        if self._seq is not None and seq > self._seq + 1:
            lost = seq - self._seq - 1
            self.lost += lost
            self._fault(f"{lost} messages lost before number {seq}")
        self._seq = seq


def wakeup_on_signals() -> socket.socket:
    """A socket that becomes readable when a signal asks to end. SIGHUP does, unless `nohup` has it ignored."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)  # one signal says all
    for number in asked_to_end():
        signal.signal(number, lambda *_: None)
    return reader


def has_signal(wakeup: socket.socket) -> bool:
    """Whether one has come since this was asked last."""
    try:
        return bool(wakeup.recv(4096))
    except BlockingIOError:
        return False
