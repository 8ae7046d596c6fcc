"""Who imports whom, and what importing the hooks leaves alone."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import PACKAGES, ROOT

SHARED = ROOT / "ds_hooks" / "shared"
FILES = sorted(SHARED.rglob("*.py"))
NOT_FOR_THE_MAIN_JOB = ("torch", "deepspeed", "optuna", "numpy", "pydantic", "psutil", "squeezer", "trials", "launch")


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("module", ["ds_hooks", "ds_hooks.handle", "ds_hooks.__main__", "ds_hooks.clock.registry"])
def test_the_hooks_load_nothing_that_the_main_job_did_not(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {NOT_FOR_THE_MAIN_JOB!r} if name in sys.modules])"
    done = run_python("-c", code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_side_task_starts_no_thread_before_it_has_blocked_its_signals() -> None:
    code = "import os, sys, trials.side_task.main; print(len(os.listdir('/proc/self/task')), 'torch' in sys.modules)"
    done = run_python("-c", code)
    assert (done.stdout, done.stderr) == ("1 False\n", "")


@pytest.mark.parametrize("module", ["trials.run", "trials.search.close"])
def test_what_starts_workers_or_closes_a_study_needs_no_torch(module: str) -> None:
    done = run_python("-c", f"import sys, {module}; print('torch' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


IMPORT_ALL_OF_SHARED = """
import importlib.util, pkgutil, sys
sys.path.insert(0, sys.argv[1])
assert importlib.util.find_spec("zmq") is None, "there are no site-packages here"
import ds_hooks.shared
for module in pkgutil.walk_packages(ds_hooks.shared.__path__, "ds_hooks.shared."):
    importlib.import_module(module.name)
    print(module.name)
"""


def test_what_the_processes_share_is_importable_where_nothing_is_installed() -> None:
    # -I: no environment variables and no current folder; -S: no site-packages
    command = [sys.executable, "-I", "-S", "-c", IMPORT_ALL_OF_SHARED, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in FILES]
    modules = {".".join(part for part in module if part != "__init__") for module in parts} - {"ds_hooks.shared"}
    assert (set(done.stdout.split()), done.stderr) == (modules, "")
    assert {"ds_hooks.shared.page.layout", "ds_hooks.shared.wire"} <= modules


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SHARED)))
def test_what_the_processes_share_imports_the_standard_library_and_itself(path: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):  # inside of functions, too
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None
            imported.add(node.module)
    foreign = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {name for name in foreign if not name.startswith("ds_hooks.shared.")} == set()


def test_modules_are_imported_where_the_contracts_see_it() -> None:
    by_name = re.compile(r"\b(?:import_module|__import__)\(")
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if by_name.search(path.read_text(encoding="utf-8"))}
    # the first is lazy, for its own modules; the second replaces parts of DeepSpeed, whose names clash with functions
    assert found == {"trials/__init__.py", "benchmarks/ghost/engine.py"}, "import them by a statement"


def test_no_test_imports_another_test() -> None:
    importing = re.compile(r"^\s*(?:from|import) tests\.(?!support\b|matrix\b|zoo\b).*$", re.MULTILINE)
    found = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / "tests").rglob("*.py")
        if (lines := importing.findall(path.read_text(encoding="utf-8")))
    }
    assert found == {}, "what tests share belongs in tests/support"
