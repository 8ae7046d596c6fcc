"""Where things lie in this checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUDIES = Path(__file__).parent / "studies"
PYTHON_FOLDERS = tuple(sorted({path.parent.name for path in ROOT.glob("*/*.py")} - {"build", "runs"}))
PACKAGES = tuple(folder for folder in PYTHON_FOLDERS if (ROOT / folder / "__init__.py").exists())
INSTALLED = tuple(package for package in PACKAGES if package != "benchmarks")
"""Found and not listed, so that rules hold in a new folder from its first file on."""
GOLDEN = ROOT / "tests" / "unit" / "squeezer" / "golden"
