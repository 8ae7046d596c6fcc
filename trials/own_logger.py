"""Loggers of the process that runs the user's code, which may configure logging at any time."""

import logging


class _OwnLogger(logging.Logger):
    """Cannot be switched off by code that does not know it.

    `logging.config` in the user's code switches off every logger that it does not name, and `logging.disable` all.
    """

    @property
    def disabled(self) -> bool:
        """Never."""
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None: ...

    def isEnabledFor(self, level: int) -> bool:
        """By its own level alone."""
        return level >= self.getEffectiveLevel()


def own_logger(name: str) -> logging.Logger:
    """Return the logger called `name`, made one that stays on."""
    logger = logging.getLogger(name)
    logger.__class__ = _OwnLogger
    return logger
