"""Runs a training script with hooks of which one raises in step 5: `raise_in_hook.py train.py …`."""

from ds_hooks.__main__ import main
from ds_hooks.clock.cpu import CpuClock

open_bubble = CpuClock.open


def raise_in_step_5(self: CpuClock, step: int, *plan: int) -> int:
    if step == 5:
        raise OSError("injected")
    return open_bubble(self, step, *plan)


setattr(CpuClock, "open", raise_in_step_5)  # noqa: B010, what is replaced is a method
main()
