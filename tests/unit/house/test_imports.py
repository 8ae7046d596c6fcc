"""Who imports whom, and what importing the hooks leaves alone."""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

NOT_FOR_THE_MAIN_JOB = ("torch", "deepspeed", "optuna", "numpy", "pydantic", "psutil", "squeezer", "trials", "launch")


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def test_the_import_contracts_hold() -> None:
    lint = run_python("-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache")
    assert lint.returncode == 0, lint.stdout + lint.stderr
    assert " 0 broken" in lint.stdout


@pytest.mark.parametrize("module", ["ds_hooks", "ds_hooks.handle", "ds_hooks.__main__"])
def test_the_hooks_load_nothing_that_the_main_job_did_not(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {NOT_FOR_THE_MAIN_JOB!r} if name in sys.modules])"
    done = run_python("-c", code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_side_task_starts_no_thread_before_it_has_blocked_its_signals() -> None:
    code = "import os, sys, trials.side_task.main; print(len(os.listdir('/proc/self/task')), 'torch' in sys.modules)"
    done = run_python("-c", code)
    assert (done.stdout, done.stderr) == ("1 False\n", "")


def test_the_page_and_the_protocol_need_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); sys.modules['ds_hooks'] = type(sys)('ds_hooks');"
        "sys.modules['ds_hooks'].__path__ = ['ds_hooks']; import ds_hooks.shared.page, ds_hooks.shared.wire;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - sys.stdlib_module_names))"
    )
    done = run_python("-c", code)
    assert (done.stdout, done.stderr) == ("['ds_hooks']\n", "")
