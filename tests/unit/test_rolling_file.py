"""Files of which only the last part is kept, and what a full disk does to them."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hooks.rolling_file import RollingFile, older


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file may be longer than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "rank0.units.bin"
    file = RollingFile(path, most_bytes=10)
    for number in range(7):
        file.write(b"%04d" % number)
    file.close()
    assert older(path) == tmp_path / "rank0.units.old.bin"
    assert (older(path).read_bytes(), path.read_bytes()) == (b"000300040005", b"0006")
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_there_stays_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"before")
    file = RollingFile(path, most_bytes=10)
    file.write(b"more")
    assert older(path).read_bytes() == b"beforemore" and not path.exists()
    file.close()
    file.write(b"and more")
    assert path.read_bytes() == b"and more"


def test_a_file_without_a_size_grows(tmp_path: Path) -> None:
    file = RollingFile(tmp_path / "a.bin")
    for _ in range(100):
        file.write(bytes(1000))
    file.close()
    assert (tmp_path / "a.bin").stat().st_size == 100_000 and not older(tmp_path / "a.bin").exists()


def test_what_does_not_fit_on_the_disk_is_left_out_whole_and_said_once(
    tmp_path: Path, small_files: int, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.bin"
    file = RollingFile(path)
    for letter in b"abcde":
        file.write(bytes([letter]) * 400)
    assert path.read_bytes() == b"a" * 400 + b"b" * 400
    file.write(b"f" * 100)
    file.close()
    assert path.read_bytes() == b"a" * 400 + b"b" * 400 + b"f" * 100, "and it goes on when there is room"
    assert capfd.readouterr().err == f"[squeezer] records are lost: {path}: File too large\n"


def test_a_full_device_leaves_the_callers_buffer_free(capfd: pytest.CaptureFixture[str]) -> None:
    buffer = bytearray(b"a")
    RollingFile(Path("/dev/full")).write(buffer)
    buffer.clear()
    assert "No space left on device" in capfd.readouterr().err


def test_one_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RollingFile(tmp_path / "none" / "a.bin")
