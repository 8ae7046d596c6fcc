"""The side task's program: what it sends to its daemon."""

import os
from typing import Any

import pytest

from ds_hooks.shared import statuses
from trials.side_task import main


def test_a_status_whose_write_is_cut_short_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []

    def write_a_part(fd: int, data: Any) -> int:
        assert fd == 7
        written.append(bytes(data[:1000]))
        return len(written[-1])

    status = statuses.Error("too long for one write " * 150)
    monkeypatch.setattr(os, "write", write_a_part)
    main._send(7, status)
    assert len(written) > 1
    assert b"".join(written) == statuses.encode(status)
