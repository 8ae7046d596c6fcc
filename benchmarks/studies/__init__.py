"""Studies that the side tasks of benchmarks train."""

from pathlib import Path

_HERE = Path(__file__).parent
ENDLESS_DIGITS = _HERE / "endless_digits.py"
ENDLESS_PLACEBO_DIGITS = _HERE / "endless_placebo_digits.py"
LASTING_DIGITS = _HERE / "lasting_digits.py"
MANY_DIGITS = _HERE / "many_digits.py"
PLACEBO_DIGITS = _HERE / "placebo_digits.py"
SEARCHED_DIGITS = _HERE / "searched_digits.py"
