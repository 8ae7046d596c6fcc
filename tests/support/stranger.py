"""Another user of the machine: functions that run in a process of a second real uid."""

import ctypes
import json
import os
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from ds_hooks.shared.processes.identity import own_namespaces

STRANGER = 65534
"""The uid and gid; no account is needed."""

CAPABILITY_VERSION = 0x20080522
"""The third, of linux/capability.h: two words for each set."""

needs_second_user = pytest.mark.skipif(
    os.getuid() != 0, reason="the tests do not run as root, so it is NOT shown that other users are locked out"
)


def become(uid: int) -> None:
    """Be that user for good, in no other group."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.chdir("/")


def renounce() -> None:
    """Be root for good without root's rights: modes of files count, and its own can be read still."""
    header, none = struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def as_user(uid: int, do: Callable[[], Any]) -> Any:
    """What `do` returns, as JSON knows it, in a process of user `uid`."""
    return _answer(partial(become, uid), do)


def without_rights(do: Callable[[], Any]) -> Any:
    """The same in a process of root without root's rights."""
    return _answer(renounce, do)


def _answer(be: Callable[[], None], do: Callable[[], Any]) -> Any:
    reader, writer = os.pipe()
    pid = _fork(be, reader, lambda: os.write(writer, json.dumps(do()).encode()))
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        answer = answers.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, "its traceback is on standard error"
    return json.loads(answer)


@contextmanager
def meanwhile(uid: int, do: Callable[[], None]) -> Iterator[None]:
    """User `uid` does it again and again until the block ends."""

    def for_ever() -> None:
        while True:
            do()

    pid = _fork(partial(become, uid), -1, for_ever)
    try:
        yield
    finally:
        os.kill(pid, 9)
        _, status = os.waitpid(pid, 0)
    assert status == 9, "its traceback is on standard error"


def outcome(do: Callable[[], Any]) -> str:
    """The kernel's answer to `do`: the name of its error, or "done"."""
    try:
        do()
    except OSError as error:
        return type(error).__name__
    return "done"


def _fork(be: Callable[[], None], reader: int, do: Callable[[], object]) -> int:
    own_namespaces()  # what Python loads when it is first needed is out of another user's reach
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if reader >= 0:
            os.close(reader)
        be()
        do()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)
