"""How one MPS client's end is measured: played without a device, with a control daemon that a script plays."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import gpu_mps_faults
from squeezer.calibration.measured_device import LateError
from tests.support.fake_mps import install
from tests.support.sandbox import is_alive, wait_for

pytestmark = pytest.mark.integration


def test_a_client_that_hangs_costs_its_own_scenario_and_others_are_on_disk_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, hangs = tmp_path / "results.json", tmp_path / "hangs"

    def until(true: Callable[[], bool], limit_s: float, nap_s: float) -> None:
        wait_for(lambda: true() or (hangs.exists() and "\n" in hangs.read_text()), "a line, or one that hangs")
        if not true():
            raise LateError("it hangs")

    install(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("RESULTS", str(results))
    monkeypatch.setenv("HANGS", str(hangs))
    monkeypatch.setattr(gpu_mps_faults, "CLIENT", "tests.support.fake_mps_client")
    monkeypatch.setattr(gpu_mps_faults, "until", until)
    monkeypatch.setattr(gpu_mps_faults, "_LOOK_S", 0.01)
    monkeypatch.setattr(sys, "argv", ["", "--json", str(results)])
    gpu_mps_faults.main()

    no_server, asked, killed, hung = json.loads(results.read_text())["runs"]
    assert no_server["scenario"] == "terminated" and "no client of the server" in no_server["error"]
    for run in (asked, killed):
        assert (run["main_job"], run["main_job_said"]) == ("lives", ["ready"])
        assert [new["said"] for new in run["new"]] == [["ready"]]
    assert hung == {"scenario": "spins, SIGKILL", "error": "LateError: it hangs"}
    pid, on_disk = map(int, hangs.read_text().split())
    assert on_disk == 3
    wait_for(lambda: not is_alive(pid), "its end")
    assert "LateError" in capsys.readouterr().out


def test_without_the_control_program_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", [""])
    with pytest.raises(SystemExit, match=r"nothing was measured: no MPS server starts: .*nvidia-cuda-mps-control"):
        gpu_mps_faults.main()
