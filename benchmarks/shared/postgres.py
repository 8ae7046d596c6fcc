"""A PostgreSQL server for tests and benchmarks: on a free port, in a directory that goes with it."""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

USER = "squeezer"
PATIENCE_S = 60.0
FASTEST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
"""Only the server can lose a commit so, not a client: for those that do not end the server."""


class Server:
    """A running server.

    Args:
        binaries: where its programs are.
        directory: an empty one, for its data.
        settings: beside those that a small server needs.

    Attributes:
        password: of `USER`, who may do anything. No message may show it.
        port: on 127.0.0.1.
    """

    def __init__(self, binaries: Path, directory: Path, settings: dict[str, str]) -> None:
        self._binaries, self._data, self._log = binaries, directory / "data", directory / "log"
        self.password = secrets.token_hex(16)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port: int = found.getsockname()[1]
        (directory / "password").write_text(self.password)
        self._as_user: list[str] = []
        if os.getuid() == 0:  # the server refuses to be root
            user = pwd.getpwnam("postgres")
            for path in (directory, directory / "password"):
                os.chown(path, user.pw_uid, user.pw_gid)
            owner = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
            self._as_user = ["setpriv", *owner, "--pdeathsig", "INT"]
        options = ["--username", USER, "--auth", "scram-sha-256", "--pwfile", str(directory / "password")]
        options += ["--no-locale", "--encoding", "UTF8", "--no-sync"]
        self._run("initdb", "--pgdata", str(self._data), *options)
        named = {"listen_addresses": "127.0.0.1", "port": str(self.port), "unix_socket_directories": ""}
        named |= {"shared_buffers": "16MB", "max_connections": "100", **settings}
        self._options = [part for name, value in named.items() for part in ("-c", f"{name}={value}")]
        self._databases = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pgbench(self) -> Path | None:
        """The server's own benchmark, which some packages leave out."""
        program = self._binaries / "pgbench"
        return program if program.exists() else None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [*self._as_user, str(self._binaries / "postgres"), "-D", str(self._data), *self._options]
        with self._log.open("ab") as log:
            started = self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", process_group=0)
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert started.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, f"the server does not answer:\n{self._log.read_text()}"
            time.sleep(0.02)

    def stop(self) -> None:
        """End it in good order."""
        self._end(signal.SIGINT)

    def crash(self) -> None:
        """End it at once, as `pg_ctl stop -m immediate` does: the next start recovers what was committed."""
        self._end(signal.SIGQUIT)

    def url(self, database: str, port: int | None = None) -> str:
        """The URL of one of its databases, perhaps by way of a proxy's port."""
        return f"postgresql://{USER}:{self.password}@127.0.0.1:{port or self.port}/{database}"

    @contextmanager
    def database(self, like: str = "template0") -> Iterator[str]:
        """Make a database, an empty one or a copy of another to which nobody is connected. Returns its name."""
        self._databases += 1
        name = f"test{self._databases}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {like}")
        try:
            yield name
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run one statement of SQL, outside a transaction. Returns its rows."""
        import psycopg

        address = self.url(database)
        with psycopg.connect(address, autocommit=True, connect_timeout=10) as connection:
            done = connection.execute(statement.encode())
            return [] if done.description is None else done.fetchall()

    def _end(self, by: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(by)
            self._process.wait(PATIENCE_S)
            self._process = None

    def _answers(self) -> bool:
        import psycopg

        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, program: str, *options: str) -> None:
        command = [*self._as_user, str(self._binaries / program), *options]
        done = subprocess.run(
            command, cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        assert done.returncode == 0, done.stdout


def missing() -> str | None:
    """What a server needs that is not on this machine."""
    if find_spec("psycopg") is None:
        return "psycopg is not installed: pip install 'bubble-squeezer[postgresql]'"
    if _binaries() is None:
        return "there is no PostgreSQL server: apt-get install postgresql, or have initdb in PATH"
    if os.getuid() == 0 and "postgres" not in {user.pw_name for user in pwd.getpwall()}:
        return "a PostgreSQL server refuses to be root, and there is no user postgres"
    return None


@contextmanager
def running(**settings: str) -> Iterator[Server]:
    """A server with the given settings. `missing` must be None."""
    binaries = _binaries()
    assert binaries is not None
    directory = Path(tempfile.mkdtemp(prefix="bsq-postgres-"))
    try:
        server = Server(binaries, directory, settings)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory)


def _binaries() -> Path | None:
    """Where the newest server's programs are. Debian keeps them out of PATH."""
    versions = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if (path / "initdb").exists()]
    if versions:
        return max(versions, key=lambda path: float(path.parent.name))
    found = shutil.which("initdb")
    return None if found is None else Path(found).resolve().parent
