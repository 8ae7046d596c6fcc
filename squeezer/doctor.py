"""`squeezer doctor`: what this machine supports, which fallbacks it needs, and why."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path

from ds_hooks.shared.cuda_driver import CudaDriver, DeviceWords, Driver, DriverError
from ds_hooks.shared.page.file import DIRECTORY_VARIABLE, Page, PageError, make_private_dir, page_path, runtime_dir
from ds_hooks.shared.page.layout import Field
from squeezer.calibration.measure import MeasureError, measure
from squeezer.calibration.mps import MpsError, Server, directory_of, has_control, servers_at
from squeezer.calibration.verdict_store import driver_version, kept, state_file
from squeezer.daemon.side_processes.control_group import make_side_group
from squeezer.daemon.side_processes.parent_group import NoGroupError, cpu_group
from squeezer.device.cuda import shut_to_others, visible_device
from squeezer.device.nvml import MIG, Meters, Nvml

MEMORY_BACKED = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_ANY_BYTES = 1 << 50
_SERVER = "nvidia-cuda-mps"  # as far as the kernel keeps the name of `nvidia-cuda-mps-server`
PACKAGES = ("deepspeed", "torch", "optuna", "pyzmq")


class Level(Enum):
    """What a finding means for the user."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    level: Level
    what: str
    text: str


def main_doctor(device: int) -> int:
    """Print all findings. Returns 1 if one of them keeps squeezing from working, else 0."""
    findings = list(examine(device, os.environ))
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.level.value:<8}{finding.what:<{width + 2}}{finding.text}")
    return int(any(finding.level is Level.PROBLEM for finding in findings))


def main_measure(environment: Mapping[str, str], device: int, nvml: Nvml | None = None) -> int:
    """Measure what a CUDA device allows that nobody else uses, and keep it.

    Args:
        environment: which device it is, and whether its processes share it by MPS.
        device: CUDA's number of it.
        nvml: NVIDIA's management library.

    Returns:
        The exit status: 1 if it was not measured.
    """
    nvml = Nvml() if nvml is None else nvml
    seen = visible_device(environment, device)
    pipes = directory_of(environment)
    has_server = has_control(pipes)
    try:
        servers = servers_at(pipes) if has_server else []
        own = {server.pid for server in servers}
        meters = nvml.open(seen)
        neighbours = None if meters is None else meters.neighbours()
        if neighbours is None:
            raise MeasureError("NVML cannot say whether others use the device")
        others = sorted(each.pid for each in neighbours if each.pid not in own)
        if others:
            raise MeasureError(f"others use the device: {', '.join(map(str, others))}")
        clients = sorted(pid for server in servers for pid in server.clients)  # in a container NVML may not see them
        if clients:
            raise MeasureError(f"others use the MPS server, maybe on this device: {', '.join(map(str, clients))}")
        named = seen if meters is None else meters.uuid() or seen  # CUDA may number devices in another order
        for line in measure(mps=has_server, environment={**environment, "CUDA_VISIBLE_DEVICES": named}):
            print(line)
    except (MeasureError, MpsError) as error:
        print(f"no verdict is kept: {error}")
        return 1
    return 0


def examine(
    device: int,
    environment: Mapping[str, str],
    driver_of: Callable[[int], Driver] = CudaDriver,
    nvml: Nvml | None = None,
) -> Iterator[Finding]:
    """Look at everything that the parts of this project will rely on.

    Args:
        device: CUDA's number of the device to probe; a context on it takes about half a GiB meanwhile.
        environment: the variables that a job would see.
        driver_of: makes the driver of a device.
        nvml: NVIDIA's management library.
    """
    for package in PACKAGES:
        yield _package(package)
    yield _signals()
    yield _group()
    if cpu_group() != "/":
        text = f"shared by control groups; here: {cpu_group()}. A standing daemon must be started in its job's group"
        yield Finding(Level.NOTE, "CPU time", text)
    directory = runtime_dir()
    was_there = directory.exists()
    yield _directory(directory)
    yield from _device(device, environment, driver_of, Nvml() if nvml is None else nvml)
    if not was_there:
        with suppress(OSError):  # it could not be made, or a job has come meanwhile
            directory.rmdir()


def _device(
    device: int, environment: Mapping[str, str], driver_of: Callable[[int], Driver], nvml: Nvml
) -> Iterator[Finding]:
    metered = list(_metered(device, environment, nvml))  # before this process is on the device itself
    try:
        driver = driver_of(device)
    except DriverError as error:
        if metered:
            yield Finding(Level.PROBLEM, "device", f"cuda:{device}, but this process cannot use it: {error}")
            yield from metered
            return
        yield Finding(Level.OK, "device", f"cpu: bubbles are timed by the host's clock ({error})")
        return
    yield Finding(Level.OK, "device", f"cuda:{device}")
    yield from metered or [_no_meters(nvml)]
    yield _words(driver)
    yield _mps(environment)
    yield from _verdict(device, environment, nvml)
    yield from _variables(environment)


def _verdict(device: int, environment: Mapping[str, str], nvml: Nvml) -> Iterator[Finding]:
    """What was measured of the device, in the way in which a job from here would share it; nothing if it has no name.

    Without a server, whoever has not measured it is told about MPS.
    """
    meters = nvml.open(visible_device(environment, device))
    uuid = None if meters is None else meters.uuid()
    has_server = has_control(directory_of(environment))
    if uuid is None:
        return
    verdict, what = kept(uuid, driver_version(), mps=has_server, file=state_file(environment)), "measured"
    way = "with MPS" if has_server else "without MPS"
    if verdict is not None:
        level = Level.OK if verdict.sound else Level.NOTE
        yield Finding(level, what, f"{way}: {'sound' if verdict.sound else 'observe only'}, {verdict.reason}")
    elif has_server:
        yield Finding(
            Level.NOTE,
            what,
            f"not yet {way} and this driver, so the bubbles of a job started here would only be observed. What to do, "
            "while no job runs: squeezer doctor --measure",
        )


def _metered(device: int, environment: Mapping[str, str], nvml: Nvml) -> Iterator[Finding]:
    """What the driver's own library says of the device; nothing where there is none.

    A bare number is NVML's, by PCI bus, which is CUDA's where all devices are of one model.
    """
    meters = nvml.open(visible_device(environment, device))
    if meters is None:
        return
    uuid = meters.uuid() or "of unknown UUID"
    driver = nvml.driver_version() or "of unknown version"
    yield Finding(Level.OK, "device meters", f"{meters.name() or 'a device'}, {uuid}, driver {driver}")
    yield from _sharing(meters, uuid, has_server=has_control(directory_of(environment)))
    memory = meters.memory()
    if memory is not None:
        yield Finding(Level.OK, "device memory", f"{memory[1] >> 20} of {memory[0] >> 20} MiB are free")
    look = meters.look()
    if look.slowed_by:
        yield Finding(Level.NOTE, "clocks", f"kept low by {' and '.join(look.slowed_by)}")
    elif look.sm_mhz is not None:
        yield Finding(Level.OK, "clocks", f"multiprocessors at {look.sm_mhz} MHz now; nothing slows them")


def _sharing(meters: Meters, uuid: str, *, has_server: bool) -> Iterator[Finding]:
    """Whether a second process can use the device, and which do already."""
    mode = meters.compute_mode()
    if mode is not None:
        why = shut_to_others(mode)
        level = Level.OK if not why else Level.NOTE if has_server else Level.PROBLEM
        yield Finding(level, "compute mode", why or f"{mode.name}: several processes may use the device")
    if uuid.startswith(MIG):
        yield Finding(Level.OK, "MIG", "this is an instance; its power and energy are not known apart")
    elif meters.is_split():
        yield Finding(
            Level.NOTE, "MIG", "the device is split: name one instance by its MIG- UUID in CUDA_VISIBLE_DEVICES"
        )
    neighbours = meters.neighbours()
    if neighbours is not None:
        others = [each for each in neighbours if _name(each.pid) != _SERVER]  # which computes for its clients alone
        holds = [f"{each.pid} ({'unknown' if each.bytes is None else each.bytes >> 20} MiB)" for each in others]
        text = f"{', '.join(holds)}: they affect whatever is measured now" if holds else "none"
        yield Finding(Level.NOTE if holds else Level.OK, "other processes", text)


def _no_meters(nvml: Nvml) -> Finding:
    why = nvml.why_not or "NVML does not know this device"
    return Finding(
        Level.NOTE,
        "device meters",
        f"none: {why}. So free memory is read every 10 steps only, by the main job, and power and clocks are unknown",
    )


def _package(name: str) -> Finding:
    try:
        return Finding(Level.OK, name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(Level.PROBLEM, name, "not installed here")


def _signals() -> Finding:
    from ds_hooks.shared.processes.identity import why_no_pidfd

    if (why := why_no_pidfd()) is not None:
        return Finding(Level.PROBLEM, "signals", why)
    return Finding(Level.OK, "signals", "by process descriptor, so that they never hit another process")


def _group() -> Finding:
    what = "control group"
    try:
        group = make_side_group(_ANY_BYTES)
    except NoGroupError as error:
        return Finding(
            Level.NOTE,
            what,
            f"none for side tasks, so what they start may be found 64 s late, and memory_mb limits each process, not "
            f"their sum: {error}",
        )
    parent, limits = group.path.parent, group.limits_memory
    group.close()
    of_memory = "limits the sum of their memory" if limits else "cannot limit the sum of their memory"
    return Finding(Level.OK, what, f"side tasks have one in {parent}, which {of_memory}")


def _directory(directory: Path) -> Finding:
    what = "shared pages"
    try:
        make_private_dir(directory)
    except (PageError, OSError) as error:
        return Finding(Level.PROBLEM, what, str(error))
    kind = _file_system(directory)
    if kind in MEMORY_BACKED:
        return Finding(Level.OK, what, f"{directory} ({kind})")
    return Finding(
        Level.NOTE,
        what,
        f"{directory} is on {kind}: a page there is written to disk now and then, and a CUDA device may refuse it; "
        f"name a memory-backed directory with ${DIRECTORY_VARIABLE}",
    )


def _file_system(path: Path) -> str:
    """The kind of file system that holds `path`."""
    best, kind = -1, "an unknown file system"
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, found, *_ = line.split()
        if path.resolve().is_relative_to(mount) and len(mount) > best:
            best, kind = len(mount), found
    return kind


def _words(driver: Driver) -> Finding:
    """Whether the device can write the words of a page and wait for them."""
    what = "bubble word"
    with tempfile.TemporaryDirectory(prefix="doctor-", dir=runtime_dir()) as directory:
        page = Page.open(page_path(make_private_dir(Path(directory) / "pages"), 0))
        try:
            words = DeviceWords(driver, page.words, probe=Field.PROBE)
        except DriverError as error:
            return Finding(
                Level.NOTE, what, f"a thread of the main job polls events and writes it, a little late: {error}"
            )
        words.release()
        page.close()
    return Finding(Level.OK, what, "the device itself writes it, and side tasks wait for it on the device")


def _mps(environment: Mapping[str, str]) -> Finding:
    """The server that a job from here would use, and who uses it already."""
    directory = directory_of(environment)
    try:
        servers = servers_at(directory)
    except MpsError as error:
        return Finding(
            Level.NOTE,
            "MPS",
            f"{error}: the bubbles of a job started here would only be observed. To start a server: squeezer doctor "
            "--fix-mps",
        )
    about = "; ".join(map(_about, servers)) or "no server yet, since it starts with the first client"
    return Finding(
        Level.NOTE,
        "MPS",
        f"a control daemon at {directory}, {about}. Side tasks use it beside main jobs that do, on devices that were "
        f"measured to allow it. A fatal fault of a side task ends the main job, too",
    )


def _about(server: Server) -> str:
    """A server, its clients, and whether a job of this user would be one."""
    if not server.is_visible:
        return (
            f"server {server.pid} with {len(server.clients)} clients, whose process ids belong to another namespace. "
            f"It cannot be known whether a main job is one, so a side task uses it only with [device] mps = true"
        )
    clients = ", ".join(f"{pid} ({_name(pid)})" for pid in sorted(server.clients)) or "none"
    is_ours = server.owner == os.geteuid()
    would = "would be one" if is_ours else f"would not be one: it belongs to user {server.owner}"
    return f"server {server.pid} with clients: {clients}; a main job started here {would}"


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return "ended"


def _variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    if environment.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield Finding(
            Level.NOTE, "CUDA_LAUNCH_BLOCKING", "1: the host waits for each kernel, so steps are slower than necessary"
        )
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield Finding(
            Level.NOTE,
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1: all streams of a process share one queue, so a stream that waits can hold up others",
        )
