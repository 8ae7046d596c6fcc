"""The report's line on how many trials trained at once."""

from typing import Any

import pytest

from squeezer.reports.rows import row_figures, row_text


def ready(rows: int, gain: float) -> dict[str, Any]:
    return {"event": "ready", "trials": 50, "busy_ms": 1.0, "rows": rows, "gain": gain}


@pytest.mark.parametrize(
    ("ranks", "figures", "text"),
    [
        ([[]], (None, None), ""),
        ([[{"event": "ready"}, {"event": "exited"}]], (None, None), ""),
        ([[ready(8, 3.14)], [ready(8, 0.0)]], ([8, 8], 3.14), "up to 8 trials at once, 3.1 times as fast as one after"),
        ([[ready(8, 3.0)], [ready(16, 4.0)], [ready(8, 2.0)]], ([8, 16], 3.0), "up to 8 to 16 trials at once, 3.0 tim"),
        ([[ready(16, 0.0)]], ([16, 16], None), "up to 16 trials at once"),
        ([[ready(1, 1.0)]], ([1, 1], 1.0), "one trial at a time: fused ones would train no faster"),
        ([[ready(1, 0.0)]], ([1, 1], None), "one trial at a time"),
    ],
)
def test_rows(ranks: list[list[dict[str, Any]]], figures: tuple[Any, Any], text: str) -> None:
    side = row_figures(ranks)
    assert (side["rows"], side["gain"]) == figures
    assert row_text(side).startswith(text) and bool(row_text(side)) == bool(text)
