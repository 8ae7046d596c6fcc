"""The wheel holds all of the packages, and works where the checkout is not."""

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.paths import INSTALLED, ROOT
from tests.support.slow_cases import others_slow

METADATA = ("LICENSE", "README.md", "pyproject.toml", "setup.cfg")
COMMANDS = ("ds_squeeze", "squeezer", "trials")
IMPORT_ALL = """
import importlib.util, sys
for name in sys.argv[1:]:
    try:
        print(importlib.import_module(name).__file__)
    except ModuleNotFoundError as error:
        if error.name != "triton":  # comes with PyTorch for CUDA alone
            raise
        print(importlib.util.find_spec(name).origin)
"""


def packaged_files() -> list[str]:
    """Modules and package data, as paths in the checkout."""
    paths = [path for package in INSTALLED for path in (ROOT / package).rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(ROOT)) for path in paths if "__pycache__" not in path.parts)


def run(command: Sequence[str | Path], where: Path) -> str:
    """Run `command` in folder `where`, without our paths; its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout, and no older build counts."""
    copied = tmp_path_factory.mktemp("copied")
    for file in (*METADATA, *packaged_files()):
        (copied / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, copied / file)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."], copied)
    (built,) = (copied / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which borrows all else of this one: its packages, but no link to the checkout."""
    environment = tmp_path_factory.mktemp("installed")
    run([sys.executable, "-m", "venv", "--without-pip", environment], environment)
    python = environment / "bin" / "python"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run([*pip, "install", "-q", "--no-deps", "--no-index", wheel], environment)
    own = sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)})
    # a folder that a .pth file names has its own .pth files ignored, and so the editable installation of the checkout
    (Path(own) / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    return environment


def test_the_wheel_holds_every_module_and_all_package_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        names = {name for name in content.namelist() if ".dist-info/" not in name}
    assert names == set(packaged_files())
    assert any(name.endswith(".service") for name in names)


@pytest.mark.slow
def test_every_module_is_imported_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    files = [file for file in packaged_files() if file.endswith(".py") and not file.endswith("__main__.py")]
    modules = [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files]
    found = run([installed / "bin" / "python", "-c", IMPORT_ALL, *modules], tmp_path).split("\n")[:-1]
    assert [path.partition("site-packages/")[2] for path in found] == files
    assert all(Path(path).is_relative_to(installed) for path in found)


@pytest.mark.parametrize("command", others_slow(COMMANDS, ["trials"]))
def test_a_command_of_the_wheel_shows_its_help(command: str, installed: Path, tmp_path: Path) -> None:
    assert f"usage: {command}" in run([installed / "bin" / command, "--help"], tmp_path)
