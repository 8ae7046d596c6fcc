"""Passwords of URLs are hidden, whatever stands around them."""

from pathlib import Path

import pytest

from ds_hooks.shared.secrets import hide_password, hide_passwords, read_storage, without_hidden


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:pw@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("mysql+pymysql://me:p@s/s:w@host/db", "mysql+pymysql://me:***@host/db"),
        ('redis://:p w"x@host', "redis://:***@host"),
        ("postgresql:///db?user=me&password=pw&ssl=1", "postgresql:///db?user=me&password=***&ssl=1"),
        ("x://host/db?sslPassword=pw;authToken=pw", "x://host/db?sslPassword=***;authToken=***"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("sqlite:////home/me/study.db", "sqlite:////home/me/study.db"),
        ("runs/a@b:c/study.journal", "runs/a@b:c/study.journal"),
    ],
)
def test_a_storages_password_is_hidden(url: str, shown: str) -> None:
    assert hide_password(url) == shown
    if " " not in url:
        assert hide_passwords(f"Error: '{url}', and {url} too") == f"Error: '{shown}', and {shown} too"


@pytest.mark.parametrize("begin", ["postgresql:/", "postgresql+psycopg:", "mysql:"])
def test_a_password_in_half_a_url_is_hidden_in_what_is_said_of_it(begin: str) -> None:
    assert (
        hide_passwords(f'storage = "{begin}me:p@s:w@host/db" is wrong') == f'storage = "{begin}me:***@host/db" is wrong'
    )


def test_text_without_a_password_stays() -> None:
    text = "see https://docs.sqlalchemy.org/en/20/errors.html#error-e3q8, mail a:b@c.d"
    assert hide_passwords(text) == text


def test_a_url_without_what_was_hidden_can_be_used() -> None:
    assert without_hidden("postgresql://me:***@host/db") == "postgresql://me@host/db"


def test_a_storage_is_read_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://me:p@s@host/db"
    monkeypatch.setenv("WHERE", url)
    (tmp_path / "where").write_text(f"{url}\n")
    assert read_storage("env:WHERE") == read_storage(f"@{tmp_path}/where") == read_storage(url) == url
    assert read_storage("runs/study.journal") == "runs/study.journal"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("env:NOWHERE", "the environment variable NOWHERE is not set"),
        ("env:", "the environment variable  is not set"),
        ("@/no/such/file", "/no/such/file cannot be read: No such file or directory"),
        ("@/", "/ cannot be read: Is a directory"),
        ("@/dev/null", "/dev/null has 0 words; expected one, a storage's URL"),
        ("@/etc/passwd", "/etc/passwd has "),
        ("sqlite:study.db", "a database's URL begins with sqlite://"),
        ("postgresql+psycopg:/me:pw@host/db", "a database's URL begins with postgresql+psycopg://"),
    ],
)
def test_a_storage_that_cannot_be_read(named: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    with pytest.raises(ValueError, match=r"\S") as raised:
        read_storage(named)
    assert str(raised.value).startswith(message)
