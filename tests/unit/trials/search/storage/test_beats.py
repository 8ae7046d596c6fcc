"""Signs of life in files."""

from pathlib import Path

from trials.search.storage.beats import DIRECTORY, Beats


def test_a_sign_is_for_its_user_alone(tmp_path: Path) -> None:
    """Others could say for ever that a dead worker lives."""
    Beats(tmp_path, "study", "worker").beat(1.0)
    (sign,) = (tmp_path / DIRECTORY).iterdir()
    assert [path.stat().st_mode & 0o077 for path in (sign, sign.parent)] == [0, 0]
