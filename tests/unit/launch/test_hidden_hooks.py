"""Which module would run in place of the hooks."""

from pathlib import Path

import pytest

from launch import rank


@pytest.mark.parametrize(("own", "hides"), [("step_hooks.py", False), ("of_the_user.py", True)])
def test_only_a_module_of_the_users_hides_the_hooks(
    own: str, hides: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may start in a checkout of ours, beside an installed copy."""
    package = tmp_path / "ds_hooks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / own).touch()
    assert rank.hidden_by() is None
    monkeypatch.chdir(tmp_path)
    assert rank.hidden_by() == (str(package) if hides else None)
