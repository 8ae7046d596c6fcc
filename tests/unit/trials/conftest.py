"""What the tests of single layers share beside their cases."""

import sys
from typing import Any

import pytest
import torch

from trials.fusion.own_code.mapped import Mapped


@pytest.fixture(autouse=True)
def same_numbers_in_every_run() -> None:
    """Random inputs are drawn from one seed."""
    torch.manual_seed(0)


@pytest.fixture
def only_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no other way but rules, behind which one that fails could hide."""

    def refuse(self: Mapped, module: Any, path: str, *_: Any) -> None:
        raise sys.exception() or AssertionError(f"module '{path}' has no rule")

    monkeypatch.setattr(Mapped, "__init__", refuse)
