"""Tests whose files may lie in memory."""

from tests.support.files_in_memory import tmp_path_factory  # noqa: F401
