"""The daemon's side of a device: its kind, a side task's environment, and what a main job's end leaves of the page."""

import os
from pathlib import Path
from typing import Any

import pytest

from ds_hooks.shared.device_uuid import write_device_uuid
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import PAGE_BYTES, DeviceGate, Field
from ds_hooks.shared.page.plan import next_permit_ns, plan_slot, plan_steps
from squeezer.calibration.mps import Server
from squeezer.config import DeviceTable
from squeezer.daemon.memory_limit import side_limit_bytes
from squeezer.device import DEVICES, CudaDevice, SideProcess, kind_of, sharing
from squeezer.device.cuda import visible_device
from tests.support.ever_forking import assert_stands_still_each_time, ever_forking
from tests.support.fake_nvml import GPU, INSTANCE, INSTANCE_NUMBER, NUMBER, FakeNvml, nvml_of

MB, GB = 1 << 20, 1 << 30
WORDS = memoryview(bytearray(512)).cast("q")


@pytest.mark.parametrize(
    ("named", "accelerator", "has", "kind"),
    [
        ("auto", None, "", "cpu"),
        ("auto", None, "/dev/nvidiactl", "cuda"),
        ("auto", "cpu", "/dev/nvidiactl", "cpu"),
        ("auto", "cuda", "", "cuda"),
        ("auto", "xpu", "/dev/nvidiactl", "cpu"),
        ("cpu", "cuda", "/dev/nvidiactl", "cpu"),
        ("cuda", "cpu", "", "cuda"),
    ],
)
def test_the_kind_is_the_users_or_what_deepspeed_will_choose(
    named: Any, accelerator: str | None, has: str, kind: str
) -> None:
    environment = {} if accelerator is None else {"DS_ACCELERATOR": accelerator}
    assert kind_of(DeviceTable(kind=named), environment, lambda path: path == has) == kind
    assert kind in DEVICES


@pytest.mark.parametrize(
    ("visible", "kind"),
    [("", "cpu"), ("-1", "cpu"), (" -1,0", "cpu"), ("0,-1", "cuda"), ("1,0", "cuda"), (GPU, "cuda")],
)
def test_where_all_gpus_are_hidden_the_job_computes_on_cores(visible: str, kind: str) -> None:
    assert kind_of(DeviceTable(), {"CUDA_VISIBLE_DEVICES": visible}, lambda path: True) == kind


@pytest.mark.parametrize(
    ("visible", "local_rank", "device"),
    [(None, 2, "2"), ("", 1, "1"), ("4,5,6", 1, "5"), ("GPU-a, GPU-b", 1, "GPU-b"), ("7", 3, "7")],
)
def test_a_side_task_sees_its_ranks_device_alone(visible: str | None, local_rank: int, device: str) -> None:
    assert visible_device({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, local_rank) == device


def test_a_device_that_the_hooks_have_named_goes_before_what_the_environment_says(tmp_path: Path) -> None:
    page = Page.open(page_path(tmp_path / "pages", 0))
    write_device_uuid(page.words, 0x89F4A2C1_0000_1111_2222_F33344445555)
    seen = CudaDevice(page.words, DeviceTable(), 0, {"CUDA_VISIBLE_DEVICES": "0,1"}).environment(1)
    assert seen["CUDA_VISIBLE_DEVICES"] == "GPU-89f4a2c1-0000-1111-2222-f33344445555"
    write_device_uuid(page.words, 0)
    seen = CudaDevice(page.words, DeviceTable(), 1, {"CUDA_VISIBLE_DEVICES": "0,1"}).environment(1)
    assert seen["CUDA_VISIBLE_DEVICES"] == "1"
    page.close()


def test_a_mig_instance_is_named_as_one(tmp_path: Path) -> None:
    page = Page.open(page_path(tmp_path / "pages", 0))
    fake = FakeNvml(has_instance=True)
    no_nvml = FakeNvml()
    no_nvml.refuses = {"nvmlInit": "LibraryNotFound"}
    split = FakeNvml(has_instance=True)
    split.split = 1

    def seen(number: int, nvml: FakeNvml, visible: str = "0") -> str:
        write_device_uuid(page.words, number)
        made = CudaDevice(page.words, DeviceTable(), 0, {"CUDA_VISIBLE_DEVICES": visible}, nvml_of(nvml))
        return made.environment(1)["CUDA_VISIBLE_DEVICES"]

    assert seen(INSTANCE_NUMBER, fake) == INSTANCE
    assert seen(NUMBER, fake) == GPU
    assert seen(NUMBER, fake, INSTANCE) == GPU, "the device is not split, so that name is another job's"
    # PyTorch may give the number of the whole, and NVML may be missing: then the rank's own name counts
    assert seen(NUMBER, split, INSTANCE) == seen(INSTANCE_NUMBER, no_nvml, INSTANCE) == INSTANCE
    assert seen(NUMBER, no_nvml) == GPU
    page.close()


def test_an_exclusive_device_has_no_place_for_a_side_task_without_mps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page.open(page_path(tmp_path / "pages", 0))
    fake = FakeNvml()
    device = CudaDevice(page.words, DeviceTable(), 0, {}, nvml_of(fake))
    fake.mode = 3
    assert device.meters() is None and device.bars_side_task() == "", "not known before the hooks have named it"
    write_device_uuid(page.words, NUMBER)
    assert "EXCLUSIVE_PROCESS" in device.bars_side_task() and "nvidia-smi -c DEFAULT" in device.bars_side_task()
    words = page.words
    words[Field.MAIN_PID] = os.getpid()
    server = Server(directory=tmp_path, pid=7, clients=frozenset({os.getpid()}), owner=os.geteuid())
    monkeypatch.setattr(sharing, "server_of", {os.getpid(): server}.__getitem__)
    assert device.bars_side_task() == "", "clients of one server are one process to the device"
    without = CudaDevice(page.words, DeviceTable(mps=False), 0, {}, nvml_of(fake))
    assert "EXCLUSIVE_PROCESS" in without.bars_side_task()
    fake.mode = 0
    assert device.bars_side_task() == "" and device.meters() is device.meters()
    fake.vanish()
    assert device.bars_side_task() == "", "what is unknown bars nobody"
    page.close()


def test_a_side_task_of_which_no_server_is_known_meets_none() -> None:
    off = CudaDevice(WORDS, DeviceTable(mps=True, mps_thread_percent=30), 1, {}).environment(2)
    assert (off["CUDA_MPS_PIPE_DIRECTORY"], off["OMP_NUM_THREADS"]) == ("/dev/null", "2")
    assert "CUDA_MPS_CLIENT_PRIORITY" not in off and "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in off


def test_a_main_job_that_died_in_a_bubble_leaves_a_shut_gate(tmp_path: Path) -> None:
    page = Page.open(page_path(tmp_path / "pages", 0))
    words = page.words
    words[Field.BUBBLE], words[Field.DEVICE_GATE] = 9 << 1 | 1, 5000
    plan_slot(words, 0, 5_000_000)
    plan_steps(words, 1, 2**31)
    CudaDevice(words, DeviceTable(), 0).main_ended()
    assert (words[Field.BUBBLE], words[Field.DEVICE_GATE]) == (9 << 1, DeviceGate.CLOSED)
    assert next_permit_ns(words, 9, 0) == 0
    page.close()


def test_what_a_killed_daemon_has_forced_open_is_shut_by_the_next(tmp_path: Path) -> None:
    page = Page.open(page_path(tmp_path / "pages", 0))
    for left, then in ((DeviceGate.FORCED, DeviceGate.CLOSED), (5000, 5000)):
        page.words[Field.DEVICE_GATE] = left
        CudaDevice(page.words, DeviceTable(), 0)
        assert page.words[Field.DEVICE_GATE] == then
    page.close()


@pytest.mark.parametrize(
    ("free", "side", "main_peak", "limit"),
    [
        (0, 0, 0, 0),  # unknown
        (10 * GB, 0, 4 * GB, 9 * GB),
        (6 * GB, 4 * GB, 4 * GB, 9 * GB),  # what it holds could be free
        (6 * GB, 4 * GB, 40 * GB, 8 * GB),  # 5% of the peak is more than the reserve
        (100 * MB, 200 * MB, 70 * GB, 1),  # none at all, which is not the same as unknown
    ],
)
def test_the_side_task_may_hold_what_the_main_job_will_not_need(
    free: int, side: int, main_peak: int, limit: int
) -> None:
    assert side_limit_bytes(free, side, main_peak, 1 * GB) == limit


def test_a_child_that_is_being_forked_is_stopped_with_the_side_task() -> None:
    device = DEVICES["cpu"](memoryview(bytearray(PAGE_BYTES)).cast("q"), DeviceTable(), 0)
    with ever_forking() as leader:
        side = SideProcess(pid=leader, pidfd=os.pidfd_open(leader))
        assert_stands_still_each_time(leader, lambda: device.stop(side), lambda: device.resume(side))
        os.close(side.pidfd)
