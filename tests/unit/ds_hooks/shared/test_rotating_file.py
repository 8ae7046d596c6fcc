"""Files of which only the last part is kept, and what a full disk does to them."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ds_hooks.shared.rotating_file import RotatingFile, older, read_parts
from tests.support.paths import ROOT


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file of this process may be longer. Around as little as may be: where its output goes is a file, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "rank0.units.bin"
    file = RotatingFile(path, most_bytes=10)
    for number in range(7):
        file.write(b"%04d" % number)
    file.close()
    assert older(path) == tmp_path / "rank0.units.old.bin"
    assert (older(path).read_bytes(), path.read_bytes()) == (b"000300040005", b"0006")
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_there_stays_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"before")
    file = RotatingFile(path, most_bytes=10)
    file.write(b"more")
    assert older(path).read_bytes() == b"beforemore" and not path.exists()
    file.close()
    file.write(b"and more")
    assert path.read_bytes() == b"and more"


def test_a_file_without_a_size_grows(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "a.bin")
    for _ in range(100):
        file.write(bytes(1000))
    file.close()
    assert (tmp_path / "a.bin").stat().st_size == 100_000 and not older(tmp_path / "a.bin").exists()


def test_what_does_not_fit_on_the_disk_is_left_out_whole_and_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.bin"
    file = RotatingFile(path)
    with files_end_at(1000):
        written = [file.write(bytes([letter]) * 400) for letter in b"abcde"]
    assert written == [True, True, False, False, False]
    assert path.read_bytes() == b"a" * 400 + b"b" * 400
    file.write(b"f" * 100)
    file.close()
    assert path.read_bytes() == b"a" * 400 + b"b" * 400 + b"f" * 100, "and it goes on when there is room"
    assert capfd.readouterr().err == f"[squeezer] records are lost: {path}: File too large\n"


def test_a_full_device_leaves_the_callers_buffer_free(capfd: pytest.CaptureFixture[str]) -> None:
    buffer = bytearray(b"a")
    RotatingFile(Path("/dev/full")).write(buffer)
    buffer.clear()
    assert "No space left on device" in capfd.readouterr().err


def test_a_full_device_to_which_errors_are_told_too() -> None:
    program = "from pathlib import Path; from ds_hooks.shared.rotating_file import RotatingFile as File; "
    program += "print([File(Path('/dev/full')).write(b'a') for _ in range(2)])"
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stderr=full, stdout=subprocess.PIPE, cwd=ROOT)
    assert ended.stdout == b"[False, False]\n"


def test_a_file_that_rolls_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    file = RotatingFile(path, most_bytes=10)
    file.write(b"first part")
    file.write(b"second")
    assert read_parts(path) == (b"first part", b"second")
    read_bytes = Path.read_bytes

    def rolls_after(self: Path) -> bytes:
        found = read_bytes(self)
        if self == path:
            file.write(b" part")
        return found

    monkeypatch.setattr(Path, "read_bytes", rolls_after)
    assert read_parts(path) == (b"second part", b"")
    assert read_parts(tmp_path / "none.bin") == (b"", b"")


def test_one_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RotatingFile(tmp_path / "none" / "a.bin")
