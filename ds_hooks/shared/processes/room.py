"""Whether this process may still open files and start threads, as ZeroMQ does."""

import os
import threading

FILES_AT_MOST, THREADS = 16, 2
"""What a context and a socket need of the kernel; of files it is half as many."""


class NoRoomError(Exception):
    """This process may open no more files, or start no more threads."""


def make_sure_of_room() -> None:
    """ZeroMQ ends the whole process where it gets no file or thread, so ask for as many first.

    Raises:
        NoRoomError: there are too few.
    """
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
