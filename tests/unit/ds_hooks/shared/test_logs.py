"""Logging: what a line looks like, that our own loggers alone are touched, and that whoever logs goes on."""

import logging
import os
import re
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ds_hooks.shared import logs
from ds_hooks.shared.rotating_file import older
from tests.support.logged import logged


@pytest.fixture(autouse=True)
def set_up() -> Iterator[None]:
    with logged(rank=3):
        yield


squeezer = logging.getLogger("squeezer.daemon.loop")


def test_the_terminal_has_short_lines_and_names_the_level_of_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    squeezer.debug("started")
    squeezer.info("step %d", 40)
    squeezer.warning("restarting")
    logging.getLogger("trials.side_task.cohort").error("failed")
    logs.set_up()
    logging.getLogger("launch.ds_squeeze").info("moved")
    assert capsys.readouterr().err.splitlines() == [
        "[squeezer] rank 3: step 40",
        "[squeezer] rank 3: warning: restarting",
        "[trials] rank 3: error: failed",
        "[ds_squeeze] moved",
    ]


def test_a_file_has_time_level_rank_run_and_module_in_each_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.add_file(tmp_path / "rank3.log", rank=3, run="study-7")
    squeezer.debug("started")
    try:
        raise OSError("no more")
    except OSError:
        squeezer.exception("failed")
    first, *rest = (tmp_path / "rank3.log").read_text().splitlines()
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(stamp + r" DEBUG rank 3 run study-7 squeezer\.daemon\.loop: started", first)
    assert re.fullmatch(stamp + r" ERROR rank 3 run study-7 squeezer\.daemon\.loop: failed", rest[0])
    assert all(line.startswith("    ") for line in rest[1:]) and rest[-1].endswith("OSError: no more")
    assert capsys.readouterr().err == "[squeezer] rank 3: error: failed\n"


def test_no_log_shows_a_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.add_file(tmp_path / "rank3.log", rank=3, run="study-7")
    url = "postgresql://me:s3cr3t@host/studies?sslpassword=s3cr3t"
    try:
        raise OSError(f"no {url}")
    except OSError as error:
        squeezer.exception("at %s", url)
        sys.excepthook(OSError, error, error.__traceback__)
    shown = capsys.readouterr().err
    assert shown.count("postgresql://me:***@host") == 2, "a line, and a program's last words"
    logged = (tmp_path / "rank3.log").read_text()
    assert logged.count("postgresql://me:***@host") == 2, "a line, and its traceback"
    assert "s3cr3t" not in shown + logged


def test_further_lines_of_a_message_are_indented(capsys: pytest.CaptureFixture[str]) -> None:
    squeezer.error("one\ntwo\r\n[squeezer] rank 0: three\n")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["[squeezer] rank 3: error: one", "    two", "    [squeezer] rank 0: three"]


def test_the_users_loggers_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = list(root.handlers), root.level
    logs.set_up(rank=1)
    assert (list(root.handlers), root.level) == before
    logging.getLogger("mine").info("not shown")
    assert capsys.readouterr().err == ""


def test_another_library_writes_as_ours_do_but_only_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    logs.adopt("optuna")
    logging.getLogger("optuna.study").info("trial 3 finished")
    logging.getLogger("optuna.study").warning("trial 3 failed")
    assert capsys.readouterr().err == "[optuna] rank 3: warning: trial 3 failed\n"


def test_a_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOG_BYTES", 2000)
    path = tmp_path / "rank3.log"
    logs.add_file(path, rank=3, run="r")
    for number in range(500):
        squeezer.debug("line %d", number)
    assert path.stat().st_size + older(path).stat().st_size < 5000
    assert "line 499" in older(path).read_text() + path.read_text()


def test_a_forked_process_leaves_its_parents_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.add_file(tmp_path / "rank3.log", rank=3, run="r")
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    squeezer.warning("from the child")
    assert (tmp_path / "rank3.log").read_text() == ""
    assert "from the child" in capsys.readouterr().err


def test_a_file_that_cannot_be_made_is_said_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.add_file(tmp_path / "gone" / "rank3.log", rank=3, run="r")
    squeezer.info("on")
    shown = capsys.readouterr().err
    assert "warning: no log file" in shown and shown.endswith("[squeezer] rank 3: on\n")


def test_a_full_disk_costs_the_lines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    logs.add_file(Path("/dev/full"), rank=3, run="r")
    squeezer.info("one")
    squeezer.info("two")
    shown = capsys.readouterr().err
    assert shown.count("records are lost: /dev/full") == 1 and "rank 3: one\n" in shown and "rank 3: two\n" in shown


def test_a_message_that_cannot_be_formatted_or_encoded_does_no_harm(tmp_path: Path) -> None:
    file = logs.FileHandler(tmp_path / "log", 3, "r")
    for text, argument in (("%d", "no number"), ("%s", "lone surrogate \ud800")):
        record = logging.LogRecord("squeezer", logging.INFO, "", 0, text, (argument,), None)
        for handler in (file, logs.TerminalHandler(3)):
            handler.emit(record)
    file.close()
    assert "\\ud800" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("end", ["closed", "reader gone", "none"])
def test_a_broken_standard_error_does_no_harm(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs.add_file(tmp_path / "log", rank=3, run="r")
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    if end == "closed":
        stream.close()
    os.close(reader)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", None if end == "none" else stream)
        squeezer.error("on")
    assert "on" in (tmp_path / "log").read_text()
    try:
        stream.close()
    except BrokenPipeError:
        pass


@contextmanager
def stuck() -> Iterator[int]:
    """Standard error is a full pipe; the end for reading."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writer, True)
    with os.fdopen(writer, "w") as stream, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        yield reader
    os.close(reader)


def _all(reader: int) -> bytes:
    """What waits in a pipe."""
    text = b""
    while select.select([reader], [], [], 0)[0]:
        text += os.read(reader, 65536)
    return text


def test_a_reader_that_has_stopped_reading_is_not_waited_for(tmp_path: Path) -> None:
    logs.add_file(tmp_path / "log", rank=3, run="r")
    with stuck():
        squeezer.error("on")  # would never return
    assert "on" in (tmp_path / "log").read_text()


def test_a_line_longer_than_what_a_pipe_still_takes_is_cut() -> None:
    with stuck() as reader:
        os.read(reader, 8192)
        squeezer.error("x" * 20_000)  # would never return
        squeezer.error("lost")
        text = _all(reader)
        squeezer.error("on")
        lines = (text + _all(reader)).replace(b"\0", b"").decode().splitlines()
    assert lines[0].endswith("xxx") and lines[1:] == ["[squeezer] rank 3: error: on"]


def test_only_one_line_waits_for_a_reader_that_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    real = select.select

    def watched(*arguments: Any) -> Any:
        waits.append(arguments[3])
        return real(*arguments)

    monkeypatch.setattr(select, "select", watched)
    with stuck():
        for _ in range(3):
            squeezer.error("on")
    assert waits == [logs.PATIENCE_S, 0.0, 0.0]
