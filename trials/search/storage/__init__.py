"""Where a study is kept: Optuna's storage, and beside it the claims on its trials."""

from trials.search.storage.optuna_storage import open_storage as open_storage
