"""Signs of life that wait for nobody, of workers whose claims are in a file.

SQLite has one lock for all who write to a file. Who has it runs in idle time only, on a busy core perhaps for longer
than a lease. Until the lock is free, each worker says in a file of its own until when it lives.
"""

import os
import struct
import uuid
from pathlib import Path

import sqlalchemy as sa

from ds_hooks.shared.private_file import open_private
from trials.search.storage.claim_tables import WORKER

DIRECTORY = "alive"

_FORMAT = struct.Struct("<d")


class Beats:
    """The signs of life of a study's workers.

    Args:
        directory: the study's.
        study: Optuna's name of it.
        worker: whose signs are given here. Those that it gave before, perhaps before a start of the machine, are gone.
    """

    def __init__(self, directory: Path, study: str, worker: str) -> None:
        self._directory, self._study, self._own = directory / DIRECTORY, study, worker
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._file(worker).unlink(missing_ok=True)

    def beat(self, expires_s: float) -> None:
        """Say until when the worker lives, in the time of `claim_tables.now_s`.

        Raises:
            OSError: it cannot be written.
        """
        fd = open_private(str(self._file(self._own)), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        try:
            os.pwrite(fd, _FORMAT.pack(expires_s), 0)
        finally:
            os.close(fd)

    def note(self, c: sa.Connection) -> None:
        """Write into the table what it does not know yet. Call it under the study's lock."""
        here = WORKER.c.study == self._study
        for row in c.execute(sa.select(WORKER.c.worker, WORKER.c.expires_s).where(here)).all():
            expires_s = self._read(row.worker)
            if expires_s > row.expires_s:
                chosen = here & (WORKER.c.worker == row.worker)
                c.execute(WORKER.update().where(chosen).values(expires_s=expires_s))

    def _read(self, worker: str) -> float:
        try:
            (expires_s,) = _FORMAT.unpack(self._file(worker).read_bytes())
        except (OSError, struct.error):
            return 0.0
        return float(expires_s)

    def _file(self, worker: str) -> Path:
        return self._directory / uuid.uuid5(uuid.NAMESPACE_OID, f"{self._study} {worker}").hex
