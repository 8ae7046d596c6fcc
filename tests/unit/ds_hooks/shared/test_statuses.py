"""A side task's statuses: what is written is read back, and what is no status is refused with the reason."""

import json
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hooks.shared.statuses import (
    MAXIMUM_LINE_BYTES,
    Error,
    Overran,
    Starved,
    Status,
    StatusError,
    as_fields,
    decode,
    encode,
)

whole = st.integers(-(2**63), 2**63 - 1)
known = {int: whole, float: st.floats(allow_nan=False, allow_infinity=False), str: st.text(max_size=100)}
any_status = st.one_of(
    [st.builds(kind, **{name: known[of] for name, of in kind.__annotations__.items()}) for kind in get_args(Status)]
)


@settings(deadline=None)
@given(any_status)
def test_what_is_written_is_read_back(status: Status) -> None:
    line = encode(status)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert decode(line) == status
    assert json.loads(line) == as_fields(status)


def test_a_line_has_the_fields_of_its_record() -> None:
    status = Starved(unit="loss", trials=4, needs_ms=5.5, longest_bubble_ms=3, remedy="split")
    fields = {
        "event": "starved",
        "unit": "loss",
        "trials": 4,
        "needs_ms": 5.5,
        "longest_bubble_ms": 3,
        "remedy": "split",
    }
    assert json.loads(encode(status)) == as_fields(status) == fields
    assert list(as_fields(status)) == list(fields)


@settings(deadline=None)
@given(start=st.text(max_size=50), costly=st.characters(), times=st.integers(0, 10_000))
def test_an_error_of_any_length_fits_into_a_line(start: str, costly: str, times: int) -> None:
    line = encode(Error(start + costly * times))
    assert len(line) <= MAXIMUM_LINE_BYTES
    status = decode(line)
    assert isinstance(status, Error) and status.message.startswith(start)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"", "not a line of JSON"),
        (b"Traceback (most recent call last):", "not a line of JSON: b'Traceback"),
        (b"\xff\xfe", "not a line of JSON"),
        (b"[" * 60_000, "not a line of JSON"),
        (b"9" * 5000, "not a line of JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "unknown status None; allowed: serving, ready, progress"),
        (b'{"event":["ready"]}', "unknown status ['ready']"),
        (b'{"event":"sleeping"}', "unknown status 'sleeping'"),
        (
            b'{"event":"ready","mood":1}',
            "status ready has the fields ['mood']; allowed: ['busy_ms', 'gain', 'rows', 'trials']",
        ),
        (b'{"event":"overran","slot":1}', "status overran has the fields ['slot']"),
        (b'{"event":"overran","slot":"1","overrun_ns":2}', "slot is '1'; allowed: int"),
        (b'{"event":"overran","slot":true,"overrun_ns":2}', "slot is True; allowed: int"),
        (b'{"event":"overran","slot":1.0,"overrun_ns":2}', "slot is 1.0; allowed: int"),
        (b'{"event":"overran","slot":1,"overrun_ns":99999999999999999999}', "overrun_ns is 9999"),
        (b'{"event":"error","message":null}', "message is None; allowed: str"),
        (
            b'{"event":"starved","unit":"u","trials":1,"needs_ms":NaN,"longest_bubble_ms":1,"remedy":"split"}',
            "needs_ms is nan; allowed: float",
        ),
    ],
)
def test_what_is_no_status_is_refused_with_the_reason(line: bytes, says: str) -> None:
    with pytest.raises(StatusError) as refused:
        decode(line)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 400


@settings(deadline=None)
@given(st.binary(max_size=200) | st.from_type(int).map(lambda n: b'{"event":"overran","slot":%d,"overrun_ns":1}' % n))
def test_nothing_but_a_status_error_is_ever_raised(line: bytes) -> None:
    try:
        assert isinstance(decode(line), Overran)
    except StatusError:
        pass
