"""Which MPS server a process uses, whether a side task may join it, and how it leaves: by a fake control program."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_hooks.shared.device_uuid import write_device_uuid
from ds_hooks.shared.page.file import Page
from squeezer.calibration import mps
from squeezer.calibration.mps import MpsError, server_of, terminate_client
from squeezer.calibration.verdict import QUEUE_DEPTH, VERSION, Verdict
from squeezer.calibration.verdict_store import keep, state_file
from squeezer.config import DeviceTable
from squeezer.device import CannotShareError, CudaDevice, sharing
from squeezer.device.sharing import way_to_share, why_no_turns
from tests.support.fake_mps import FakeMps
from tests.support.fake_nvml import GPU, NUMBER, FakeNvml, nvml_of
from tests.support.sandbox import children

MS = 1_000_000
Run = Callable[..., subprocess.Popen[bytes]]


def why_not(pid: int) -> str:
    with pytest.raises(MpsError) as raised:
        server_of(pid)
    return str(raised.value)


def test_the_server_is_that_of_the_process_and_not_ours(control: FakeMps, run: Run) -> None:
    main = run(control.pipes)
    control.serve(4, main.pid)
    found = server_of(main.pid)
    assert (found.directory, found.pid, found.clients) == (control.pipes, control.server, {4, main.pid})
    assert found.is_visible
    elsewhere = run(control.pipes.parent)
    control.serve(main.pid, elsewhere.pid)
    assert f"no MPS control daemon at {control.pipes.parent}" in why_not(elsewhere.pid)


def test_a_process_without_the_variable_looks_at_the_usual_place(
    control: FakeMps, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "DEFAULT_DIRECTORY", str(control.pipes))
    main = run(None)
    control.serve(main.pid)
    assert server_of(main.pid).directory == control.pipes


def test_who_is_not_a_client_is_told_what_to_do(control: FakeMps, run: Run) -> None:
    said = why_not(run(control.pipes).pid)
    assert "is not a client" in said and f"{mps.PIPE_VARIABLE}={control.pipes}" in said


def test_a_server_of_another_user_is_not_used(control: FakeMps, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    main = run(control.pipes)
    control.serve(main.pid)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert f"another user ({own})" in why_not(main.pid)


@pytest.mark.parametrize(
    ("mood", "says"), [("garbage", "is not a client"), ("fails", "Cannot find MPS control daemon process")]
)
def test_odd_answers_are_no_server(mood: str, says: str, control: FakeMps, run: Run) -> None:
    main = run(control.pipes)
    control.serve(main.pid)
    control.be(mood)
    assert says in why_not(main.pid)


def test_a_control_program_that_hangs_is_left(control: FakeMps, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "LIMIT_S", 0.2)
    control.be("hangs")
    main = run(control.pipes)
    before = children(os.getpid())
    assert "did not answer get_server_list in time" in why_not(main.pid)
    assert children(os.getpid()) == before, "the program is still there"


def test_a_missing_control_program_is_said(control: FakeMps, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    main = run(control.pipes)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "nvidia-cuda-mps-control cannot be run: No such file" in why_not(main.pid)


def test_servers_whose_numbers_mean_others_here_do_not_tell_clients_apart(control: FakeMps, run: Run) -> None:
    main = run(control.pipes)
    (control.pipes / "servers").write_text("1\n")
    (control.pipes / "clients.1").write_text(f"{main.pid}\n77\n")
    assert not server_of(main.pid).is_visible
    (control.pipes / "clients.1").write_text("")
    assert "is not a client" in why_not(main.pid), "it has no clients at all"


# Whether to share


@pytest.mark.parametrize(
    ("configured", "is_client", "in_turns", "way"),
    [
        ("auto", True, False, "server"),
        ("auto", True, True, "server"),
        ("auto", False, True, "turns"),
        ("auto", False, False, "is not a client"),
        (True, True, False, "server"),
        (True, False, True, "is not a client"),
        (False, True, True, "turns"),
        (False, True, False, "mps is false"),
    ],
)
def test_a_side_task_joins_the_main_jobs_server_or_takes_sound_turns_or_does_not_run(
    configured: Any, is_client: bool, in_turns: bool, way: str, control: FakeMps, run: Run
) -> None:
    main = run(control.pipes)
    control.serve(*([main.pid] if is_client else []))
    if way in ("server", "turns"):
        found = way_to_share(configured, main.pid, "" if in_turns else "turns were not measured")
        assert (None if found is None else found.pid) == (control.server if way == "server" else None)
    else:
        with pytest.raises(CannotShareError, match=f"{way}.*squeezer doctor --fix-mps"):
            way_to_share(configured, main.pid, "" if in_turns else "turns were not measured")
    assert control.lines("asked") == [] or configured is not False, "nobody is asked in vain"


def test_who_does_not_answer_may_answer_later_and_nobody_takes_turns_meanwhile(
    control: FakeMps, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "LIMIT_S", 0.2)
    main = run(control.pipes)
    control.serve(main.pid)
    control.be("hangs")
    with pytest.raises(CannotShareError) as raised:
        way_to_share("auto", main.pid, "")
    assert raised.value.may_pass
    control.be("fails")
    with pytest.raises(CannotShareError) as raised:
        way_to_share("auto", main.pid, "turns were not measured")
    assert not raised.value.may_pass


def test_where_it_cannot_be_known_the_users_word_counts(control: FakeMps, run: Run) -> None:
    main = run(control.pipes)
    (control.pipes / "servers").write_text("1\n")
    (control.pipes / "clients.1").write_text("77\n")
    with pytest.raises(CannotShareError, match=r"another namespace.*mps = true"):
        way_to_share("auto", main.pid, "turns were not measured")
    found = way_to_share(True, main.pid, "turns were not measured")
    assert found is not None and found.directory == control.pipes
    assert not terminate_client(found, 77, lambda: None), "77 may be anybody here"


@pytest.fixture
def device(page: Page) -> CudaDevice:
    write_device_uuid(page.words, NUMBER)
    return CudaDevice(page.words, DeviceTable(), 0, {}, nvml_of(FakeNvml()))


def measured(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    mps: bool,
    sound: bool,
    margin_ns: int = 0,
    queue_depth: int = QUEUE_DEPTH,
    version: int = VERSION,
) -> None:
    """Keep a verdict of the device `GPU`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(sharing, "driver_version", lambda: "580.1")
    verdict = Verdict(sound, "it was measured so", margin_ns, 0, 4 * MS, {}, 0, queue_depth, "", version)
    keep(GPU, "580.1", verdict, mps=mps, file=state_file({"XDG_STATE_HOME": str(tmp_path)}))


@pytest.mark.parametrize(("sound", "driver"), [(True, "580.1"), (False, "580.1"), (True, "590.0")])
def test_turns_are_sound_where_they_were_measured_so_with_this_driver(
    sound: bool, driver: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "not measured" in why_no_turns(GPU) and str(state_file()) in why_no_turns(GPU)
    measured(monkeypatch, tmp_path, mps=False, sound=sound)
    monkeypatch.setattr(sharing, "driver_version", lambda: driver)
    assert (why_no_turns(GPU) == "") == (sound and driver == "580.1")


@pytest.mark.parametrize("mps_", [None, False])
def test_a_server_is_not_used_on_a_device_that_was_not_measured_with_one(
    mps_: bool | None,
    control: FakeMps,
    run: Run,
    device: CudaDevice,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    main = run(control.pipes)
    control.serve(main.pid)
    if mps_ is not None:
        measured(monkeypatch, tmp_path, mps=mps_, sound=True)
    with pytest.raises(CannotShareError, match=r"not measured with MPS.*doctor --measure") as e:
        device.prepare(main.pid)
    assert str(state_file()) in str(e.value) and not e.value.may_pass
    assert device.least_margin_ns() == 0


def test_a_server_is_not_used_on_a_device_where_that_was_measured_to_delay_the_main_job(
    control: FakeMps, run: Run, device: CudaDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main = run(control.pipes)
    control.serve(main.pid)
    measured(monkeypatch, tmp_path, mps=True, sound=True, margin_ns=500_000)
    device.prepare(main.pid)
    assert device.least_margin_ns() == 500_000
    assert device.least_bubble_ns() == 8_500_000
    measured(monkeypatch, tmp_path, mps=True, sound=False, margin_ns=500_000)
    with pytest.raises(CannotShareError, match="only observed: it was measured so"):
        device.prepare(main.pid)
    assert device.least_margin_ns() == device.least_bubble_ns() == 0


@pytest.mark.parametrize("sound", [True, False])
def test_what_an_earlier_version_measured_bars_as_before_and_allows_no_turns(
    sound: bool,
    control: FakeMps,
    run: Run,
    device: CudaDevice,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    main = run(control.pipes)
    for mps_ in (True, False):
        measured(monkeypatch, tmp_path, mps=mps_, sound=sound, margin_ns=500_000, version=1)
    again = r"earlier version.*`squeezer doctor --measure` again" if sound else "it was measured so"
    with pytest.raises(CannotShareError, match=again):
        device.prepare(main.pid)
    control.serve(main.pid)
    if sound:
        device.prepare(main.pid)
        assert "earlier version" in caplog.text and device.least_margin_ns() == 500_000
    else:
        with pytest.raises(CannotShareError, match="only observed: it was measured so"):
            device.prepare(main.pid)


def test_the_side_task_queues_as_much_as_was_measured_for_the_way_in_which_it_shares_the_device(
    control: FakeMps, run: Run, device: CudaDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main = run(control.pipes)
    assert "--queue-depth" not in device.arguments()
    measured(monkeypatch, tmp_path, mps=True, sound=True, queue_depth=1)
    measured(monkeypatch, tmp_path, mps=False, sound=True, queue_depth=2)
    assert device.arguments()[-2:] == ["--queue-depth", "2"]
    control.serve(main.pid)
    device.prepare(main.pid)
    assert device.arguments()[-2:] == ["--queue-depth", "1"]
