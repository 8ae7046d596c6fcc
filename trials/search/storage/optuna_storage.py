"""Opens the storage, named in the configuration, where Optuna keeps a study."""

import json
import os
from pathlib import Path

from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages._rdb.models import BaseModel
from optuna.storages.journal._storage import JournalOperation
from sqlalchemy import create_engine, inspect, make_url, text

from ds_hooks.shared.private_file import check_ours, open_private, sync_name
from ds_hooks.shared.secrets import hide_password
from trials.search.storage.database import StorageError, engine_options, is_sqlite, usable_url
from trials.search.storage.journal import Journal

_BEGINNING = b'{"op_code":'


def storage_file(named: str) -> str | None:
    """The file that holds a storage, see `open_storage`. None: a server or the memory does."""
    if "://" not in named:
        return named
    file = (make_url(named).database if is_sqlite(named) else "") or ""
    return None if not file or file.startswith((":memory:", "file:")) else file


def open_storage(named: str) -> BaseStorage:
    """Open Optuna's storage.

    Args:
        named: a database's URL, or the path of a journal, which is created if it does not exist. A journal costs far
            less, because what others wrote is read from the end of a file.

    Raises:
        OthersError: the file is another user's work.
        StorageError: the file is no journal, or a damaged one; another version of Optuna has written it; or it is no
            file that can be read again, such as a device.
    """
    if "://" not in named:
        _make_private(named)
        try:
            if not _begins_as_journal(named):
                raise ValueError
            return JournalStorage(Journal(named))
        except (ValueError, KeyError, TypeError, AssertionError):
            raise StorageError(f"the study's storage {named} is {_fault(named)}") from None
    url = usable_url(named)
    file = storage_file(named)
    if file is not None:
        _make_private(file)
    try:
        return RDBStorage(url, engine_kwargs=engine_options(url))
    except RuntimeError as error:  # Optuna's own, with advice
        raise StorageError(
            f"the study's storage {hide_password(named)} is another version of Optuna's: {error}"
        ) from None


def _begins_as_journal(path: str) -> bool:
    """Whether a file is empty or begins as Optuna writes one, perhaps cut off.

    Optuna passes over its last line if that is none. We would cut that off, or write behind it.
    """
    with open(path, "rb") as file:
        first = file.read(len(_BEGINNING)).strip(b"\0")  # which a crash of the machine may leave
    return _BEGINNING.startswith(first)


def _fault(journal: str) -> str:
    """Say what is wrong with a journal that Optuna cannot read, and what would be right."""
    lines = Path(journal).read_bytes().splitlines()
    are_entries = [_is_entry(line) for line in lines]
    if not any(are_entries):
        return (
            "not Optuna's journal; allowed: a journal, a path where there is no file yet, or a database's URL, such as "
            "sqlite:///study.db"
        )
    codes = [json.loads(line)["op_code"] for line in lines] if all(are_entries) else []
    if unknown := sorted(set(codes) - set(JournalOperation), key=codes.index):
        where = f"op_code {unknown[0]} in line {codes.index(unknown[0]) + 1}"
        return f"of another version of Optuna: {where}; allowed: that version, or another storage"
    where = "" if all(are_entries) else f" in line {are_entries.index(False) + 1} of {len(are_entries)}"
    return f"damaged{where}; allowed: an earlier copy of it, or another storage and study_directory"


def _is_entry(line: bytes) -> bool:
    try:
        return "op_code" in json.loads(line)
    except (ValueError, TypeError):
        return False


def complete(storage: BaseStorage) -> BaseStorage:
    """Make what an SQLite database lacks whose first worker was killed, or found its disk full, between two tables.

    Optuna makes a missing table, but no missing index. Without that of the studies' names each worker creates another.
    """
    if isinstance(storage, RDBStorage) and storage.engine.dialect.name == "sqlite":
        for table in BaseModel.metadata.sorted_tables:
            for index in table.indexes:
                index.create(storage.engine, checkfirst=True)
    return storage


def has_studies(named: str) -> bool:
    """Whether a storage has a study of Optuna's: opening another database would make its tables there.

    A database without a study may be in the making.
    """
    if "://" not in named:
        return True
    url = usable_url(named)
    engine = create_engine(url, **engine_options(url))
    try:
        if not inspect(engine).has_table("studies"):
            return False
        with engine.connect() as connection:
            return connection.execute(text("SELECT 1 FROM studies LIMIT 1")).first() is not None
    finally:
        engine.dispose()


def _make_private(file: str) -> None:
    """Make a file that is missing: Optuna and SQLite would let all read it. One that is there may be read-only.

    Raises:
        OthersError: it is another user's.
        StorageError: what is there keeps nothing, as /dev/null, or never ends.
    """
    check_ours(Path(file))
    if os.path.exists(file):
        if not os.path.isfile(file):
            raise StorageError(f"the study's storage {file} is no ordinary file; allowed: one, or a path without any")
    else:
        os.close(open_private(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC))
        sync_name(Path(file))
