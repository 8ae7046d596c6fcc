"""Which clock serves which device."""

from collections.abc import Callable

from ds_hooks.clock.base import BubbleClock
from ds_hooks.clock.cpu import CpuClock
from ds_hooks.clock.cuda import cuda_clock
from ds_hooks.shared.page.file import Page

CLOCKS: dict[str, Callable[[Page, Callable[[], int]], BubbleClock]] = {"cpu": CpuClock, "cuda": cuda_clock}
"""Device type, as torch names it, to what makes its clock from a page and the host's clock in ns."""


def clock_for(device: str, page: Page, clock_ns: Callable[[], int]) -> BubbleClock:
    """Make the clock for an engine's device.

    Args:
        device: one of `CLOCKS`, see `engine.device_type`.
        page: the device's page; the caller holds the role of the main job.
        clock_ns: the host's clock.

    Raises:
        DriverError: the device cannot report when it reaches a wait.
    """
    return CLOCKS[device](page, clock_ns)
