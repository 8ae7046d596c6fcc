"""Paths that no shell has read mean what their users mean, or are refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from ds_hooks.shared.secrets import read_storage
from ds_hooks.shared.user_paths import absolute_storage, path_in_name, user_path
from tests.support.paths import ROOT
from trials.search.storage.claim_tables import WORKER


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


@pytest.mark.parametrize("path", ["/" + "研究/" * 90, "/" + "studies/" * 90])
def test_the_name_of_a_worker_in_a_deep_directory_fits_into_its_column(path: str) -> None:
    host, number = "h" * 64, "run12345"
    names = [f"{host}:{path_in_name(Path(path, last))}:{number}" for last in ("a", "b")]
    kind = WORKER.c.worker.type
    assert isinstance(kind, sa.String) and kind.length is not None and max(map(len, names)) <= kind.length
    assert names[0] != names[1] and path_in_name(Path("/ü/x")) == r"/\xc3\xbc/x"
    assert path_in_name(Path(path, "a")) != path_in_name(Path(f"/elsewhere{path}", "a")), "where the ends are alike"


def test_letters_that_no_path_has_in_this_locale_are_refused() -> None:
    tried = "try: user_path('\\xfc')\nexcept ValueError as error: print(error)"
    code = f"from ds_hooks.shared.user_paths import user_path\n{tried}"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "this locale's paths are ascii; allowed: one with UTF-8, as LC_ALL=C.UTF-8\n", done.stderr


def test_what_is_there_may_be_called_as_a_variable(tmp_path: Path) -> None:
    there = tmp_path / "$HOME"
    there.mkdir()
    assert user_path(str(there)) == str(there)
    with pytest.raises(ValueError, match=r"\$HOME is not replaced in a path"):
        user_path(str(there / "run"))


def test_a_storage_is_the_same_one_wherever_it_is_opened(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    assert absolute_storage("study.journal") == f"{home}/study.journal"
    for named in ("sqlite:///a%20b.db", "sqlite+pysqlite:///a b.db?timeout=7"):
        assert sa.make_url(absolute_storage(named)).database == f"{home}/a b.db"
    elsewhere = "/x.journal", "sqlite:////x.db", "sqlite://", "sqlite:///:memory:", "postgresql://u@h/d", ""
    assert [absolute_storage(named) for named in elsewhere] == list(elsewhere)
