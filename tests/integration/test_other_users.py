"""Another user of the machine, with a real uid, reaches nothing of ours and stops nothing."""

import os
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
import pytest
import zmq
from optuna.study import StudyDirection

from ds_hooks import attach
from ds_hooks.shared import wire
from ds_hooks.shared.page.file import Page, PageError, make_private_dir, page_path, socket_path
from ds_hooks.shared.page.layout import PAGE_MAGIC, Field
from ds_hooks.shared.private_file import OthersError
from tests.support.fused_and_solo import AtOnce
from tests.support.hooked_engine import Engine
from tests.support.sandbox import Child, new_sandbox, wait_for
from tests.support.simulated import Pretended
from tests.support.stranger import STRANGER, as_user, meanwhile, needs_second_user, outcome, without_rights
from trials.best_trials import best_trials
from trials.search.deadline_outlook import verdict_on
from trials.search.storage.claims import read_account
from trials.search.storage.database import connect_to_read
from trials.search.storage.optuna_storage import open_storage
from trials.search.worker import SearchWorker, WorkerConfig

pytestmark = [pytest.mark.integration, needs_second_user]

OTHER = STRANGER - 1
"""A main job's user that is not root, for whom root's rights prove nothing."""


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that all users may enter, but pytest's own are private."""
    path = Path(tempfile.mkdtemp(prefix="bsq-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def tmp(public: Path) -> Path:
    """As /tmp: all users may make names, and none may change another's."""
    path = public / "tmp"
    path.mkdir()
    path.chmod(0o1777)
    return path


def link_once(path: Path) -> None:
    """Give a file a second name that no other try finds taken, and remove it where that is allowed."""
    os.link(path, linked := path.parents[1] / f"linked{time.time_ns()}")
    with suppress(PermissionError):  # in a sticky directory it belongs to the file's owner
        linked.unlink()


def attempts(path: Path) -> dict[str, Callable[[], object]]:
    """What a user can try with another's file, socket or directory."""
    beside = path.with_name("beside")
    found: dict[str, Callable[[], object]] = {
        "read": lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK),
        "write": lambda: os.open(path, os.O_WRONLY | os.O_NONBLOCK),
        "truncate": lambda: os.truncate(path, 0),
        "chmod": lambda: path.chmod(0o777),
        "rename": lambda: path.rename(beside),
        "remove": lambda: path.unlink(),
        "link": lambda: link_once(path),
        "plant beside": lambda: beside.symlink_to("/etc/passwd"),
    }
    if path.is_dir():
        return {
            **{name: found[name] for name in ("chmod", "rename")},
            "list": lambda: os.listdir(path),
            "plant in": lambda: (path / "planted").touch(),
        }
    if path.is_socket():
        stream = socket.socket(socket.AF_UNIX)
        del found["truncate"]
        return {"connect": lambda: stream.connect(str(path)), **found}
    return found


def tried_by_a_stranger(paths: list[Path], only: tuple[str, ...] = ()) -> dict[str, str]:
    """What became of all attempts on all of these paths, but those that were refused."""
    tries = {f"{how} {path}": do for path in paths for how, do in attempts(path).items() if how in only or not only}
    assert tries
    outcomes: dict[str, str] = as_user(STRANGER, lambda: {what: outcome(do) for what, do in tries.items()})
    return {what: came for what, came in outcomes.items() if came != "PermissionError"}


def send_a_bye(path: Path) -> bool:
    """Whether a daemon that listens there takes a message of this process within a second."""
    context = zmq.Context()
    sender = context.socket(zmq.PUSH)
    sender.setsockopt(zmq.IMMEDIATE, 1)
    sender.setsockopt(zmq.SNDTIMEO, 1000)
    sender.connect(f"ipc://{path}")
    try:
        sender.send(wire.encode(0, time.monotonic_ns(), wire.Bye(0, 0)))
    except zmq.Again:
        return False
    finally:
        context.destroy(linger=200)
    return True


def at_process(pid: int) -> dict[str, str]:
    """What became of all that a user can try with another's process, but those that were refused."""
    found: dict[str, Callable[[], object]] = {
        f"{name}": (lambda number=number: os.kill(pid, number))
        for name, number in (("look", 0), *((n.name, n) for n in (signal.SIGSTOP, signal.SIGUSR1, signal.SIGKILL)))
    }
    for name in ("environ", "mem", "maps", "fd/0"):
        found[name] = lambda name=name: os.open(f"/proc/{pid}/{name}", os.O_RDONLY)
    found["group"] = lambda: os.killpg(os.getpgid(pid), signal.SIGSTOP)
    found["pidfd"] = lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGSTOP)
    found["affinity"] = lambda: os.sched_setaffinity(pid, {0})
    return {f"{how} {pid}": came for how, do in found.items() if (came := outcome(do)) != "PermissionError"}


def test_what_a_run_keeps_open_and_writes_is_out_of_reach_even_where_all_may_enter(public: Path) -> None:
    files = public / "files"
    files.mkdir()
    with new_sandbox(files) as sandbox, umask(0):  # the carelessness of the user's own shell
        sandbox.run.mkdir(mode=0o755)  # the user's own, too
        hold = files / "hold"
        hold.touch()
        job = sandbox.job()
        daemon = sandbox.daemon_of(job, sandbox.config("tiny.py"), TINY_HOLD=str(hold))
        wait_for(lambda: sandbox.word(Field.WORK), "the side task")
        names = {path.name for path in sandbox.run.iterdir()}
        assert {"rank0.events.jsonl", "rank0.log", "rank0.side.log", "study", "caches"} <= names
        ours = [pid for pid in sandbox.living() if pid != job.pid]
        assert len(ours) == 4, "keeper, daemon, side task, search worker"
        records = [*sandbox.run.rglob("*")]
        shared = [page_path(sandbox.directory, 0), socket_path(sandbox.directory, 0)]
        came = tried_by_a_stranger([sandbox.directory, *shared, sandbox.run, *records])
        assert came == {f"list {sandbox.run}": "done"}, "since the user made it so"
        assert as_user(STRANGER, lambda: {k: v for pid in ours for k, v in at_process(pid).items()}) == {}
        sandbox.directory.chmod(0o777)  # its files hold by themselves
        assert tried_by_a_stranger(shared, ("connect", "read", "write", "truncate", "chmod")) == {}
        assert not as_user(STRANGER, lambda: send_a_bye(shared[1]))
        sandbox.directory.chmod(0o700)
        assert sandbox.events("fault") == []
        hold.unlink()
        wait_for(lambda: sandbox.side("finished"), "the end of the study")
        assert job.finish() == 0
        assert daemon.ended() == 0
        assert sandbox.events("end")[0]["foreign_messages"] == 0
        assert [path for path in sandbox.run.rglob("*") if path.lstat().st_mode & 0o077] == []


def test_the_same_attempts_succeed_on_what_is_open(public: Path) -> None:
    """So that a refusal above says something."""
    place = public / "open"
    place.mkdir()
    place.chmod(0o777)
    (place / "file").touch()
    (place / "file").chmod(0o666)
    context = zmq.Context()
    listener = context.socket(zmq.PULL)
    with umask(0):
        listener.bind(f"ipc://{place}/sock")
    try:
        assert as_user(STRANGER, lambda: send_a_bye(place / "sock"))
        assert listener.recv()
        assert tried_by_a_stranger([place / "sock"], ("connect",)) == {f"connect {place}/sock": "done"}
        for how in ("read", "write", "truncate", "plant beside", "rename"):
            assert tried_by_a_stranger([place / "file"], (how,)) == {f"{how} {place}/file": "done"}
        assert as_user(STRANGER, lambda: outcome(lambda: os.kill(os.getpid(), 0))) == "done"
    finally:
        context.destroy(linger=0)


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "a directory": lambda place, _: place.mkdir(0o700),
    "a directory open to all": lambda place, _: (place.mkdir(), place.chmod(0o777)),
    "a file": lambda place, _: place.touch(),
    "a pipe": lambda place, _: os.mkfifo(place),
    "a link to the victim's": lambda place, victims: place.symlink_to(victims),
    "a link to nothing": lambda place, _: place.symlink_to("/tmp/bsq-none/none"),
    "the directory above": lambda place, _: (place.parent.mkdir(), place.parent.chmod(0o777)),
    "a link above": lambda place, victims: place.parent.symlink_to(victims),
}


def planted(what: str, tmp: Path, victim: int = 0) -> tuple[Path, Path]:
    """(the victim's place, on which the stranger has laid `what`; a private directory of the victim's)."""
    victims = tmp.parent / "victims"
    victims.mkdir(mode=0o700)
    os.chown(victims, victim, victim)
    place = tmp / "above" / "place" if what.endswith("above") else tmp / "place"
    as_user(STRANGER, lambda: PLANTED[what](place, victims) and None)
    return place, victims


def trains_without_hooks(tmp: Path, place: Path | None = None) -> bool:
    """Whether a main job of user `OTHER` trains, and whether its hooks are off."""

    def train() -> list[Any]:
        engine = Engine(tmp / "engines")  # it looks whether its bubbles are open
        handle = attach(engine, directory=place, local_rank=0)
        return [handle.enabled, engine.train_batch()]

    return bool(as_user(OTHER, train) == [False, 0.5])


@pytest.mark.parametrize("what", PLANTED)
def test_what_another_user_lays_in_the_way_of_the_runtime_directory_stops_and_gets_nothing(
    what: str, tmp: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place, victims = planted(what, tmp, OTHER)

    assert trains_without_hooks(tmp, place)
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "training continues without squeezing" in said
    assert [*victims.iterdir()] == []
    if not what.startswith("a link"):
        assert as_user(STRANGER, lambda: [str(path) for path in tmp.rglob("*") if path.is_file()]) in ([], [str(place)])


@pytest.mark.parametrize("what", ["a directory", "a link to the victim's", "the directory above"])
def test_a_rank_trains_and_a_daemon_refuses_in_words_where_another_user_was_first(
    what: str, tmp: Path, tmp_path: Path
) -> None:
    place, victims = planted(what, tmp)
    with new_sandbox(tmp_path) as sandbox:
        config = sandbox.config()
        named = {"SQUEEZER_CONFIG": str(config), "SQUEEZER_RUN": str(sandbox.run), "SQUEEZER_DIR": str(place)}
        script = Path(__file__).parents[1] / "support" / "metronome.py"
        rank = Path(__file__).parents[2] / "launch" / "rank.py"
        job: Child = sandbox.start(Child, str(rank), str(script), "--steps", "3", **named)
        assert job.ended() == 0 and "step 3" in job.said(), job.said()
        assert "no daemon, so nothing is squeezed; training continues" in job.said()
        status, said = sandbox.run_to_end("-m", "squeezer", "daemon", "--config", str(config), SQUEEZER_DIR=str(place))
        assert status == 2 and len(said.splitlines()) == 1 and str(tmp) in said
    assert [*victims.iterdir()] == []


@pytest.mark.alone
def test_the_users_own_place_in_dev_shm_that_another_user_has_made_does_not_stop_the_training(
    tmp: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SQUEEZER_DIR", raising=False)
    place = Path(f"/dev/shm/squeezer-{OTHER}")
    as_user(STRANGER, lambda: place.mkdir(0o777))
    try:
        assert trains_without_hooks(tmp)
        assert f"{place} belongs to user {STRANGER}" in capfd.readouterr().err
        assert [*place.iterdir()] == []
    finally:
        place.rmdir()


def test_a_race_for_the_runtime_directory_gives_nothing_away(tmp: Path) -> None:
    place = tmp / "place"
    page_file, loot = page_path(place, 0), tmp.parent / "loot"
    loot.mkdir()
    loot.chmod(0o777)

    def grab() -> None:
        outcome(lambda: place.mkdir(0o777))
        outcome(lambda: os.rename(place, tmp / "away"))
        outcome(lambda: place.symlink_to(tmp / "away"))
        if outcome(lambda: os.open(page_file, os.O_RDWR | os.O_CLOEXEC)) == "done":
            (loot / "page").touch()
        outcome(lambda: place.unlink())
        outcome(lambda: place.rmdir())
        outcome(lambda: os.rmdir(tmp / "away"))
        os.closerange(3, 64)

    def train(seconds: float = 1.5) -> list[int]:
        won = lost = 0
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            try:
                page = Page.open(page_file)
            except (PageError, OSError):
                lost += 1
                continue
            held = os.fstat(page._fd)
            assert (held.st_uid, stat.S_IMODE(held.st_mode), page.words[Field.MAGIC]) == (OTHER, 0o600, PAGE_MAGIC)
            page.close()
            outcome(place.rmdir)
            won += 1
        return [won, lost]

    with meanwhile(STRANGER, grab):
        won, lost = as_user(OTHER, train)
    assert won > 10 and lost > 10, "both have been first"
    assert [*loot.iterdir()] == []


def test_directories_above_are_not_open_to_all_whatever_the_umask(tmp: Path) -> None:
    with umask(0):
        make_private_dir(tmp / "above" / "place")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp / "above", tmp / "above" / "place")] == [0o755, 0o700]


@pytest.mark.parametrize("what", ["a directory open to all", "a link to the victim's", "the directory above"])
def test_records_are_not_written_where_another_user_was_first(what: str, tmp: Path, tmp_path: Path) -> None:
    place, victims = planted(what, tmp)
    precious = victims / "precious"
    precious.write_text("mine")
    if what == "a directory open to all":
        lures = ["rank0.events.jsonl", ".lock", "study"]
        as_user(STRANGER, lambda: [(place / lure).symlink_to(precious) for lure in lures] and None)
    with new_sandbox(tmp_path) as sandbox:
        sandbox.run = place
        status, said = sandbox.run_to_end("-m", "squeezer", "daemon", "--config", str(sandbox.config()))
        assert status == 2 and len(said.splitlines()) == 1 and f"belongs to user {STRANGER}" in said
    assert precious.read_text() == "mine" and [*victims.iterdir()] == [precious]


@pytest.mark.parametrize("storage", ["{}/study", "sqlite:///{}/study"])
def test_a_study_is_not_kept_in_a_file_that_another_user_has_made(storage: str, tmp: Path) -> None:
    (tmp.parent / "precious").touch()
    as_user(STRANGER, lambda: (tmp / "study").symlink_to(tmp.parent / "precious"))
    with pytest.raises(OthersError, match=f"study belongs to user {STRANGER}"):
        open_storage(storage.format(tmp))
    assert (tmp.parent / "precious").read_bytes() == b""


@pytest.mark.parametrize("storage", ["{}/study", "sqlite:///{}/study", "sqlite:///{}/study?timeout=5"])
def test_a_study_is_kept_in_a_file_for_its_user_alone(storage: str, public: Path) -> None:
    with umask(0):
        kept = open_storage(storage.format(public))
        kept.create_new_study([StudyDirection.MAXIMIZE], "s")
    assert [path.name for path in public.iterdir()] == ["study"]
    assert tried_by_a_stranger([public / "study"]) == {}


@pytest.mark.parametrize("storage", ["{}/study", "sqlite:///{}/study"])
def test_the_best_trials_of_a_study_that_may_only_be_read_are_shown(storage: str, public: Path) -> None:
    named = storage.format(public)
    study = optuna.create_study(storage=open_storage(named), study_name="s", direction="maximize")
    study.add_trial(optuna.trial.create_trial(value=0.5))
    for path, mode in ((public / "study", 0o444), (public, 0o555)):
        path.chmod(mode)

    def shown() -> list[Any]:
        assert outcome(lambda: (public / "study").open("ab")) == outcome((public / "new").touch) == "PermissionError"
        return [each.score for each in best_trials(named, "s", public / "s")]

    assert without_rights(shown) == [0.5]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("storage", ["{}/study", "sqlite:///{}/study"])
def test_a_deadline_is_judged_of_a_study_that_may_only_be_read(storage: str, is_open: bool, public: Path) -> None:
    named, directory = storage.format(public), public / "s"
    config = WorkerConfig(storage=named, study_name="s", worker="w", directory=directory)
    worker = SearchWorker(Pretended(4), config, AtOnce())
    number = worker.ask(2)["trials"][0]["number"]
    worker.report(number, 4, 0.5, True)
    trained = worker._claims.account().trained
    if not is_open:
        worker.stop()
    paths = [public, *public.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def shown() -> list[Any]:
        assert outcome((directory / "new").touch) == outcome(lambda: (public / "study").open("ab")) == "PermissionError"
        engine = connect_to_read(named, directory)
        assert engine is not None and read_account(engine, "s").trained == trained
        return [verdict_on(Pretended(4), named, "s", directory, "2999-01-01 08:00").text]

    (text,) = without_rights(shown)
    assert trained[number] == 4 and "1 of 4" in text
    assert [public, *public.rglob("*")] == paths


def test_records_are_not_written_where_all_users_may_write(tmp_path: Path) -> None:
    with new_sandbox(tmp_path) as sandbox:
        sandbox.run.mkdir()
        sandbox.run.chmod(0o1777)
        status, said = sandbox.run_to_end("-m", "squeezer", "daemon", "--config", str(sandbox.config()))
        assert status == 2 and "all users may write there: chmod o-w" in said
        sandbox.run.chmod(0o700)
