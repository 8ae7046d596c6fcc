"""A study whose import computes for a minute."""

import time

from tiny import Tiny

end_s = time.thread_time() + 60
while time.thread_time() < end_s:
    pass


class StartsSlowly(Tiny):
    """Nobody waits for it."""
