"""The user's artifact store, with an end to each call, whatever the service behind it does."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from optuna.artifacts._protocol import ArtifactStore

PATIENCE_S = 60.0
"""For how long a call may get nowhere. The search worker waits meanwhile, and the side task trains what it has."""

LEAST_BYTES_PER_S = 1e6
"""How much longer an upload may take, which some services send without a sign of progress."""


class BoundedStore:
    """An artifact store that fails where the user's hangs.

    Each call has a thread of its own. One that hangs stays there, and until it ends all others fail at once.

    Args:
        store: the user's, whose exceptions pass through.
    """

    def __init__(self, store: "ArtifactStore") -> None:
        self._store = store
        self._hangs: Future[None] | None = None

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:
        """Write an artifact. What is written after the patience has ended is removed.

        Raises:
            TimeoutError: the store hangs.
        """
        is_late = Event()

        def write() -> None:
            self._store.write(artifact_id, content_body)
            if is_late.is_set():
                self._store.remove(artifact_id)

        try:
            self._call(write, PATIENCE_S + _size(content_body) / LEAST_BYTES_PER_S)
        except TimeoutError:
            is_late.set()
            raise

    def read(self, artifact_id: str, into: BinaryIO) -> None:
        """Copy an artifact into a file.

        Raises:
            TimeoutError: the store hangs.
        """

        def read() -> None:
            with self._store.open_reader(artifact_id) as body:
                shutil.copyfileobj(body, into)

        self._call(read, PATIENCE_S, into.tell)

    def remove(self, artifact_id: str) -> None:
        """Remove an artifact.

        Raises:
            TimeoutError: the store hangs.
        """
        self._call(lambda: self._store.remove(artifact_id), PATIENCE_S)

    def _call(self, do: Callable[[], None], patience_s: float, position: Callable[[], int] = lambda: 0) -> None:
        """Do something that ends, or whose position changes, again and again within the patience."""
        name = type(self._store).__name__
        if self._hangs is not None and not self._hangs.done():
            raise TimeoutError(f"{name} has not answered an earlier call yet")
        call: Future[None] = Future()
        Thread(target=_do, args=(do, call), name="artifact store", daemon=True).start()
        before = position()
        while not wait([call], patience_s).done:
            if (now := position()) == before:
                self._hangs = call
                raise TimeoutError(f"{name} has not answered for {patience_s:.3g} s")
            before = now
        call.result()


def _do(do: Callable[[], Any], call: "Future[None]") -> None:
    try:
        do()
    except Exception as error:  # the caller's, unless it has given up
        call.set_exception(error)
    except BaseException as error:  # such as a panic of a store in Rust; it must end nobody's process
        call.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
    else:
        call.set_result(None)


def _size(body: BinaryIO) -> int:
    with suppress(OSError):
        return os.fstat(body.fileno()).st_size
    return 0
