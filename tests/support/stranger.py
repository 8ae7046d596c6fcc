"""Another user of the machine: functions that run in a process of a second real uid."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ds_hooks.shared.processes.identity import own_namespaces

STRANGER = 65534
"""The uid and gid; no account is needed."""

needs_second_user = pytest.mark.skipif(
    os.getuid() != 0, reason="the tests do not run as root, so it is NOT shown that other users are locked out"
)


def become(uid: int) -> None:
    """Be that user for good, in no other group."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.chdir("/")


def as_user(uid: int, do: Callable[[], Any]) -> Any:
    """What `do` returns, as JSON knows it, in a process of user `uid`."""
    reader, writer = os.pipe()
    pid = _fork(uid, reader, lambda: os.write(writer, json.dumps(do()).encode()))
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

    pid = _fork(uid, -1, for_ever)
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


def _fork(uid: int, reader: int, do: Callable[[], object]) -> int:
    own_namespaces()  # what Python loads when it is first needed is out of another user's reach
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if reader >= 0:
            os.close(reader)
        become(uid)
        do()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)
