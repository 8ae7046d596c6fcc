"""Files stay short enough to be read in one go."""

import pytest

from tests.support.paths import PYTHON_FOLDERS, ROOT

LONGEST = 400


@pytest.mark.parametrize("folder", PYTHON_FOLDERS)
def test_no_python_file_is_longer_than_400_lines(folder: str) -> None:
    lengths = {path: path.read_bytes().count(b"\n") for path in (ROOT / folder).rglob("*.py")}
    assert lengths, f"{folder} has no Python files"
    too_long = {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > LONGEST}
    assert too_long == {}, f"split them by responsibility; allowed: {LONGEST} lines"
