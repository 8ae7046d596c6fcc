"""A side task that is the client of an MPS server: its environment, which jobs it may follow, and how it is ended."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ds_hooks.shared.device_uuid import write_device_uuid
from ds_hooks.shared.page.file import Page
from ds_hooks.shared.page.layout import DeviceGate, Field
from squeezer.calibration import mps
from squeezer.calibration.mps import server_of, terminate_client
from squeezer.calibration.verdict import VERSION, Verdict
from squeezer.config import DeviceTable
from squeezer.device import CannotShareError, CudaDevice, SideProcess, sharing
from tests.support.fake_mps import FakeMps
from tests.support.fake_nvml import GPU, NUMBER, FakeNvml, nvml_of
from tests.support.sandbox import is_alive, wait_for

Run = Callable[..., subprocess.Popen[bytes]]
CAP = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
SOUND = Verdict(True, "", 0, 0, 0, {}, version=VERSION)


@pytest.fixture(autouse=True)
def it_was_measured_with_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "verdict_of", lambda uuid, *, mps: SOUND if mps else None)


@pytest.mark.parametrize(
    ("share", "own", "cap"),
    [
        (0.25, "", "0=20000M"),
        (0.5, "", "0=40000M"),
        (0.25, "0=1G,1=2G,2=3G", "0=2048M"),  # this rank's device is the second
        (0.25, "1=64G", "0=20000M"),
        (0.25, "0=1G", "0=20000M"),
        (0.25, f"{GPU}=1G", "0=1024M"),
    ],
)
def test_the_driver_keeps_a_client_from_the_main_jobs_memory(
    share: float, own: str, cap: str, control: FakeMps, run: Run, page: Page
) -> None:
    main = run(control.pipes)
    control.serve(main.pid)
    write_device_uuid(page.words, NUMBER)
    rank = {"CUDA_VISIBLE_DEVICES": f"GPU-0,{GPU}", CAP: own}
    device = CudaDevice(page.words, DeviceTable(memory_fraction=share), 1, rank, nvml_of(FakeNvml()))
    assert CAP not in device.environment(1), "no server would know it"
    device.prepare(main.pid)
    page.words[Field.SIDE_LIMIT_BYTES] = 1  # as where the one before has not given its memory back yet
    assert device.environment(1)[CAP] == cap


def test_without_meters_a_client_has_the_users_own_limit_or_none(control: FakeMps, run: Run, page: Page) -> None:
    main = run(control.pipes)
    control.serve(main.pid)
    fake = FakeNvml()
    fake.refuses = {"nvmlInit": "LibraryNotFound"}
    own: dict[str, str] = {CAP: "0=1G"}
    for rank in ({}, own):
        device = CudaDevice(page.words, DeviceTable(), 0, rank, nvml_of(fake))
        device.prepare(main.pid)
        assert device.environment(1).get(CAP) == ("0=1024M" if rank else None)


def test_the_side_task_gets_the_main_jobs_server_at_a_low_priority(control: FakeMps, run: Run, page: Page) -> None:
    main = run(control.pipes)
    control.serve(main.pid)
    device = CudaDevice(page.words, DeviceTable(mps_thread_percent=30), 0, {})
    assert device.environment(1)[mps.PIPE_VARIABLE] == "/dev/null" and not device.recovers
    device.prepare(main.pid)
    named = device.environment(1)
    assert named[mps.PIPE_VARIABLE] == str(control.pipes)
    assert (named["CUDA_MPS_CLIENT_PRIORITY"], named["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) == ("1", "30")
    assert device.recovers


def test_turns_go_by_no_server(control: FakeMps, run: Run, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(page.words, DeviceTable(), 0, {})
    with pytest.raises(CannotShareError):
        device.prepare(run(control.pipes).pid)
    monkeypatch.setattr(sharing, "why_no_turns", lambda _: "")
    device.prepare(run(control.pipes).pid)
    assert device.environment(1)[mps.PIPE_VARIABLE] == "/dev/null"


@contextmanager
def known_as(process: subprocess.Popen[bytes]) -> Iterator[SideProcess]:
    pidfd = os.pidfd_open(process.pid)
    yield SideProcess(pid=process.pid, pidfd=pidfd)
    os.close(pidfd)


def test_a_client_cannot_follow_to_a_job_without_its_server(control: FakeMps, run: Run, page: Page) -> None:
    main, other = run(control.pipes), run("/nowhere")
    control.serve(main.pid)
    device = CudaDevice(page.words, DeviceTable(), 0, {})
    device.prepare(main.pid)
    with known_as(run(control.pipes)) as side:
        control.serve(main.pid, side.pid)
        assert device.join(main.pid, side)
        assert not device.join(other.pid, side)
        assert device.join(other.pid, None), "there is none yet"


def test_a_client_does_not_stay_for_a_job_of_the_server_that_followed(control: FakeMps, run: Run, page: Page) -> None:
    main, side = run(control.pipes), run(control.pipes)
    control.serve(main.pid, side.pid)
    device = CudaDevice(page.words, DeviceTable(), 0, {})
    device.prepare(main.pid)
    with subprocess.Popen([control.pipes.parent / "nvidia-cuda-mps-server"], stdin=subprocess.PIPE) as second:
        other = run(control.pipes)
        (control.pipes / "servers").write_text(f"{second.pid}\n")
        (control.pipes / f"clients.{second.pid}").write_text(f"{other.pid}\n")
        (control.pipes / f"clients.{control.server}").unlink()
        with known_as(side) as known:
            assert not device.join(other.pid, known)
            device.end(known, 0.05, beside_main=True)
        assert side.wait() == -signal.SIGKILL and control.lines("terminated") == [], "the new one does not know it"
        device.prepare(other.pid)
        assert device.join(other.pid, None) and device.recovers


def test_who_takes_turns_does_not_stay_beside_a_job_whose_server_it_could_use(
    control: FakeMps, run: Run, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "why_no_turns", lambda _: "")
    main, other = run("/nowhere"), run(control.pipes)
    control.serve(other.pid)
    ways: list[tuple[Any, bool]] = [("auto", False), (False, True)]
    for configured, follows in ways:
        device = CudaDevice(page.words, DeviceTable(mps=configured), 0, {})
        device.prepare(main.pid)
        with known_as(run("/nowhere")) as side:
            assert device.join(main.pid, side)
            assert device.join(other.pid, side) is follows


def ended_under_mps(control: FakeMps, run: Run, page: Page, is_client: bool = True) -> int:
    """How a side task that does not end by itself is ended."""
    main, process = run(control.pipes), run(control.pipes)
    control.serve(main.pid, *([process.pid] if is_client else []))
    device = CudaDevice(page.words, DeviceTable(), 0, {})
    device.prepare(main.pid)
    with known_as(process) as side:
        device.end(side, 0.05, beside_main=False)
    assert page.words[Field.DEVICE_GATE] == DeviceGate.CLOSED
    return process.wait()


def test_a_client_is_dropped_by_its_server_before_it_is_killed(control: FakeMps, run: Run, page: Page) -> None:
    assert ended_under_mps(control, run, page) == -signal.SIGKILL
    assert len(control.lines("terminated")) == 1, "the fake notes living clients only"


def test_the_gate_is_forced_again_and_again_until_it_has_ended(run: Run, page: Page) -> None:
    """The main job's device shuts it at each bubble's end, and its stream may wait."""
    words, process = page.words, run(None)
    device = CudaDevice(words, DeviceTable(), 0, {})
    times = []

    def play() -> None:
        for _ in range(3):
            wait_for(lambda: words[Field.DEVICE_GATE] == DeviceGate.FORCED or not is_alive(process.pid), "the force")
            times.append(words[Field.DEVICE_GATE] == words[Field.PERMIT_LEFT] == DeviceGate.FORCED)
            words[Field.DEVICE_GATE] = words[Field.PERMIT_LEFT] = DeviceGate.CLOSED
        process.kill()

    main = threading.Thread(target=play, daemon=True)
    main.start()
    with known_as(process) as side:
        device.end(side, 5.0, beside_main=False)
    main.join()
    assert times == [True] * 3 and words[Field.DEVICE_GATE] == DeviceGate.CLOSED


def test_who_holds_nothing_of_the_device_is_killed_at_once(control: FakeMps, run: Run, page: Page) -> None:
    assert ended_under_mps(control, run, page, is_client=False) == -signal.SIGKILL
    assert not any("terminate" in line for line in control.lines("asked"))


def test_a_server_that_hangs_delays_the_kill_but_not_for_ever(
    control: FakeMps, run: Run, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.be("hangs at terminate_client")
    monkeypatch.setattr(mps, "LIMIT_S", 0.5)
    assert ended_under_mps(control, run, page) == -signal.SIGKILL
    assert control.lines("terminated") == []
    assert any("terminate_client" in line for line in control.lines("asked"))


def test_the_gate_can_be_held_open_while_the_server_is_slow(
    control: FakeMps, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = run(control.pipes)
    control.serve(main.pid)
    server = server_of(main.pid)
    control.be("hangs at terminate_client")
    monkeypatch.setattr(mps, "LIMIT_S", 0.5)
    held: list[bool] = []
    assert not terminate_client(server, main.pid, lambda: held.append(True))
    assert len(held) > 2
    control.be("")
    assert terminate_client(server, main.pid, lambda: None)
    assert not terminate_client(server, main.pid, lambda: None), "it is no client any more"
