"""Keeps how many trials to fuse from one side task to the next, which would else measure it again.

The measurement takes seconds of CPU time, in bubbles at each start. A choice holds for all that decides it: what the
study is, and here the machine, the versions, the threads and the memory limit. A wrong one would cost speed, never
correctness; as a busy machine may mislead, none holds for longer than a week.
"""

import hashlib
import json
import os
import platform
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ds_hooks.shared.command_line import version
from ds_hooks.shared.private_file import make_dir, write_text
from trials.own_logger import own_logger
from trials.training.most_fused import MostFused

NAME = "most-fused.json"
HOLDS_S = 7 * 86_400.0
MOST_KEPT = 32

log = own_logger(__name__)


class KeptChoices:
    """See `trials.training.most_fused.Known`.

    Args:
        directory: the study's.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / NAME

    def find(self, of_study: str) -> MostFused | None:
        """Return what was found here in that situation; None: nothing that still holds."""
        match self._read().get(_key(of_study)):
            case {"trials": int(trials), "gain": float(gain), "wall_s": float(wall_s)}:
                is_fresh = 0 <= time.time() - wall_s < HOLDS_S
                return MostFused(trials, gain) if is_fresh and trials > 0 else None
        return None

    def keep(self, of_study: str, found: MostFused) -> None:
        """Keep what was found, unless memory was short, which may pass."""
        if found.gain is None:
            return
        kept = self._read()
        kept.pop(key := _key(of_study), None)
        kept[key] = {"trials": found.trials, "gain": found.gain, "wall_s": time.time()}
        written = self._file.with_name(f"{NAME}.{os.getpid()}.tmp")
        try:
            make_dir(self._file.parent)
            write_text(written, json.dumps(dict(list(kept.items())[-MOST_KEPT:])))
            written.replace(self._file)
        except OSError as error:  # a full disk: the next one measures again
            log.debug("how many trials to fuse is not kept: %s", error)
            with suppress(OSError):
                written.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            return kept if isinstance(kept, dict) else {}
        return {}


def _key(of_study: str) -> str:
    limit_bytes = resource.getrlimit(resource.RLIMIT_DATA)[0]
    here = platform.machine(), _processor(), torch.get_num_threads(), limit_bytes, version(), torch.__version__
    return hashlib.sha256(repr((of_study, here)).encode()).hexdigest()


def _processor() -> list[str]:
    """Name the first processor, as the kernel does."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
        return [line for line in lines if line.startswith(("model", "cache size", "flags", "CPU", "Features"))]
    return []
