"""What the doctor finds on a machine without a device, and on a fake one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.fake_driver import FakeDriver
from ds_hooks.shared.cuda_driver import Driver, DriverError
from ds_hooks.shared.page_file import DIRECTORY_VARIABLE
from squeezer.cli import main
from squeezer.doctor import Finding, Level, examine
from tests.support.fake_nvml import GPU, INSTANCE, MB, FakeNvml, nvml_of


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
    assert found["MPS"].level is Level.OK and "take turns" in found["MPS"].text
    assert not sandbox.exists()


@pytest.mark.parametrize("call", ["register", "write_words", "wait_for_words"])
def test_a_device_that_cannot_write_words_says_why(call: str, driver: FakeDriver) -> None:
    driver.fail(call, at=1)
    finding = findings(driver)["bubble word"]
    assert finding.level is Level.NOTE and f"{call}: refused on purpose" in finding.text


def test_an_mps_server_is_named_with_its_risk(driver: FakeDriver, tmp_path: Path) -> None:
    (tmp_path / "control").touch()
    finding = findings(driver, CUDA_MPS_PIPE_DIRECTORY=str(tmp_path))["MPS"]
    assert finding.level is Level.NOTE and "fatal fault" in finding.text


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
