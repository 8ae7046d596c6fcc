"""A real run of DeepSpeed's that several files look at."""

import pytest

from tests.support.jobs import SqueezedRun, squeeze_patiently


@pytest.fixture(scope="session")
def squeezed_run(tmp_path_factory: pytest.TempPathFactory) -> SqueezedRun:
    """Two ranks, squeezed from their bubbles' first forecasts to the end."""
    return squeeze_patiently(tmp_path_factory.mktemp("squeezed"))
