"""Paths that no shell has read mean what their users mean, or are refused."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from ds_hooks.shared.secrets import read_storage
from ds_hooks.shared.user_paths import user_path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With what a URL means otherwise in its name."""
    path = tmp_path / "50% of ü?"
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    return path


def test_a_home_is_meant_by_its_sign(home: Path) -> None:
    assert user_path("~/studies") == f"{home}/studies" and user_path("~") == str(home)
    assert user_path("a~/b c/ü") == "a~/b c/ü" and user_path("./~/x") == "./~/x"
    assert read_storage("~/study.journal") == f"{home}/study.journal"
    for named in ("sqlite:///~/a%20b.db", "sqlite+pysqlite:///~/a b.db?timeout=7"):
        assert sa.make_url(read_storage(named)).database == f"{home}/a b.db"
    (home / "where").write_text("sqlite:///~/x.db\n")
    assert sa.make_url(read_storage("@~/where")).database == f"{home}/x.db"


@pytest.mark.parametrize(
    "named",
    ["sqlite:///a~b/x.db", "sqlite:////var/x.db", "sqlite://", "sqlite:///:memory:", "postgresql://~u:$HOME@h/d"],
)
def test_what_means_no_home_stays_as_it_is(named: str, home: Path) -> None:
    assert read_storage(named) == named


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("$HOME/x", r"\$HOME is not replaced in a path"),
        ("/scratch/${USER}/x", r"\$\{USER\} is not replaced in a path"),
        ("~nobody-of-this-name/x", "there is no home ~nobody-of-this-name; allowed: ./~"),
    ],
)
def test_what_would_make_a_directory_that_nobody_means(path: str, message: str) -> None:
    for named in (path, f"sqlite:///{path}"):
        with pytest.raises(ValueError, match=message):
            read_storage(named)
