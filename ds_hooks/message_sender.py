"""The sending end of the protocol: one ZeroMQ socket that never blocks the main job."""

import ctypes
import weakref
from typing import Any

from ds_hooks.shared.processes.priority import starting_patient_threads
from ds_hooks.shared.processes.room import NoRoomError, make_sure_of_room, may_poll
from ds_hooks.shared.wire import Bye, Hello, Message, encode

SEND_HIGH_WATER_MARK = 256
WAITING_AT_MOST = 256


class MessageSender:
    """Sends messages to this device's daemon, or counts them as dropped.

    PUSH with ZMQ_IMMEDIATE, not PUB: it queues only for a connected daemon and reports when it cannot. So nothing is
    lost silently, and a daemon that starts later gets nothing old.

    Messages wait until the next `flush` and leave in one multipart message. The socket's thread and the daemon then
    wake once per step, while the device is idle, and never during compute. Its thread waits until the main job waits.

    What finds no daemon waits for one more flush. Connecting takes longer than a job may take from `attach` to its
    first bubble, and the begin of its first step would be lost.

    Args:
        pyzmq: the package.
        endpoint: of the daemon's socket, see `page.file.endpoint_of`.

    Attributes:
        dropped: how many messages found no daemon twice.

    Raises:
        NoRoomError: this process may open no more files, or start no more threads.
    """

    def __init__(self, pyzmq: Any, endpoint: bytes) -> None:
        make_sure_of_room()
        self._zmq = zmq = pyzmq
        self._context = zmq.Context()
        with starting_patient_threads():
            self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 200)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        self._gone = weakref.finalize(self, _close, self._socket, self._context, 0)
        self._gone.atexit = False
        self._socket.connect(endpoint)
        self._hello = b""
        self._hello_due = False
        self._waiting: list[bytes] = []
        self._refused = 0  # how many of these, the first ones, have found no daemon once
        self._seq = 0
        self.dropped = 0

    def hello(self, t_ns: int, message: Hello) -> None:
        """Introduce the main job as soon as there is a daemon, and again to each one that replaces it.

        What waits is of another engine of this process, and leaves before or never.
        """
        self.flush()
        self._drop(len(self._waiting))
        self._hello = encode(0, t_ns, message)
        self._hello_due = True
        self.flush()

    def repeat_hello(self) -> None:
        """Send the hello again with the next flush: nothing reports a daemon that was replaced during a silence."""
        self._hello_due = True

    def goodbye(self, t_ns: int, message: Bye) -> None:
        """Send `message`, with all that waits but the hello: the main job has given its page back."""
        self._hello_due = False
        if may_poll():
            self.send(t_ns, message)

    def send(self, t_ns: int, message: Message) -> bool:
        """Send `message` now, with all that waits. Returns False if no daemon takes it."""
        self._seq += 1
        self._waiting.append(encode(self._seq, t_ns, message))
        return self.flush()

    def send_later(self, t_ns: int, message: Message) -> None:
        """Send `message` with the next flush."""
        self._seq += 1
        self._waiting.append(encode(self._seq, t_ns, message))
        if len(self._waiting) >= WAITING_AT_MOST:
            self.flush()

    def flush(self) -> bool:
        """Send all that waits. Returns False if no daemon takes it.

        Raises:
            NoRoomError: this process may have no file any more.
        """
        waiting = self._waiting
        parts = [self._hello, *waiting] if self._hello_due else waiting
        if not parts:
            return True
        if not may_poll():
            raise NoRoomError("this process may have no file any more (RLIMIT_NOFILE is 0), and ZeroMQ would end it")
        try:
            self._socket.send_multipart(parts, self._zmq.DONTWAIT)
        except self._zmq.Again:
            self._drop(self._refused)
            self._refused = len(self._waiting)
            self._hello_due = True
            return False
        self._waiting, self._refused = [], 0
        self._hello_due = False
        return True

    def _drop(self, first: int) -> None:
        """Give up the first ones of what waits."""
        del self._waiting[:first]
        self._refused = 0
        self.dropped += first

    def close(self, linger_ms: int = 200) -> None:
        """Close the socket; what is queued has `linger_ms` to leave."""
        if self._gone.detach() is not None:
            _close(self._socket, self._context, linger_ms)


def _close(socket: Any, context: Any, linger_ms: int) -> None:
    """In this order. Garbage collection has none, and a context waits for its sockets for ever."""
    if not may_poll():
        for each in (socket, context):  # both stay until the process ends
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        return
    socket.close(linger=linger_ms)
    context.term()
