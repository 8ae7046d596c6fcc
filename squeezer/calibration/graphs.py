"""A CUDA graph: work that was recorded from a stream, and is launched by one call."""

import ctypes
from collections.abc import Callable

from ds_hooks.shared.cuda_driver import DriverError
from squeezer.calibration.measured_device import MeasuredDevice

_THREAD_LOCAL = 1


class Graph:
    """What `work` queues on the device's stream, recorded.

    Args:
        device: where.
        work: queues it; nothing of it runs while it is recorded.

    Raises:
        DriverError: it cannot be recorded.
    """

    def __init__(self, device: MeasuredDevice, work: Callable[[], None]) -> None:
        self._driver = driver = device.driver
        graph, self._ready = ctypes.c_void_p(), ctypes.c_void_p()
        driver.call("cuStreamBeginCapture", ctypes.c_void_p(device.stream), ctypes.c_int(_THREAD_LOCAL))
        try:
            work()
        except DriverError:
            driver.call("cuStreamEndCapture", ctypes.c_void_p(device.stream), ctypes.byref(graph))
            raise
        driver.call("cuStreamEndCapture", ctypes.c_void_p(device.stream), ctypes.byref(graph))
        driver.call("cuGraphInstantiateWithFlags", ctypes.byref(self._ready), graph, ctypes.c_uint64(0))

    def launch(self, stream: int) -> None:
        """Queue it."""
        self._driver.call("cuGraphLaunch", self._ready, ctypes.c_void_p(stream))
