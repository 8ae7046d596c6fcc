"""Whether this process may still do what ZeroMQ does: open files, start threads, and make some system calls."""

import os
import resource
import select
import threading

FILES_AT_MOST, THREADS = 16, 2
"""What a context and a socket need of the kernel; of files it is half as many."""


class NoRoomError(Exception):
    """This process may open no more files, start no more threads, or not make a system call that ZeroMQ needs."""


def make_sure_of_room() -> None:
    """ZeroMQ ends the whole process where the kernel refuses what it asks for, so ask for as much first.

    Raises:
        NoRoomError: it does.
    """
    _make_sure_of_calls()
    files: list[int] = []
    threads: list[threading.Thread] = []
    enough = threading.Event()
    try:
        for _ in range(FILES_AT_MOST):
            files.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        for _ in range(THREADS):
            thread = threading.Thread(target=enough.wait)
            thread.start()
            threads.append(thread)
    except (OSError, RuntimeError) as error:
        raise NoRoomError(f"no room for {FILES_AT_MOST} files and {THREADS} threads more: {error}") from error
    finally:
        enough.set()
        for thread in threads:
            thread.join()
        for file in files:
            os.close(file)


def may_poll() -> bool:
    """Whether ZeroMQ may be called at all: it ends the whole process where `poll` fails.

    That may name no more files than this process may have, even if they are open: none, in a strict sandbox.
    """
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 0


def _make_sure_of_calls() -> None:
    """Of those that a sandbox may refuse though there is room."""
    name = "sched_setscheduler"
    try:  # each thread of ZeroMQ's names the class that it has anyway
        os.sched_setscheduler(0, os.sched_getscheduler(0), os.sched_getparam(0))
        name = "eventfd"
        os.close(os.eventfd(0, os.EFD_CLOEXEC))
        name = "epoll_create"
        select.epoll().close()
    except OSError as error:
        raise NoRoomError(f"ZeroMQ needs {name}, which is refused here: {error.strerror}") from error
