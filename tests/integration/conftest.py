"""Real runs of DeepSpeed's that several files look at."""

import pytest

from tests.support.jobs import (
    NARROW,
    STEPS_ALONE,
    SqueezedRun,
    pretrain,
    run,
    short_directory,
    squeeze_patiently,
    two_ranks,
)


@pytest.fixture(scope="session")
def squeezed_run(tmp_path_factory: pytest.TempPathFactory) -> SqueezedRun:
    """Two ranks, squeezed from their bubbles' first forecasts to the end."""
    return squeeze_patiently(tmp_path_factory.mktemp("squeezed"))


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses of the narrow model without any of our code, in a usual place. A shorter job has the first of them."""
    losses = tmp_path_factory.mktemp("alone") / "losses"
    with short_directory() as made:
        ended = run(two_ranks(*pretrain(losses, STEPS_ALONE, NARROW)), made, losses)
    assert ended.status == 0, ended.output
    assert len(set(ended.losses)) == STEPS_ALONE, "the model learns, so no two losses are equal"
    return ended.losses
