"""Who finds out which trials are lost: the host, which reads each step's losses, or the device."""

import pytest

from trials.optim import block
from trials.training import group_state


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trials lie on a device that decides itself, as a CUDA device does."""
    monkeypatch.setattr(group_state, "decides_on_device", lambda device: True)
    monkeypatch.setattr(block, "SinglePass", type(None))  # these kernels are a CPU's


@pytest.fixture(params=["by the host", "by the device"])
def noticed(request: pytest.FixtureRequest) -> None:
    """Both in turn."""
    if request.param == "by the device":
        request.getfixturevalue("on_device")
