"""A plugin of pytest: steps of optimizers by our kernel, on tensors of the host, in Triton's interpreter.

Run ``pytest -p tests.support.interpreted`` with TRITON_INTERPRET=1. It fails if a step was taken by PyTorch's kernels
because ours gave other bits, or if ours was not used at all.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trials.optim import block, multi_tensor, multi_tensor_kernel
from trials.optim.multi_tensor import MultiTensor

BLOCK = 32
"""So few weights that small models need several programs, of which the interpreter runs a thousand in a second."""

launches: Counter[str] = Counter()
_launch = MultiTensor._launch


def interpret(patch: pytest.MonkeyPatch) -> None:
    """Let kernels run on the host, as on a device: without the single-pass kernels of a CPU."""
    patch.setattr(multi_tensor, "runs_on", lambda device: device.type == "cpu")
    patch.setattr(multi_tensor_kernel, "BLOCK", BLOCK)
    patch.setattr(multi_tensor, "_SIZES", (5, 2 * BLOCK))
    patch.setattr(block, "SinglePass", type(None))
    patch.setattr(torch, "sqrt", _rounded_root)
    patch.setattr(MultiTensor, "_launch", _counted)


def _rounded_root(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`torch.sqrt` as rounded on a GPU. On a CPU, it is MKL's, which may be the next number."""
    made = torch.from_numpy(np.sqrt(x.detach().numpy()))
    return made if out is None else out.copy_(made)


def _counted(self: MultiTensor, *args: Any) -> None:
    launches[str(self._rule.multi_tensor)] += 1
    _launch(self, *args)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not launches or not all(multi_tensor._believed.values()):
        print(f"launches: {launches}; same bits: {multi_tensor._believed}")
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
