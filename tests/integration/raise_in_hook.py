"""Runs a training script with hooks of which one raises in step 5: `raise_in_hook.py train.py …`."""

from typing import Any

from ds_hooks.__main__ import main
from ds_hooks.marks import HostMarks

open_bubble = HostMarks.open


def raise_in_step_5(self: HostMarks, step: int, *plan: int) -> Any:
    if step == 5:
        raise OSError("injected")
    return open_bubble(self, step, *plan)


HostMarks.open = raise_in_step_5  # type: ignore[method-assign]
main()
