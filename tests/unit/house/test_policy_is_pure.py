"""`squeezer.policy` imports itself and a few modules that compute, and nothing that could touch the world."""

import ast
from pathlib import Path

import pytest

from tests.support.paths import ROOT

POLICY = ROOT / "squeezer" / "policy"
PURE = {
    *("bisect", "collections", "collections.abc", "dataclasses", "enum", "itertools", "math", "operator"),
    *("statistics", "typing"),
}
FILES = sorted(POLICY.rglob("*.py"))


def impurities(source: str) -> list[str]:
    """What `source`, a module of the policy, imports or looks up by name beyond what is allowed."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
            if node.module == "squeezer":  # a package's own names are its modules
                modules = [f"squeezer.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Name) and node.id in (
            "__import__",
            "eval",
            "exec",
            "open",
            "input",
            "breakpoint",
        ):
            modules = [node.id]
        else:
            continue
        found += [each for each in modules if each not in PURE and not f"{each}.".startswith("squeezer.policy.")]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_policy_imports_nothing_that_touches_the_world(path: Path) -> None:
    assert impurities(path.read_text(encoding="utf-8")) == []


def test_all_files_are_looked_at() -> None:
    assert {"state.py", "events.py", "actions.py", "forecast.py", "guard.py"} <= {path.name for path in FILES}


def test_no_module_is_allowed_in_vain() -> None:
    used = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    assert [name for name in sorted(PURE) if f"from {name} import" not in used and f"import {name}" not in used] == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import math, time", ["time"]),
        ("import os.path as path", ["os.path"]),
        ("from squeezer.policy.guard import Guard", []),
        ("from squeezer import policy, config", ["squeezer.config"]),
        ("from squeezer.policy_elsewhere import x", ["squeezer.policy_elsewhere"]),
        ("from ds_hooks.shared import wire", ["ds_hooks.shared"]),
        ("from . import forecast", ["."]),
        ("def late():\n    import zmq", ["zmq"]),
        ("if False:\n    from torch import Tensor", ["torch"]),
        ("__import__('socket')", ["__import__"]),
        ("open('/dev/null')", ["open"]),
        ("from time import monotonic_ns as now", ["time"]),
    ],
)
def test_what_is_not_allowed_is_found_wherever_it_stands(line: str, found: list[str]) -> None:
    assert impurities(line) == found
