"""Messages on a device whose times are known later: none leaves early, none overtakes, none is lost."""

from typing import Any

from ds_hooks.pending import PendingMessages
from ds_hooks.shared.wire import Hello, Message, StepStart


class Device:
    """A clock whose device has come to some of its stamps, and a sender."""

    def __init__(self) -> None:
        self.reached = 0
        self.asked: list[int] = []
        self.sent: list[tuple[int, Message]] = []

    def time_ns(self, stamp: int) -> int | None:
        self.asked.append(stamp)
        return 1000 * stamp if stamp <= self.reached else None

    def send_later(self, t_ns: int, message: Message) -> None:
        self.sent.append((t_ns, message))

    hello = send_later


def test_messages_leave_in_order_once_the_device_has_come_to_their_moments() -> None:
    device: Any = Device()
    pending = PendingMessages(device, device)
    for stamp in (1, 2, 3):
        pending.send(stamp, StepStart(stamp))
    assert device.sent == [] and set(device.asked) == {1}, "later stamps are not asked for before their time"
    device.reached = 2
    pending.send(4, StepStart(4))
    assert device.sent == [(1000, StepStart(1)), (2000, StepStart(2))]
    device.reached = 9
    pending.send_known()
    assert [t_ns for t_ns, _ in device.sent] == [1000, 2000, 3000, 4000]
    asked = len(device.asked)
    pending.send_known()
    assert len(device.asked) == asked, "each is asked for until it is known, and not again"


def test_an_engine_is_introduced_after_the_messages_of_the_one_before_it() -> None:
    device: Any = Device()
    pending = PendingMessages(device, device)
    hello = Hello(4711, 0, 2, 0, 2, 4, 0)
    pending.hello(17, hello)
    assert device.sent == [(17, hello)], "at once, with nothing to wait for"
    pending.send(1, StepStart(1))
    pending.hello(18, hello)
    pending.send(2, StepStart(1))
    assert len(device.sent) == 1
    device.reached = 2
    pending.send_known()
    assert device.sent[1:] == [(1000, StepStart(1)), (18, hello), (2000, StepStart(1))]
