"""Keeps the password of a study's storage out of command lines, records and messages."""

import os
import re
from pathlib import Path

from ds_hooks.shared.user_paths import user_path, user_storage

STORAGE_VARIABLE = "SQUEEZER_STORAGE"
"""Passes the storage's URL to processes: other users read a command line, but no environment."""

HIDDEN = "***"

_DATABASE = r"(?:sqlite|postgres(?:ql)?|mysql|mariadb)(?:\+\w+)?:"
_HALF_A_URL = re.compile(rf"({_DATABASE})(?!//)")
_HALF_WITH_USER = re.compile(rf"({_DATABASE}/?[^\s:/@\"']*:)[^\s\"']*@")
_URL = re.compile(r"^([\w+.-]*://[^:/@]*:).*@", re.DOTALL)
_USER = re.compile(r"(://[^\s:/@\"']*:)[^\s\"']*@")
_QUERY = re.compile(r"([?&;][\w.-]*(?:passw|pwd|secret|token)[\w.-]*=)[^&;\s\"'#]*", re.IGNORECASE)


def hide_password(url: str) -> str:
    """A storage's URL, or the path of a journal, without its password."""
    return _QUERY.sub(rf"\1{HIDDEN}", _URL.sub(rf"\1{HIDDEN}@", url))


def hide_passwords(text: str) -> str:
    """Any text, with the passwords of the URLs in it hidden, also of those that lack a slash."""
    if "://" not in text and "@" not in text:
        return text
    return _QUERY.sub(rf"\1{HIDDEN}", _HALF_WITH_USER.sub(rf"\1{HIDDEN}@", _USER.sub(rf"\1{HIDDEN}@", text)))


def without_hidden(url: str) -> str:
    """A URL without its hidden password, which database drivers may know from elsewhere."""
    return url.replace(f":{HIDDEN}@", "@")


def read_storage(named: str) -> str:
    """The storage that `env:NAME`, an environment variable, or `@FILE`, a file's only line, names; else `named` itself.

    Raises:
        ValueError: there is nothing to be read, and the message says where; or it is half a URL, or see `user_path`.
    """
    found = user_storage(_read(named))
    half = _HALF_A_URL.match(found)
    if half is not None:
        raise ValueError(f"a database's URL begins with {half[0]}//")
    return found


def _read(named: str) -> str:
    if named.startswith("env:"):
        variable = named.removeprefix("env:")
        if not os.environ.get(variable):
            raise ValueError(f"the environment variable {variable} is not set")
        return os.environ[variable]
    if named.startswith("@"):
        file = Path(user_path(named.removeprefix("@")))
        try:
            lines = file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} cannot be read: {getattr(error, 'strerror', error)}") from None
        if len(lines) != 1:
            raise ValueError(f"{file} has {len(lines)} words; expected one, a storage's URL")
        return lines[0]
    return named
