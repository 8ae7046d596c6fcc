"""Trials that ask for a better class than the idle one, and for a real-time one, each time a model is built."""

import os
from contextlib import suppress
from typing import Any

from endless import Endless
from torch import nn


class Rises(Endless):
    def model(self, params: dict[str, Any]) -> nn.Module:
        for scheduling_class, priority in ((os.SCHED_OTHER, 0), (os.SCHED_RR, 1)):
            with suppress(PermissionError):
                os.sched_setscheduler(0, scheduling_class, os.sched_param(priority))
        return super().model(params)
