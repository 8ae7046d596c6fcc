"""The device's UUID on the page: written as two words with a sign, read as the same number."""

from uuid import UUID

import pytest

from ds_hooks.shared.device_uuid import read_device_uuid, uuid_number, write_device_uuid
from ds_hooks.shared.page.layout import PAGE_BYTES, Field


@pytest.mark.parametrize("number", [0, 1, 0x89F4A2C1_0000_1111_F222_F33344445555, 2**128 - 1])
def test_a_uuid_is_read_as_it_was_written(number: int) -> None:
    words = memoryview(bytearray(PAGE_BYTES)).cast("q")
    write_device_uuid(words, number)
    assert read_device_uuid(words) == number
    assert words[Field.DEVICE_UUID] % 2**64 == number >> 64, "the high word first"


def test_a_device_without_a_uuid_is_unknown() -> None:
    assert uuid_number(None) == 0
    assert uuid_number(UUID(int=7)) == uuid_number(str(UUID(int=7))) == 7
