"""Messages that wait until the device has come to the moment that they report."""

from collections import deque

from ds_hooks.clock.base import BubbleClock
from ds_hooks.message_sender import MessageSender
from ds_hooks.shared.wire import Hello, Message


class PendingMessages:
    """Hands messages to the sender, in order, once the clock knows their times.

    Args:
        sender: takes the messages.
        clock: made the stamps.
    """

    def __init__(self, sender: MessageSender, clock: BubbleClock) -> None:
        self._sender = sender
        self._clock = clock
        self._unread: deque[tuple[int, Message]] = deque()

    def send(self, stamp: int, message: Message) -> None:
        """Keep `message` until the time of `stamp` is known; hand over what is known by now."""
        self._unread.append((stamp, message))
        self.send_known()

    def hello(self, t_ns: int, message: Hello) -> None:
        """Introduce an engine at the time `t_ns`, after what is kept: that is of the engine before."""
        self._unread.append((t_ns, message))
        self.send_known()

    def send_known(self) -> None:
        """Hand over all messages whose time is known by now."""
        unread = self._unread
        while unread:
            stamp, message = unread[0]
            if isinstance(message, Hello):
                self._sender.hello(stamp, message)
            elif (t_ns := self._clock.time_ns(stamp)) is not None:
                self._sender.send_later(t_ns, message)
            else:
                break
            unread.popleft()
