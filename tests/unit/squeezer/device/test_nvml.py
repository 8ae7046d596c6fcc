"""NVIDIA's management library, all of whose answers may be missing."""

import os
from typing import Any

import pynvml
import pytest

from squeezer.device.nvml import CALLS_OF_A_LOOK, ComputeMode, Look, Meters, Neighbour, Nvml
from tests.support.fake_nvml import GPU, INSTANCE, MB, FakeNvml, nvml_of


def opened(fake: FakeNvml, name: str = GPU) -> Meters:
    meters = nvml_of(fake).open(name)
    assert meters is not None
    return meters


def test_a_device_says_what_it_is_and_who_is_on_it() -> None:
    fake = FakeNvml()
    fake.mode = 3
    fake.processes = [(os.getpid(), 3 * MB), (7, 5 * MB), (8, 0), (9, None)]
    meters = opened(fake)
    assert nvml_of(fake).driver_version() == "580.65.06"
    assert (meters.name(), meters.uuid()) == ("A made-up device", GPU)
    assert meters.compute_mode() is ComputeMode.EXCLUSIVE_PROCESS and meters.is_split() is False
    assert meters.memory() == (80_000 * MB, 70_000 * MB)
    assert meters.neighbours() == [Neighbour(7, 5 * MB), Neighbour(8, None), Neighbour(9, None)]
    assert meters.why == {} and meters.lost == ""


def test_a_look_reads_all_meters_in_few_calls() -> None:
    fake = FakeNvml()
    meters = opened(fake)
    meters.watch_errors()
    fake.reasons, fake.xid = 0x1 | 0x4 | 0x40, 79
    fake.calls.clear()
    assert meters.look() == Look(
        free_bytes=70_000 * MB,
        utilization=90,
        sm_mhz=1980,
        memory_mhz=2619,
        power_mw=300_000,
        energy_mj=10_000_000,
        slowed_by=("the power cap", "heat (by the hardware)"),
        xid=79,
    )
    assert len(fake.calls) == CALLS_OF_A_LOOK
    assert meters.look().xid is None, "each error once"
    assert "nvmlEventSetWait_v2" not in meters.why, "no event is no refusal"


@pytest.mark.parametrize("error", ["NotSupported", "NoPermission", "FunctionNotFound"])
def test_what_a_device_does_not_support_is_unknown_and_not_asked_again(error: str) -> None:
    fake = FakeNvml()
    calls = ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetUtilizationRates", "nvmlEventSetCreate")
    fake.refuses = dict.fromkeys(calls, error)
    meters = opened(fake)
    meters.watch_errors()
    look = meters.look()
    assert (look.energy_mj, look.utilization, look.xid) == (None, None, None)
    assert (look.power_mw, look.free_bytes) == (300_000, 70_000 * MB)
    assert set(meters.why) == set(calls) and all(meters.why.values())
    fake.calls.clear()
    assert meters.look() == look
    assert not {*calls, "nvmlEventSetWait_v2"} & set(fake.calls)


def test_what_fails_once_is_asked_again() -> None:
    fake = FakeNvml()
    meters = opened(fake)
    fake.refuses = {"nvmlDeviceGetPowerUsage": "Unknown"}
    assert meters.look().power_mw is None
    fake.refuses = {}
    assert meters.look().power_mw == 300_000


def test_a_device_that_vanishes_is_left_alone() -> None:
    fake = FakeNvml()
    meters = opened(fake)
    fake.vanish()
    assert meters.look() == Look() and meters.lost
    fake.calls.clear()
    assert meters.look() == Look()
    assert (meters.compute_mode(), meters.is_split(), meters.memory(), meters.neighbours()) == (None,) * 4
    assert fake.calls == []


def test_an_instance_has_its_own_memory_and_the_wholes_modes_but_no_power_of_others() -> None:
    fake = FakeNvml(has_instance=True)
    fake.mode = 3
    meters = opened(fake, INSTANCE)
    look = meters.look()
    assert meters.uuid() == INSTANCE and meters.compute_mode() is ComputeMode.EXCLUSIVE_PROCESS
    assert (look.sm_mhz, look.free_bytes) == (1980, 70_000 * MB)
    assert (look.power_mw, look.energy_mj) == (None, None)


def test_an_unknown_device_is_none() -> None:
    nvml = nvml_of(FakeNvml())
    assert nvml.open(INSTANCE) is nvml.open("") is nvml.open("3") is None
    assert nvml.open("0") is not None


def test_the_first_characters_of_a_uuid_name_a_device_as_they_do_for_cuda() -> None:
    nvml = nvml_of(FakeNvml())
    meters = nvml.open(GPU[:8])
    assert meters is not None and meters.uuid() == GPU
    assert nvml.open("GPU-f") is None


@pytest.mark.parametrize(
    "error", ["NotSupported", "NoPermission", "Unknown", "GpuIsLost", "ResetRequired", "Uninitialized", "Timeout"]
)
def test_whichever_call_fails_nothing_raises_and_the_rest_is_known(error: str) -> None:
    for call in FakeNvml()._answers:
        fake = FakeNvml(has_instance=True)
        fake.refuses = {call: error}
        nvml = nvml_of(fake)
        nvml.driver_version()
        for name in (GPU, GPU[:8], INSTANCE, "0"):
            meters = nvml.open(name)
            if meters is None:
                continue
            meters.watch_errors()
            asked = (meters.name, meters.uuid, meters.compute_mode, meters.is_split, meters.memory, meters.neighbours)
            unknown = [ask for ask in asked if ask() is None]
            assert len(unknown) <= 1 or meters.lost or call.startswith("nvmlDeviceGetHandle"), call
            meters.look()


def test_without_package_library_or_driver_nothing_is_known_and_the_reason_is_said() -> None:
    def no_package() -> Any:
        raise ImportError("No module named 'pynvml'")

    fake = FakeNvml()
    for error, text in (("LibraryNotFound", "Library Not Found"), ("DriverNotLoaded", "Driver Not Loaded")):
        fake.refuses = {"nvmlInit": error}
        nvml = nvml_of(fake)
        assert text in nvml.why_not
        assert nvml.open(GPU) is nvml.driver_version() is None
    missing = Nvml(no_package)
    assert "nvidia-ml-py" in missing.why_not and missing.open(GPU) is None


def test_old_bindings_lack_functions_and_bytes_become_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons")
    fake = FakeNvml()
    look = opened(fake).look()
    assert look.slowed_by is None and look.sm_mhz == 1980
