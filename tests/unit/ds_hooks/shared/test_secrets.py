"""Passwords of URLs are hidden, whatever stands around them."""

import pytest

from ds_hooks.shared.secrets import hide_password, hide_passwords, without_hidden


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


def test_text_without_a_password_stays() -> None:
    text = "see https://docs.sqlalchemy.org/en/20/errors.html#error-e3q8, mail a:b@c.d"
    assert hide_passwords(text) == text


def test_a_url_without_what_was_hidden_can_be_used() -> None:
    assert without_hidden("postgresql://me:***@host/db") == "postgresql://me@host/db"
