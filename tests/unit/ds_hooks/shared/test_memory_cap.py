"""What a client of an MPS server may hold of a device's memory, as its variable says it."""

import pytest

from ds_hooks.shared.memory_cap import cap_bytes, cap_text

MB = 1 << 20


def test_what_is_written_is_read() -> None:
    assert cap_text(20_480 * MB + 5) == "0=20480M"
    assert cap_bytes(cap_text(20_480 * MB), {"0"}) == 20_480 * MB
    assert cap_text(1) == "0=1M", "never nothing at all"


@pytest.mark.parametrize(
    ("text", "names", "found"),
    [
        ("0=1G,1=2048MB", {"0"}, 1024 * MB),
        ("0=1G,1=2048MB", {"1", "GPU-a"}, 2048 * MB),
        ("0=1G, GPU-a = 512m", {"1", "GPU-a"}, 512 * MB),
        ("0=1G", {"1"}, None),
        ("", {"0"}, None),
        ("0", {"0"}, None),
        ("0=", {"0"}, None),
        ("0=much,0=3M", {"0"}, 3 * MB),
        ("0=-1G", {"0"}, None),
    ],
)
def test_a_users_own(text: str, names: set[str], found: int | None) -> None:
    assert cap_bytes(text, names) == found
