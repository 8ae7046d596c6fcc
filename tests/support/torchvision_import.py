"""Lets torchvision be imported beside a build of torch that it was not compiled for.

PyPI's torchvision is compiled for CUDA, and beside a CPU build of torch its library does not load. Its models are plain
Python and need no operators, but the import registers a function for one of them.
"""

import importlib.util
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_NEEDED_BY_THE_IMPORT = {"nms": _SCHEMA, "qnms": _SCHEMA}
_declared: list[torch.library.Library] = []  # they end with the object


def make_importable() -> None:
    """Call it before whatever imports torchvision. Transformers and timm do that by themselves, if it is installed."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or _declared:
        return
    for library in Path(found.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            pass  # compiled for another build
    missing = [name for name in _NEEDED_BY_THE_IMPORT if not hasattr(torch.ops.torchvision, name)]
    if missing:
        _declared.append(torch.library.Library("torchvision", "FRAGMENT"))
    for name in missing:
        _declared[0].define(name + _NEEDED_BY_THE_IMPORT[name])
