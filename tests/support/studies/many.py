"""More small trials than one side task asks for at once."""

from tiny import Tiny


class Many(Tiny):
    trials = 24
