"""An MPS server of our own ends with whoever started it; its control program is played by a script."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from squeezer.calibration import __main__ as calibration
from squeezer.calibration.mps_server import NoServerError, mps_server
from tests.support.fake_mps import install
from tests.support.paths import ROOT
from tests.support.sandbox import wait_for


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def asked(folder: Path) -> list[str]:
    """What the control daemon was asked."""
    file = folder / "mps-pipe" / "asked"
    return [line.strip() for line in file.read_text().splitlines()] if file.exists() else []


def test_it_ends_with_its_measurement(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of the measurement"), mps_server(tmp_path) as directories:
        assert directories["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "mps-pipe")
        assert (tmp_path / "mps-pipe" / "control").exists() and asked(tmp_path) == []
        raise ValueError("of the measurement")
    assert asked(tmp_path) == ["quit"]


HOLDS = """
import sys, time
from pathlib import Path
from squeezer.calibration.mps_server import mps_server

with mps_server(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(1000)
"""


def test_it_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """Even with all of its group."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert asked(tmp_path) == []
        os.killpg(process.pid, signal.SIGKILL)
    wait_for(lambda: asked(tmp_path) == ["quit"], "its end")


def test_its_clients_need_not_number_their_devices_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with mps_server(tmp_path) as directories:
        assert "CUDA_VISIBLE_DEVICES" not in directories
    assert (tmp_path / "mps-log" / "control.log").read_text() == "visible: all\n"


def test_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "nvidia-cuda-mps-control").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(NoServerError, match=r"no MPS server starts: .*nvidia-cuda-mps-control.* status 3"):
        mps_server(tmp_path).__enter__()


def test_without_it_a_calibration_says_so_and_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "rows.jsonl"), "--mps"])
    with pytest.raises(SystemExit, match=r"nothing was measured: no MPS server starts: .*nvidia-cuda-mps-control"):
        calibration.main()
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_figure_that_there_is_not_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "rows.jsonl"), "--figures", "slices,sloices"])
    with pytest.raises(SystemExit):
        calibration.main()
    assert "no such figure: sloices; there are slices, " in capsys.readouterr().err
