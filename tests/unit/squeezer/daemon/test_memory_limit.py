"""When the memory that is free for the main job is too little for a side task."""

from ds_hooks.shared.cuda_driver import CONTEXT_BYTES
from ds_hooks.shared.page.layout import Field
from squeezer.daemon.memory_limit import LOOKS_IN_A_ROW, LowMemory, MemoryLimit, side_limit_bytes

MB, GB = 1 << 20, 1 << 30


def words() -> "memoryview[int]":
    return memoryview(bytearray(512)).cast("q")


def test_what_the_daemon_measures_sets_the_limit_at_once() -> None:
    page = words()
    page[Field.SIDE_BYTES], page[Field.MAIN_PEAK_BYTES] = 2 * GB, 40 * GB
    MemoryLimit(page, GB).measured(3 * GB)
    assert page[Field.SIDE_LIMIT_BYTES] == side_limit_bytes(3 * GB, 2 * GB, 40 * GB, GB) == 3 * GB


def test_it_ends_a_side_task_below_a_quarter_of_the_reserve_after_some_looks_in_a_row() -> None:
    low = LowMemory(words(), GB)
    for free in (*[256 * MB] * 9, *[255 * MB] * (LOOKS_IN_A_ROW - 1), 256 * MB):
        low.look(free)
    assert low.reason == "", "at the threshold, or below it but not for long"
    for _ in range(LOOKS_IN_A_ROW):
        assert low.reason == ""
        low.look(255 * MB)
    assert low.reason.startswith("255 MiB of the device are free for the main job, less than 256 (3 looks in a row)")


def test_it_comes_back_when_as_much_is_free_as_it_held_and_the_reserve() -> None:
    page = words()
    page[Field.SIDE_BYTES] = 2 * GB
    low = LowMemory(page, GB)
    for _ in range(LOOKS_IN_A_ROW):
        low.look(0)
    page[Field.SIDE_BYTES] = 0  # it has ended
    needed = 3 * GB + CONTEXT_BYTES
    for free in (*[needed - 1] * 9, *[needed] * (LOOKS_IN_A_ROW - 1), 0):
        low.look(free)
    assert low.reason
    for _ in range(LOOKS_IN_A_ROW):
        assert low.reason
        low.look(needed)
    assert low.reason == ""


def test_a_large_main_job_has_a_larger_reserve() -> None:
    page = words()
    page[Field.MAIN_PEAK_BYTES] = 80 * GB
    low = LowMemory(page, GB)
    for _ in range(LOOKS_IN_A_ROW):
        low.look(GB - 1)  # a quarter of 5% of its peak
    assert "less than 1024" in low.reason


def test_without_a_reserve_nothing_is_too_little() -> None:
    low = LowMemory(words(), 0)
    for _ in range(9):
        low.look(0)
    assert low.reason == ""
