"""Logging as our programs set it up, for one test."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ds_hooks.shared import logs

LOGGERS = ("squeezer", "trials", "launch", "optuna")


@contextmanager
def logged(rank: int | None = None) -> Iterator[None]:
    """Log to the terminal, which `capsys` reads; afterwards loggers are as they were."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    logs.set_up(rank=rank)
    try:
        yield
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            for handler in set(logger.handlers) - set(handlers):
                handler.close()
            logger.handlers[:] = handlers
            logger.setLevel(level)
            logger.propagate = propagate
