"""What the doctor finds on a machine without a device, and on a fake one."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.fake_driver import FakeDriver
from ds_hooks.shared.cuda_driver import Driver, DriverError
from ds_hooks.shared.page.file import DIRECTORY_VARIABLE
from squeezer import doctor, fix_mps
from squeezer.calibration import measure, mps
from squeezer.calibration.mps import servers_at
from squeezer.calibration.verdict import VERSION, Verdict
from squeezer.calibration.verdict_store import keep, kept, state_file
from squeezer.cli import main
from squeezer.doctor import Finding, Level, examine, main_measure
from tests.support.fake_mps import FakeMps, fake_mps, install
from tests.support.fake_nvml import GPU, INSTANCE, MB, FakeNvml, nvml_of
from tests.support.measured_rows import with_mps
from tests.support.oddly_named import oddly_named


@pytest.fixture(autouse=True)
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "pages"))
    return tmp_path / "pages"


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with FakeDriver() as made:
        yield made


def findings(driver: FakeDriver, **environment: str) -> dict[str, Finding]:
    return {finding.what: finding for finding in examine(0, environment, lambda _: driver)}


def no_driver(device: int) -> Driver:
    raise DriverError("no CUDA driver of version 12 or later")


def test_without_a_device_the_cpu_is_the_device(sandbox: Path) -> None:
    found = {finding.what: finding for finding in examine(0, {}, no_driver)}
    assert found["device"].text.startswith("cpu:") and "bubble word" not in found
    assert found["deepspeed"].level is found["signals"].level is Level.OK
    assert not sandbox.exists(), "nothing is left behind"


def test_a_device_that_writes_words(driver: FakeDriver, sandbox: Path) -> None:
    found = findings(driver, CUDA_MPS_PIPE_DIRECTORY=str(sandbox))
    assert found["bubble word"].level is Level.OK and "the device itself writes it" in found["bubble word"].text
    assert found["MPS"].level is Level.NOTE
    assert "only be observed" in found["MPS"].text and "squeezer doctor --fix-mps" in found["MPS"].text
    assert not sandbox.exists()


@pytest.mark.parametrize("call", ["register", "write_words", "wait_for_words"])
def test_a_device_that_cannot_write_words_says_why(call: str, driver: FakeDriver) -> None:
    driver.fail(call, at=1)
    finding = findings(driver)["bubble word"]
    assert finding.level is Level.NOTE and f"{call}: refused on purpose" in finding.text


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMps]:
    with fake_mps(tmp_path / "mps") as made:
        monkeypatch.setenv("PATH", made.path)
        yield made


def test_an_mps_server_is_named_with_its_clients_and_its_risk(driver: FakeDriver, control: FakeMps) -> None:
    control.serve(os.getpid(), 2**22 + 1)
    finding = findings(driver, CUDA_MPS_PIPE_DIRECTORY=str(control.pipes))["MPS"]
    assert finding.level is Level.NOTE and "fatal fault" in finding.text
    own_name = Path("/proc/self/comm").read_text().strip()
    assert f"server {control.server} with clients: {os.getpid()} ({own_name}), {2**22 + 1} (ended)" in finding.text
    assert "a main job started here would be one" in finding.text


def test_a_client_may_have_any_name_and_so_may_what_a_number_means_here(driver: FakeDriver, control: FakeMps) -> None:
    with oddly_named() as pid:
        control.serve(pid)
        finding = findings(driver, CUDA_MPS_PIPE_DIRECTORY=str(control.pipes))["MPS"]
        assert f"clients: {pid} (\ufffd\ufffd))" in finding.text
        (control.pipes / "servers").write_text(f"{pid}\n")
        assert not servers_at(control.pipes)[0].is_visible


def test_what_the_doctor_cannot_know_of_an_mps_server_it_says(
    driver: FakeDriver, control: FakeMps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text() -> str:
        return findings(driver, CUDA_MPS_PIPE_DIRECTORY=str(control.pipes))["MPS"].text

    own = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: own + 1)
        assert f"would not be one: it belongs to user {own}" in text()
    (control.pipes / "servers").write_text("1\n")
    assert "server 1 with 0 clients" in text() and "only with [device] mps = true" in text()
    (control.pipes / "servers").write_text("")
    assert "no server yet" in text()
    control.be("fails")
    assert "Cannot find MPS control daemon process" in text() and "--fix-mps" in text()


def fixed(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str]]:
    return main(["doctor", "--fix-mps", *options]), capsys.readouterr().out.splitlines()


@pytest.fixture
def no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tools, and the places for a server that has not been started."""
    tools = tmp_path / "tools"
    tools.mkdir()
    install(tools)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "its pipes"))
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", str(tmp_path / "logs"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    return tmp_path / "its pipes"


def test_the_commands_that_start_a_server_are_printed_and_work(
    no_server: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = fixed(capsys)
    assert status == 0 and not no_server.exists(), "printed only"
    assert lines[-1] == f"export CUDA_MPS_PIPE_DIRECTORY='{no_server}'"
    subprocess.run(["sh", "-ec", "\n".join(lines)], check=True)
    assert (no_server / "control").exists() and no_server.stat().st_mode & 0o777 == 0o700
    assert (no_server.parent / "logs/control.log").read_text() == "visible: all\n"


def test_the_commands_are_executed_on_demand_and_only_once(no_server: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = fixed(capsys, "--run")
    assert status == 0 and (no_server / "control").exists() and "# done" in lines
    (no_server.parent / "logs/control.log").unlink()
    status, again = fixed(capsys, "--run")
    assert status == 0 and again[-1] == lines[-1] and "there is an MPS control daemon" in again[0]
    assert not (no_server.parent / "logs/control.log").exists(), "not started anew"


def test_a_server_that_was_started_before_is_found_though_no_variable_names_it(
    no_server: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    for module in (mps, fix_mps):
        monkeypatch.setattr(module, "DEFAULT_DIRECTORY", str(no_server))
    status, lines = fixed(capsys, "--run")
    assert status == 0 and lines[-1] == f"export CUDA_MPS_PIPE_DIRECTORY='{no_server}-{os.getuid()}'"
    status, again = fixed(capsys, "--run")
    assert status == 0 and again[-1] == lines[-1] and "there is an MPS control daemon" in again[0]


def test_a_directory_that_cannot_be_looked_into_has_no_server(
    driver: FakeDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    unseen = {"CUDA_MPS_PIPE_DIRECTORY": "/" + "x" * 300}  # refused like another user's, but to root, too
    assert "no MPS control daemon" in findings(driver, **unseen)["MPS"].text
    assert metered(driver, FakeNvml(), **unseen)["compute mode"].level is Level.OK
    fake = FakeNvml()
    fake.processes = [(7, MB)]
    assert main_measure(unseen, 0, nvml_of(fake)) == 1
    assert "others use the device: 7" in capsys.readouterr().out


def test_what_keeps_a_server_from_starting_is_said(
    no_server: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_server.write_text("not a directory")
    assert fixed(capsys, "--run")[0] == 1
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        status, lines = fixed(capsys, "--run")
    assert status == 1 and "not on PATH" in lines[0] and len(lines) == 1
    with pytest.raises(SystemExit):
        main(["doctor", "--run"])
    assert "--run goes with --fix-mps" in capsys.readouterr().err


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, str]]:
    """What was measured on an H200 with MPS; gives the environments in which somebody measured."""
    asked: list[dict[str, str]] = []
    found = with_mps()
    found.append({"figure": "device", "uuid": GPU, "name": "NVIDIA H200", "driver": "580.1"})
    monkeypatch.setattr(measure, "measure_rows", lambda environment: (asked.append(dict(environment)), found)[1])
    return asked


def test_a_device_is_measured_kept_and_described(
    rows: list[dict[str, str]], control: FakeMps, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeNvml()
    fake.processes = [(control.server, MB)]  # no other job
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(control.pipes), "XDG_STATE_HOME": str(tmp_path)}
    control.serve(7)
    assert main_measure(environment, 0, nvml_of(fake)) == 1 and rows == []
    assert "others use the MPS server, maybe on this device: 7" in capsys.readouterr().out
    control.serve()
    assert main_measure({**environment, "CUDA_VISIBLE_DEVICES": f"5,{GPU}"}, 1, nvml_of(fake)) == 0
    assert main_measure(environment, 0, nvml_of(fake)) == 0
    whose = [asked["CUDA_VISIBLE_DEVICES"] for asked in rows]
    assert whose == [GPU] * 2, "the device that NVML has looked at: CUDA may number them in another order"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"NVIDIA H200, {GPU}, driver 580.1, MPS" and lines[-2].startswith("sound: ")
    file = state_file(environment)
    assert lines[-1] == f"kept in {file}"
    assert kept(GPU, "580.1", mps=False, file=file) is None
    verdict = kept(GPU, "580.1", mps=True, file=file)
    assert verdict is not None and verdict.sound


def test_a_device_that_others_use_or_may_use_is_not_measured(
    rows: list[dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "none"), "XDG_STATE_HOME": str(tmp_path)}
    fake = FakeNvml()
    fake.processes = [(7, MB), (8, None)]
    assert main_measure(environment, 0, nvml_of(fake)) == 1
    assert "others use the device: 7, 8" in capsys.readouterr().out
    unknown = FakeNvml()
    unknown.refuses = {"nvmlInit": "LibraryNotFound"}
    assert main_measure(environment, 0, nvml_of(unknown)) == 1
    assert "cannot say whether others use it" in capsys.readouterr().out.replace("use the device", "use it")
    assert rows == [] and not state_file(environment).exists()


@pytest.mark.parametrize("way", ["the driver does not say its version", "the verdict cannot be kept"])
def test_a_verdict_that_the_daemon_would_not_find_is_said_not_to_be_kept(
    way: str, rows: list[dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "none"), "XDG_STATE_HOME": str(tmp_path)}
    if "cannot" in way:
        environment["XDG_STATE_HOME"] = "/dev/null"
    else:
        measure.measure_rows(environment)[-1]["driver"] = ""
    assert main_measure(environment, 0, nvml_of(FakeNvml())) == 1
    said = capsys.readouterr().out
    assert f"no verdict is kept: {way}" in said and "sound: " in said


def test_what_was_measured_of_the_device_is_said_and_what_to_do_if_nothing_was(
    driver: FakeDriver, control: FakeMps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "driver_version", lambda: "580.1")
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(control.pipes), "XDG_STATE_HOME": str(tmp_path)}
    unknown = metered(driver, FakeNvml(), **environment)["measured"]
    assert unknown.level is Level.NOTE and "only be observed" in unknown.text
    assert "squeezer doctor --measure" in unknown.text
    for sound, level in ((True, Level.OK), (False, Level.NOTE)):
        verdict = Verdict(sound, "it was found", 0, 0, 0, {}, version=VERSION)
        keep(GPU, "580.1", verdict, mps=True, file=state_file(environment))
        found = metered(driver, FakeNvml(), **environment)["measured"]
        assert found.level is level and "it was found" in found.text
    without = {**environment, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "none")}
    assert "measured" not in metered(driver, FakeNvml(), **without), "the line on MPS says what to do"


def metered(driver: FakeDriver, fake: FakeNvml, **environment: str) -> dict[str, Finding]:
    return {finding.what: finding for finding in examine(0, environment, lambda _: driver, nvml_of(fake))}


def test_a_devices_meters_say_what_it_is_and_who_else_is_on_it(driver: FakeDriver) -> None:
    fake = FakeNvml()
    found = metered(driver, fake)
    assert found["device meters"].text == f"A made-up device, {GPU}, driver 580.65.06"
    assert found["device memory"].text == "70000 of 80000 MiB are free"
    quiet = ("device meters", "compute mode", "device memory", "other processes", "clocks")
    assert all(found[what].level is Level.OK for what in quiet) and "MIG" not in found
    fake.processes, fake.reasons, fake.split = [(7, 5 * MB), (8, None)], 0x4, 1
    found = metered(driver, fake)
    assert all(found[what].level is Level.NOTE for what in ("other processes", "clocks", "MIG"))
    assert found["other processes"].text.startswith("7 (5 MiB), 8 (unknown MiB)")
    assert "the power cap" in found["clocks"].text
    assert found["MIG"].text.startswith("the device is split")
    instance = metered(driver, FakeNvml(has_instance=True), CUDA_VISIBLE_DEVICES=INSTANCE)
    assert INSTANCE in instance["device meters"].text and instance["MIG"].level is Level.OK


@pytest.mark.parametrize("error", ["NotSupported", "GpuIsLost"])
def test_whichever_of_the_meters_fails_the_rest_is_said(error: str, driver: FakeDriver) -> None:
    for call in FakeNvml()._answers:
        fake = FakeNvml()
        fake.refuses = {call: error}
        assert {"device", "device meters", "bubble word", "MPS"} <= metered(driver, fake).keys(), call


def test_an_mps_server_is_not_among_the_others_on_a_device(driver: FakeDriver, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-cuda-mps-server"
    shutil.copy(shutil.which("sleep") or "", program)
    with subprocess.Popen([program, "60"]) as server:
        try:
            fake = FakeNvml()
            fake.processes = [(server.pid, 5 * MB)]
            assert metered(driver, fake)["other processes"].text == "none"
        finally:
            server.kill()


def test_an_exclusive_device_is_a_problem_without_mps(driver: FakeDriver, tmp_path: Path) -> None:
    fake = FakeNvml()
    fake.mode = 3
    alone = metered(driver, fake, CUDA_MPS_PIPE_DIRECTORY=str(tmp_path / "none"))["compute mode"]
    assert alone.level is Level.PROBLEM and "nvidia-smi -c DEFAULT" in alone.text
    (tmp_path / "control").touch()
    assert metered(driver, fake, CUDA_MPS_PIPE_DIRECTORY=str(tmp_path))["compute mode"].level is Level.NOTE


def test_a_device_that_lets_nobody_in_is_not_taken_for_none() -> None:
    fake = FakeNvml()
    fake.mode = 3
    found = {finding.what: finding for finding in examine(0, {}, no_driver, nvml_of(fake))}
    assert found["device"].level is Level.PROBLEM and found["device"].text.startswith("cuda:0")
    assert found["compute mode"].level is Level.PROBLEM


def test_missing_meters_are_said_with_what_is_missed(driver: FakeDriver) -> None:
    fake = FakeNvml()
    fake.refuses = {"nvmlInit": "LibraryNotFound"}
    finding = metered(driver, fake)["device meters"]
    assert finding.level is Level.NOTE and "Library Not Found" in finding.text and "power" in finding.text


def test_variables_that_change_how_streams_run_are_named(driver: FakeDriver) -> None:
    found = findings(driver, CUDA_LAUNCH_BLOCKING="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert {"CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"} <= set(found)


def test_a_directory_that_others_can_open_is_a_problem(sandbox: Path) -> None:
    sandbox.mkdir(mode=0o755)
    found = {finding.what: finding for finding in examine(0, {}, no_driver)}
    assert found["shared pages"].level is Level.PROBLEM and "chmod 700" in found["shared pages"].text


def test_the_command_prints_a_line_for_each(capsys: pytest.CaptureFixture[str], sandbox: Path) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "deepspeed" in printed and str(sandbox) in printed
    sandbox.mkdir()
    sandbox.chmod(0o755)
    assert main(["doctor"]) == 1
    assert "problem" in capsys.readouterr().out
