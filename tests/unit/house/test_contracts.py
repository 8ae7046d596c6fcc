"""Each import contract of setup.cfg holds, and breaks in a copy with one import that it forbids."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.paths import INSTALLED, PACKAGES, PYTHON_FOLDERS, ROOT

FORBIDDEN = {
    "hooks-alone": ("ds_hooks/engine.py", "import torch"),
    "hooks-floors": ("ds_hooks/shared/wire.py", "from ds_hooks import schedule"),
    "squeezer": ("squeezer/device/cpu.py", "import ds_hooks.clock"),
    "trials": ("trials/gate/cpu.py", "from ds_hooks import attach"),
    "launch": ("launch/rank.py", "import ds_hooks.handle"),
    "installed-alone": ("squeezer/doctor.py", "import benchmarks.study"),
    "benchmarks": ("benchmarks/study.py", "from tests.support import sandbox"),
    "benchmarks-of-hooks": ("benchmarks/study.py", "from ds_hooks import schedule"),
    "policy": ("squeezer/policy/forecast.py", "import time"),
    "light-daemon": ("squeezer/daemon/loop.py", "import squeezer.records.reader"),
    "trials-floors": ("trials/fusion/own_code/trees.py", "import trials.training.group"),
    "gates-are-abstract": ("trials/training/group.py", "from trials.gate.cpu import CpuGate"),
    "fusion-is-plain-pytorch": ("trials/optim/adam.py", "import optuna"),
}
"""Contract -> (a file, what it must not import)."""
BROKEN = re.compile(r"^(.*) BROKEN\b", re.MULTILINE)


def configured() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def contracts() -> dict[str, str]:
    """Contract -> its name as the linter prints it."""
    config = configured()
    prefix = "importlinter:contract:"
    return {name.removeprefix(prefix): config[name]["name"] for name in config.sections() if name.startswith(prefix)}


def lint(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command as lint; lint()"
    environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "400"}  # no name is wrapped
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache", *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_import_contracts_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" {len(contracts())} kept, 0 broken" in done.stdout


def test_each_contract_has_an_import_that_breaks_it() -> None:
    assert FORBIDDEN.keys() == contracts().keys()


def test_no_package_and_no_folder_is_overlooked() -> None:
    config = configured()
    assert config["importlinter"]["root_packages"].split() == list(PACKAGES)
    assert config["importlinter:contract:installed-alone"]["source_modules"].split() == list(INSTALLED)
    assert sorted(config["mypy"]["files"].split(", ")) == list(PYTHON_FOLDERS)


def test_every_module_of_the_trials_stands_on_a_floor() -> None:
    floors = configured()["importlinter:contract:trials-floors"]["layers"]
    names = {
        path.stem for path in (ROOT / "trials").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert names - {"__init__", "__main__"} == set(re.findall(r"trials\.(\w+)", floors))


def copy_with(imports: Iterable[tuple[str, str]], root: Path) -> None:
    """A copy of the packages, with these imports in these files."""
    shutil.copy(ROOT / "setup.cfg", root)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            copied = root / path.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)
    for file, line in imports:
        with (root / file).open("a", encoding="utf-8") as source:
            source.write(f"\n\ndef late() -> None:\n    {line}\n")


def test_forbidden_imports_break_their_contracts(tmp_path: Path) -> None:
    copy_with(FORBIDDEN.values(), tmp_path)
    done = lint(tmp_path)
    assert done.returncode != 0, "all contracts held"
    assert sorted(BROKEN.findall(done.stdout)) == sorted(contracts().values()), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("contract", FORBIDDEN)
def test_a_forbidden_import_breaks_its_contract(contract: str, tmp_path: Path) -> None:
    """By itself, and not only where other imports are forbidden too."""
    copy_with([FORBIDDEN[contract]], tmp_path)
    done = lint(tmp_path, "--contract", contract)
    assert done.returncode != 0, "the contract held"
    assert BROKEN.findall(done.stdout) == [contracts()[contract]], done.stdout + done.stderr
