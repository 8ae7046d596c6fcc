"""What a study does to logging, at any time, does not silence the side task."""

import logging
import logging.config
from collections.abc import Callable, Iterator

import pytest

from tests.support.logged import logged
from tests.support.paths import ROOT
from trials.side_task import cohort, devices, main, scheduler
from trials.training import rehearsal

LOGS = [module.log for module in (cohort, devices, main, scheduler, rehearsal)]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Loggers are as before afterwards, those of other libraries too."""
    every = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    before = [each.disabled for each in every]
    handlers, handler_list = dict(logging._handlers), list(logging._handlerList)  # type: ignore[attr-defined]
    with logged(rank=3):
        yield
    for each, disabled in zip(every, before, strict=True):
        each.disabled = disabled
    logging.disable(logging.NOTSET)
    logging._handlers.update(handlers)  # type: ignore[attr-defined]
    logging._handlerList[:] = handler_list  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "configure",
    [lambda: logging.config.dictConfig({"version": 1}), lambda: logging.disable(logging.CRITICAL)],
    ids=["dictConfig", "disable"],
)
@pytest.mark.parametrize("log", LOGS, ids=lambda log: str(log.name))
def test_a_study_that_configures_logging_does_not_silence_ours(
    configure: Callable[[], None], log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure()
    log.warning("split")
    assert capsys.readouterr().err == "[trials] rank 3: warning: split\n"


def test_all_loggers_of_trials_are_our_own() -> None:
    found = [path.name for path in (ROOT / "trials").rglob("*.py") if "logging.getLogger" in path.read_text()]
    assert found == ["own_logger.py"]
