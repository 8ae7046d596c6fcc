"""Where things lie in this checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUDIES = Path(__file__).parent / "studies"
GOLDEN = ROOT / "tests" / "unit" / "squeezer" / "golden"
