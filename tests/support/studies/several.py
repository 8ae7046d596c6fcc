"""Two studies."""

from tiny import Tiny


class One(Tiny): ...


class Other(Tiny): ...
