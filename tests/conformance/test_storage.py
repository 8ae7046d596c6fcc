"""Storages of which we change something pass Optuna's own tests: the journal's lock, PostgreSQL's connections."""

from collections.abc import Iterator

import pytest
from optuna.storages import BaseStorage, RDBStorage
from optuna.testing.pytest_storages import StorageTestCase

from tests.support.slow_cases import others_slow
from trials.search.storage.optuna_storage import open_storage


# what workers do with a storage is shown on PostgreSQL by the other files here
@pytest.mark.parametrize("storage_kind", others_slow(["journal", "postgresql"], ["journal"]))
class TestOptunasOwn(StorageTestCase):
    @pytest.fixture
    def storage(self, storage: str) -> Iterator[BaseStorage]:
        opened = open_storage(storage)
        yield opened
        if isinstance(opened, RDBStorage):
            opened.engine.dispose()
