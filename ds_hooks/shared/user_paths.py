"""What users mean by a path where no shell has read it: in a configuration, in a URL, behind an equals sign."""

import os
import re
from pathlib import Path
from urllib.parse import quote

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_SQLITE = re.compile(r"(sqlite(?:\+\w+)?:///)([^?]*)(.*)", re.DOTALL)


def user_path(text: str) -> str:
    """A path with a home in place of ~ or ~USER.

    Raises:
        ValueError: there is no such home, or it names an environment variable: a directory of that name would be made.
    """
    variable = _VARIABLE.search(text)
    if variable is not None:
        raise ValueError(f"{variable[0]} is not replaced in a path; allowed: ~, or the whole path")
    found = os.path.expanduser(text)
    if found.startswith("~"):
        raise ValueError(f"there is no home {found.partition('/')[0]}; allowed: ./~ for a file of that name")
    return found


def path_text(path: Path) -> str:
    """A path as a part of a name. Bytes that are not UTF-8 come as backslashes and digits: no database takes them."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


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
