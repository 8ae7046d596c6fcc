"""A TCP proxy in front of a PostgreSQL server that cuts the connection at one COMMIT."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

COMMIT = b"COMMIT\0"


class Proxy:
    """Counts the commits of all connections.

    Args:
        port: the server's, on 127.0.0.1.
        cut_at: which commit, counted from 1; 0: none.
        is_done: whether the server gets that commit, and only its answer is lost.

    Attributes:
        port: the proxy's.
        commits: so far.
    """

    def __init__(self, port: int, cut_at: int, is_done: bool) -> None:
        self._server_port, self._cut_at, self._is_done = port, cut_at, is_done
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.commits = 0
        self._lock = threading.Lock()
        self._peers: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """End it, and all connections."""
        for each in (self._listener, *self._peers):
            _shut(each)
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._peers):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._server_port))
            self._peers += [client, server]
            for pump in (self._requests, self._answers):
                self._threads.append(threading.Thread(target=pump, args=(client, server)))
                self._threads[-1].start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        while data := _received(client):
            if COMMIT in data and self._is_cut():
                if self._is_done:
                    _shut(client)  # so that the answer finds nobody
                    server.sendall(data)
                    server.shutdown(socket.SHUT_WR)
                    return
                break
            with suppress(OSError):
                server.sendall(data)
        _shut(client)
        _shut(server)

    def _answers(self, client: socket.socket, server: socket.socket) -> None:
        while data := _received(server):
            with suppress(OSError):
                client.sendall(data)
        _shut(client)

    def _is_cut(self) -> bool:
        with self._lock:
            self.commits += 1
            return self.commits == self._cut_at


def _received(peer: socket.socket) -> bytes:
    try:
        return peer.recv(65536)
    except OSError:
        return b""


def _shut(peer: socket.socket) -> None:
    with suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxied(port: int, cut_at: int, *, is_done: bool) -> Iterator[Proxy]:
    """A proxy, and the end of all connections through it."""
    proxy = Proxy(port, cut_at, is_done)
    try:
        yield proxy
    finally:
        proxy.close()
