"""The side task's main program: trains the fused trials of a study whenever the gate is open.

Without a page there is no main job: it is an *exclusive* worker, whose gate is always open.
"""

import argparse
import atexit
import contextlib
import gc
import json
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from ds_hooks.shared import logs, statuses
from ds_hooks.shared.page.file import Page, PageError
from ds_hooks.shared.page.layout import Field, Role, SideActivity
from ds_hooks.shared.processes.endings import USER_ERROR_STATUS
from ds_hooks.shared.processes.parent import die_with_parent
from ds_hooks.shared.processes.signals import END_SIGNAL, ignore_signals_to_others
from ds_hooks.shared.secrets import STORAGE_VARIABLE
from ds_hooks.shared.study_paths import trials_directory
from ds_hooks.shared.study_queue import Submissions
from ds_hooks.shared.user_paths import absolute_storage
from trials.gate.base import ExclusiveGate, Gate, GateError, StopRequested, block_signals
from trials.gate.cuda_queue import IN_FLIGHT
from trials.gate.process import (
    PRIORITIES,
    die_first_when_memory_is_short,
    enter_group,
    keep_forks,
    limit_memory,
)
from trials.gate.unit_records import UnitRecords
from trials.late_compiler import load_compiler_late
from trials.own_logger import own_logger
from trials.search.client import SearchClient, SearchError
from trials.side_task.turn import Turn, TurnOver, give_up, wait_for_turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from trials.search.config import WorkerConfig
    from trials.side_task.devices import SideDevice
    from trials.side_task.scheduler import Scheduler
    from trials.study import Study

log = own_logger("trials.side_task.main")  # as a program its name is __main__


def _absolute(text: str) -> Path:
    """A path on the command line. The study may change the working directory."""
    return Path(text).absolute()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trials.side_task.main")
    parser.add_argument("--study", type=_absolute, metavar="FILE")
    parser.add_argument("--study-name", default="study")
    parser.add_argument("--queue", type=_absolute, metavar="STUDIES", help="take turns at the studies submitted there")
    parser.add_argument("--turn", type=float, metavar="SECONDS", help="with --queue: how long one takes")
    parser.add_argument("--given-up", metavar="NAME", help="with --queue: a study that has failed")
    parser.add_argument("--worker", default="")
    parser.add_argument("--directory", type=_absolute, help="the study's, for claims and checkpoints")
    parser.add_argument("--page", type=_absolute, help="default: there is no main job")
    parser.add_argument("--units", type=_absolute)
    parser.add_argument("--units-bytes", type=int, help="when that file is full; default: never")
    parser.add_argument("--rank", type=int, help="named in what is logged")
    parser.add_argument("--log", type=_absolute, metavar="FILE")
    parser.add_argument("--status-fd", type=int, default=-1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the first visible one")
    parser.add_argument("--memory-fraction", type=float, default=1.0, help="of a CUDA device's memory, at most")
    parser.add_argument("--queue-depth", type=int, default=IN_FLIGHT, help="units that a CUDA device has at most")
    parser.add_argument("--memory-mb", type=float, help="of the host's memory, at most; default: no limit")
    parser.add_argument("--search-group", type=_absolute, help="`cgroup.procs` of the search worker's control group")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--priority", choices=list(PRIORITIES), help="once it is ready; default: stays as it is")
    parser.add_argument("--measure", type=float, metavar="SECONDS", help="print the ungated rate, and leave")
    parser.add_argument("--trials", type=int, default=1, help="with --measure: how many are fused")
    return parser.parse_args()


def main() -> int:
    """Train until the study is done or the daemon asks to stop."""
    arguments = _parse()
    logs.set_up(rank=arguments.rank)
    load_compiler_late()
    _search_here()
    _stand_back(arguments.memory_mb)
    report = partial(_send, arguments.status_fd)
    status = _work(arguments, report)
    report(statuses.Left())
    return status


def _work(arguments: argparse.Namespace, report: "Callable[[statuses.Status], None]") -> int:
    turn = None
    if arguments.queue is not None:
        turn = _take_turn(arguments, report)
        if turn is None:
            return 0
    gc.disable()  # what is imported is no garbage
    import torch

    torch.set_num_threads(arguments.threads)
    from trials.side_task.devices import NoRoomError, make_side_device
    from trials.study import load_study
    from trials.training.rehearsal import measure_dedicated

    storage = absolute_storage(os.environ.pop(STORAGE_VARIABLE, ""))  # the study's own processes need not know it
    gc.freeze()  # a collection in a bubble looks at what came since then
    gc.enable()
    try:
        study = load_study(arguments.study)
        if arguments.measure is None:
            status = _serve(study, storage, arguments, report, turn)
            if turn is not None and turn.is_done and status == 0:
                turn.end("done")
            return status
        make_side_device(arguments.device, arguments.memory_fraction).adopt(study)
        print(json.dumps(measure_dedicated(study, min(arguments.trials, study.trials), arguments.measure)))
        return 0
    except (Exception, SearchError) as error:
        if isinstance(error, SearchError) and error.may_pass:
            return 0 if turn is not None else error.status or 1
        mistake = _mistake(error, arguments.memory_mb)
        if mistake is None:
            raise
        if isinstance(error, NoRoomError) and turn is not None and turn.may_go_on_elsewhere(mistake):
            report(statuses.Error(mistake))
            return 0
    report(statuses.Error(mistake))
    if turn is None:
        return USER_ERROR_STATUS
    turn.end(f"failed: {mistake}")
    return 0


def _take_turn(arguments: argparse.Namespace, report: "Callable[[statuses.Status], None]") -> Turn | None:
    """Wait for a submitted study, which `arguments` then name; None: the daemon asks for the end."""
    submissions = Submissions(arguments.queue)
    if arguments.given_up is not None:
        give_up(submissions, arguments.given_up, arguments.worker)
    turn = wait_for_turn(submissions, arguments.worker, arguments.turn)
    if turn is not None:
        name = turn.submission.name
        arguments.study, arguments.study_name = turn.submission.study, name
        arguments.directory = trials_directory(arguments.queue, name)
        report(statuses.Serving(str(arguments.study), name))
    return turn


def _mistake(error: BaseException, memory_mb: float | None) -> str | None:
    """What the user can mend, in words; None: it is no mistake of theirs."""
    from trials.fusion.errors import is_out_of_memory
    from trials.side_task.devices import SideDeviceError
    from trials.study_error import StudyError

    if isinstance(error, (StudyError, SideDeviceError)) or _is_refused(error):
        return str(error)
    if memory_mb is not None and is_out_of_memory(error):
        return f"side.memory_mb = {memory_mb:g} is too little for this study: {error}"
    return None


def _is_refused(error: BaseException) -> bool:
    """Whether the search worker has refused the study."""
    return isinstance(error, SearchError) and error.status == USER_ERROR_STATUS


def _search_here() -> None:
    """Let the study import what is in the working directory. It was not searched before: names there may be ours."""
    if sys.flags.safe_path and not os.environ.get("PYTHONSAFEPATH"):
        with contextlib.suppress(FileNotFoundError):
            sys.path.insert(0, os.getcwd())


def _stand_back(memory_mb: float | None) -> None:
    """End before the main job where something must, and heed no signal but the daemon's."""
    die_with_parent()
    die_first_when_memory_is_short()
    if memory_mb is not None:
        limit_memory(int(memory_mb * 2**20))
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach all processes of a terminal; the daemon ends this one
        signal.signal(number, signal.SIG_IGN)
    ignore_signals_to_others()
    block_signals()


def _send(status_fd: int, status: statuses.Status) -> None:
    """Send one status to the daemon, if there is one."""
    if status_fd < 0:
        return
    line = statuses.encode(status)
    while line:  # being stopped can cut a long write short
        line = line[os.write(status_fd, line) :]


def _serve(
    study: "Study",
    storage: str,
    arguments: argparse.Namespace,
    report: "Callable[[statuses.Status], None]",
    turn: Turn | None,
) -> int:
    from trials.search.worker import WorkerConfig
    from trials.side_task.devices import SideDeviceError, make_side_device

    worker_config = WorkerConfig(
        storage=storage,
        study_name=arguments.study_name,
        worker=arguments.worker,
        directory=arguments.directory,
        exclusive_rows=0 if arguments.page is not None else study.rows,
    )
    place: Path | ExclusiveGate = arguments.page or ExclusiveGate()
    served = _search_worker(study, worker_config, place)
    # forked before the page is opened, so that only this process holds its locks, and before there is a CUDA context
    search = SearchClient(_in_group(arguments.search_group, served))
    if arguments.log is not None:  # this process's own, as one may turn it over
        logs.add_file(arguments.log, rank=arguments.rank or 0, run=arguments.log.parent.name)
    page = None if arguments.page is None else _claimed(arguments.page, search)
    if page is not None and turn is not None:
        turn.busy_s = partial(_busy_s, page, page.words[Field.BUSY_NS])
    gate: Gate | None = None
    scheduler: Scheduler | None = None
    has_finished = False
    try:
        device = make_side_device(arguments.device, arguments.memory_fraction, arguments.queue_depth)
        device.adopt(study)
        if page is None:
            assert isinstance(place, ExclusiveGate)
            gate = place
        else:
            records = UnitRecords(arguments.units, arguments.units_bytes)
            gate = device.gate(page, records, partial(_report_overrun, report))
        with contextlib.nullcontext() if turn is None else turn.noted():
            scheduler = _ready(study, device, page, gate, search, report, arguments, turn)
            _train(scheduler)
        has_finished = True
    except StopRequested:
        log.debug("the side task is asked to end")
    except TurnOver:
        log.debug("study %s waits for its next turn", arguments.study_name)
        has_finished = True
    except (Exception, GateError, SearchError) as error:
        reason = str(error) if isinstance(error, SearchError) else f"{type(error).__name__}: {error}"
        if not (isinstance(error, SideDeviceError) or _is_refused(error)):  # else `main` reports it
            report(statuses.Error(reason))
        log.debug("the side task ends", exc_info=True)  # the file keeps the traceback
        raise
    finally:
        may_unmap = gate is not None and gate.close()
        # the scores of a finished study must reach Optuna, however long the search worker takes
        closed = search.close(
            is_urgent=lambda: not has_finished or END_SIGNAL in signal.sigpending(), beside_main=page is not None
        )
        if page is not None and may_unmap:  # else the device may still use the page, which then ends with this process
            page.words[Field.SIDE_ACTIVITY] = SideActivity.HOST  # what the study has left to its end asks no gate
            page.close()
    return _ended(scheduler, search, report, is_closed=closed)


def _ended(
    scheduler: "Scheduler | None",
    search: SearchClient,
    report: "Callable[[statuses.Status], None]",
    *,
    is_closed: bool,
) -> int:
    """Report what the search worker has recorded at its end. Returns the exit status."""
    if scheduler is not None:
        scheduler.hear_out(search.last_answers)
    if not is_closed:
        report(statuses.Error("its search worker could not record all results in time"))
    return 0 if is_closed else 1


def _in_group(group: Path | None, serve: "Callable[[TextIO, TextIO], int]") -> "Callable[[TextIO, TextIO], int]":
    def served(requests: TextIO, answers: TextIO) -> int:
        enter_group(group)
        return serve(requests, answers)

    return served


def _ready(
    study: "Study",
    device: "SideDevice",
    page: Page | None,
    gate: Gate,
    search: SearchClient,
    report: "Callable[[statuses.Status], None]",
    arguments: argparse.Namespace,
    turn: Turn | None,
) -> "Scheduler":
    from trials.side_task.devices import NoRoomError
    from trials.side_task.kept_choices import KeptChoices
    from trials.side_task.scheduler import Scheduler

    def give_way() -> None:
        if arguments.priority is not None:
            PRIORITIES[arguments.priority]()

    if page is not None and page.words[Field.MAIN_PID]:  # if a main job comes later, the daemon sees to it
        give_way()
    known = None if arguments.directory is None else KeptChoices(arguments.directory)
    most = device.rehearse(study, page, gate, known)
    if not most.trials:
        raise NoRoomError("not even one trial fits into the side task's share of the device's memory")
    give_way()
    offload = None if page is None else device.offload(page, gate, report)
    return Scheduler(study, gate, search, report, most, offload, arguments.directory, turn)


def _train(scheduler: "Scheduler") -> None:
    try:
        scheduler.run()
    except SystemExit as error:  # else it would look as if all trials had ended
        raise RuntimeError("the study has called sys.exit") from error


def _claimed(path: Path, search: SearchClient) -> Page:
    """Open the page as its side task."""
    page = Page.open(path, create=False)
    page.claim(Role.SIDE)
    page.words[Field.SIDE_ACTIVITY] = SideActivity.HOST
    page.words[Field.SEARCH_PROCESS] = search.pid
    keep_forks(page.words)
    return page


def _busy_s(page: Page, before_ns: int) -> float:
    return (page.words[Field.BUSY_NS] - before_ns) / 1e9


def _report_overrun(report: "Callable[[statuses.Status], None]", slot: int, overrun_ns: int) -> None:
    report(statuses.Overran(slot, overrun_ns))


def _search_worker(
    study: "Study", config: "WorkerConfig", place: Path | ExclusiveGate
) -> "Callable[[TextIO, TextIO], int]":
    """It looks by itself whether a main job has come and anything is trained: at the page, or at a gate of its own."""
    from trials.search.worker_process import serve

    if isinstance(place, ExclusiveGate):
        return partial(serve, study, config, attached=lambda: False, busy=place.entered)
    busy_ns = partial(_word, place, Field.BUSY_NS)
    return partial(serve, study, config, attached=lambda: _word(place, Field.MAIN_PID) != 0, busy=busy_ns)


def _word(path: Path, field: int) -> int:
    """A word of the page, which is not kept open; 0: it is gone."""
    try:
        page = Page.open(path, create=False)
    except PageError:
        return 0
    word = int(page.words[field])
    page.close()
    return word


def _leave(status: int) -> NoReturn:
    """End now, with all that a program does at its end but to free its objects one by one.

    That takes a second of CPU time, in a main job's bubbles so several seconds, before another study has the device. A
    CUDA context is destroyed in the usual way.
    """
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter: it waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    _leave(main())
