"""`squeezer`, whose side tasks run on a device that threads play, and whose meters a file may play.

Without `--mps` they take turns on it with the main job: threads do not wait for time slices. With it, the device was
measured to be sound with a server, unless `--unmeasured` comes next.

`$METERS` names that file: a JSON object of the attributes of `FakeNvml` that a test wants to be others.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import ds_hooks.shared.statuses
from squeezer.calibration.verdict import VERSION, Verdict
from squeezer.cli import main
from squeezer.device import sharing
from tests.support.fake_nvml import FakeNvml


class ToldNvml(FakeNvml):
    """Says what the file says at each call."""

    def __getattr__(self, name: str) -> Any:
        self.__dict__.update(json.loads(Path(os.environ["METERS"]).read_text()))
        return super().__getattr__(name)


if __name__ == "__main__":
    ds_hooks.shared.statuses.SIDE_TASK = "tests.support.cuda_side_task"
    if "METERS" in os.environ:
        sys.modules["pynvml"] = ToldNvml()  # type: ignore[assignment]
    if sys.argv[1:2] == ["--mps"]:
        del sys.argv[1]
        if sys.argv[1:2] == ["--unmeasured"]:
            del sys.argv[1]
        else:
            sound = Verdict(True, "threads do not wait for each other", 0, 0, 0, {}, version=VERSION)
            sharing.verdict_of = lambda uuid, *, mps: sound if mps else None
    else:
        sharing.why_no_turns = lambda uuid: ""
    sys.exit(main())
