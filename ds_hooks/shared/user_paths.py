"""What users mean by a path where no shell has read it: in a configuration, in a URL, behind an equals sign."""

import hashlib
import os
import re
from pathlib import Path
from urllib.parse import quote

LONGEST_IN_NAME = 400
"""Columns for names of workers hold 512 letters, of which some are a host's name and a number."""

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_SQLITE = re.compile(r"(sqlite(?:\+\w+)?:///)([^?]*)(.*)", re.DOTALL)


def user_path(text: str) -> str:
    """A path with a home in place of ~ or ~USER.

    Raises:
        ValueError: there is no such home, or it names an environment variable and is not there: a directory of that
            name would be made; or it has letters that no path has in this locale.
    """
    variable = _VARIABLE.search(text)
    if variable is not None and not os.path.lexists(text):
        raise ValueError(f"{variable[0]} is not replaced in a path; allowed: ~, or the whole path")
    found = os.path.expanduser(text)
    if found.startswith("~"):
        raise ValueError(f"there is no home {found.partition('/')[0]}; allowed: ./~ for a file of that name")
    try:
        os.fsencode(found)
    except UnicodeEncodeError as error:
        text = f"this locale's paths are {error.encoding}; allowed: one with UTF-8, as LC_ALL=C.UTF-8"
        raise ValueError(text) from None
    return found


def path_text(path: Path) -> str:
    """A path as a part of a name, in ASCII: other bytes come as backslashes and digits.

    Databases take nothing but UTF-8, and command lines what the locale has.
    """
    return os.fsencode(path).decode("ascii", "backslashreplace")


def path_in_name(path: Path) -> str:
    """The same for a name that a column of a database holds: of a long path, the end and a hash of all."""
    text = path_text(path)
    if len(text) <= LONGEST_IN_NAME:
        return text
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return f"{digest}...{text[len(digest) + 3 - LONGEST_IN_NAME :]}"


def user_storage(named: str) -> str:
    """A storage, a path or a URL, with the same in an SQLite database's URL. Others' may have any password.

    Raises:
        ValueError: see `user_path`.
    """
    if "://" not in named:
        return user_path(named)
    sqlite = _SQLITE.fullmatch(named)
    if sqlite is None:
        return named
    scheme, path, settings = sqlite.groups()
    user_path(path)
    home = path.partition("/")[0] if path.startswith("~") else ""  # the rest is quoted already, and a home is not
    return f"{scheme}{quote(os.path.expanduser(home))}{path.removeprefix(home)}{settings}"


def absolute_storage(named: str) -> str:
    """A storage, a path or a URL, that is the same one in any working directory."""
    if "://" not in named:
        return os.path.join(os.getcwd(), named) if named else named
    sqlite = _SQLITE.fullmatch(named)
    if sqlite is None or sqlite[2].startswith(("/", ":memory:", "file:")) or not sqlite[2]:
        return named
    try:
        here = quote(os.getcwd())
    except UnicodeEncodeError:  # no URL can name it
        return named
    scheme, path, settings = sqlite.groups()
    return f"{scheme}{here}/{path}{settings}"
