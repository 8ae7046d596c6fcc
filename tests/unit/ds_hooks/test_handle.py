"""Attaching: which engines are served, and what happens without a daemon."""

import copy
import errno
import gc
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_hooks import Handle, attach
from ds_hooks.shared.page.file import page_path
from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.wire import Bye, Hello, StepStart
from tests.support.hooked_engine import Daemon, Engine, connect
from tests.support.slow_cases import others_slow


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"device": SimpleNamespace(type="xpu")}, "device is xpu"),
        ({"device": "mps:0"}, "device is mps"),
        ({"device": object()}, "device is <object"),
        ({"_INSTRUCTION_MAP": None}, "not a pipeline engine; allowed: "),
    ],
)
def test_an_engine_that_cannot_be_served_is_named_and_left_alone(
    engine: Engine, tmp_path: Path, change: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other: Any = SimpleNamespace() if change.get("_INSTRUCTION_MAP", 1) is None else engine
    for name, value in change.items():
        if value is not None:
            setattr(other, name, value)
    handle = attach(other, directory=tmp_path / "run", local_rank=0)
    assert not handle.enabled and says in str(handle.fault)
    assert says in capsys.readouterr().err
    assert not page_path(tmp_path / "run", 0).exists()


def test_a_device_may_be_given_by_its_name(engine: Engine, tmp_path: Path) -> None:
    engine.device = "cpu:0"  # type: ignore[assignment]
    handle = attach(engine, directory=tmp_path / "run", local_rank=0)
    assert handle.enabled, handle.fault
    handle.detach()


def test_a_second_attach_is_refused_and_the_first_goes_on(
    handle: Handle, engine: Engine, daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = attach(engine, directory=tmp_path / "run", local_rank=0)
    assert not second.enabled and "this engine already has hooks" in str(second.fault)
    assert capsys.readouterr().err == f"[ds_hooks] {second.fault}\n", "no word of a training without squeezing"
    second.detach()
    engine.train_batch()
    assert handle.enabled and engine.seen[1] == ("RecvGrad", True)


def test_a_copy_of_an_engine_trains_itself(engine: Engine, tmp_path: Path) -> None:
    other = Engine(engine.page_path)
    handles = [attach(each, directory=tmp_path / "run", local_rank=0) for each in (engine, other)]
    for each in (engine, other):  # one has the hooks, and one waits for them
        copied = copy.copy(each)
        assert set(vars(copied)) == {"page_path", "seen", "fail_in"}
        copied.seen = []
        assert copied.train_batch() == 0.5
        assert copied.seen and not each.seen
    for handle in handles:
        handle.detach()


def test_without_a_daemon_messages_are_dropped_and_counted(engine: Engine, tmp_path: Path) -> None:
    handle = attach(engine, directory=tmp_path / "run", local_rank=0)
    assert [engine.train_batch() for _ in range(4)] == [0.5] * 4
    assert handle._connection is not None and handle._connection.sender.dropped > 0
    handle.detach()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_goodbye_brings_no_hello_along(handle: Handle, engine: Engine, daemon: Daemon) -> None:
    """A teacher's may be due still, and the daemon would take it for that of a process without the page."""
    connect(engine, daemon)
    assert handle._connection is not None
    handle._connection.sender.repeat_hello()
    handle.detach()
    last = daemon.hear_batches()[-1]
    assert last[-1] == Bye(0, 0) and not any(isinstance(message, Hello) for message in last)


def test_an_engine_that_the_script_drops_takes_its_hooks_along(
    engine: Engine, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SimpleNamespace(all_reduce=lambda _tensor: "reduced")  # DeepSpeed's lives as long as the process
    before = backend.all_reduce
    monkeypatch.setitem(sys.modules, "deepspeed.comm.comm", SimpleNamespace(cdb=backend))
    engines = [Engine(engine.page_path)]
    assert attach(engines[0], directory=tmp_path / "run", local_rank=0).enabled
    connect(engines[0], daemon)
    wrapper = backend.all_reduce
    engines.clear()
    second = attach(engine, directory=tmp_path / "run", local_rank=0)
    assert Bye(0, 0) in daemon.hear_all(), "the first one's"
    assert backend.all_reduce is before
    assert wrapper is not before and wrapper(None) == "reduced", "what others have kept passes through"
    engine.train_batch()
    assert second.enabled, second.fault
    second.detach()
    assert backend.all_reduce is before
    assert daemon.page.words[Field.MAIN_PID] == 0


def test_of_two_engines_the_one_that_trains_has_the_hooks(
    engine: Engine, daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where DeepSpeed keeps an engine alive that the script has dropped for another one."""
    former = Engine(engine.page_path)
    first = attach(former, directory=tmp_path / "run", local_rank=0)
    connect(former, daemon)
    former.train_batch()
    second = attach(engine, directory=tmp_path / "run", local_rank=0)
    assert (first.enabled, second.enabled, second.fault) == (True, False, None)
    assert "squeezed once the one attached before it has stopped training" in capsys.readouterr().err
    assert "once the one that has the hooks has stopped" in str(
        attach(engine, directory=tmp_path / "run", local_rank=0).fault
    )
    capsys.readouterr()
    assert engine.train_batch() == 0.5
    assert (first.enabled, second.enabled, second.fault) == (False, True, None)
    assert "_exec_schedule" in vars(engine) and "_exec_schedule" not in vars(former)
    assert daemon.page.words[Field.MAIN_PID] == os.getpid()
    assert former.train_batch() == engine.train_batch() == 0.5
    assert capsys.readouterr().err.count("another engine is squeezed from now on") == 1
    first.detach()
    assert "train_batch" not in vars(former)
    assert second.enabled and daemon.page.words[Field.MAIN_PID] == os.getpid()
    second.detach()
    assert daemon.page.words[Field.MAIN_PID] == 0
    heard = daemon.hear_all()
    assert [type(each) for each in heard if isinstance(each, Bye)] == [Bye], "none where one hands on to the other"


def test_of_engines_that_train_in_turn_the_first_keeps_the_hooks_until_it_stops(
    engine: Engine, daemon: Daemon, tmp_path: Path
) -> None:
    former, teacher = Engine(engine.page_path), Engine(engine.page_path)
    first, second, third = (
        attach(each, directory=tmp_path / "run", local_rank=0) for each in (former, engine, teacher)
    )
    connect(former, daemon)
    for _ in range(3):
        former.train_batch()
        engine.train_batch()
    assert [each.enabled for each in (first, second, third)] == [True, False, False]
    engine.train_batch()
    assert (first.enabled, second.enabled) == (False, True)
    for _ in range(3):
        former.train_batch()
    assert (first.enabled, second.enabled) == (False, True), "they are not handed to and fro"
    third.detach()
    assert "train_batch" not in vars(teacher)
    teacher.train_batch()
    assert [each.enabled for each in (first, second, third)] == [False, True, False]
    first.detach()
    second.detach()
    assert "train_batch" not in vars(engine) and "train_batch" not in vars(former)


def handovers(turns: int, steps: int, directory: Path) -> int:
    """How often the hooks change hands where two engines take turns of so many steps each."""
    engines = [Engine(directory / "no.page") for _ in range(2)]
    handles = [attach(each, directory=directory / "run", local_rank=0) for each in engines]
    found = [True, False]
    changes = 0
    for turn in range(turns):
        for _ in range(steps):
            engines[turn % 2].train_batch()
            before, found = found, [each.enabled for each in handles]
            assert sum(found) == 1
            changes += before != found
    for each in handles:
        each.detach()
    return changes


def test_an_engine_that_has_lost_the_hooks_gets_them_back_when_it_trains_on_alone(
    engine: Engine, daemon: Daemon, tmp_path: Path
) -> None:
    former = Engine(engine.page_path)
    first, second = (attach(each, directory=tmp_path / "run", local_rank=0) for each in (former, engine))
    connect(engine, daemon)
    assert (first.enabled, second.enabled) == (False, True)
    engine.train_batch()
    for steps in range(12):
        assert (first.enabled, second.enabled) == (steps > 8, steps <= 8), steps
        former.train_batch()
    assert former.seen[-1] == ("loss", True) and "_exec_schedule" not in vars(engine)
    first.detach()
    heard = daemon.hear_all()
    hellos = [index for index, message in enumerate(heard) if isinstance(message, Hello)]
    steps_begun = [message.step for message in heard if isinstance(message, StepStart)]
    assert steps_begun[-3:] == [10, 11, 12] and hellos[0] == 0
    second.detach()
    assert "train_batch" not in vars(engine) and "train_batch" not in vars(former)


@pytest.mark.parametrize(("steps", "changes"), [(1, 0), (8, 1), (9, 3), (20, 5), (50, 11)])
def test_engines_that_take_turns_do_not_hand_the_hooks_on_for_ever(tmp_path: Path, steps: int, changes: int) -> None:
    """Unless the turns are so long that it is worth it: each time the daemon learns anew."""
    assert handovers(12, steps, tmp_path) == changes


def choose(engines: list[Engine], steps: str, directory: Path, *, kept: bool) -> list[tuple[bool, int]]:
    """Of each engine, whether it has hooks at last, and the number of its last step with hooks.

    In `steps`, a small letter trains that engine, and a capital one builds it anew; the former one is freed unless
    it is `kept`, as DeepSpeed does with those of a last stage.
    """
    handles: dict[str, Handle] = {}
    current: dict[str, Engine] = {}
    for step in steps:
        if step.isupper():
            if step.lower() in current and not kept:
                del handles[step.lower()], current[step.lower()]
                engines.clear()
            current[step.lower()] = Engine(directory / "no.page")
            engines.append(current[step.lower()])
            handles[step.lower()] = attach(current[step.lower()], directory=directory, local_rank=0)
        else:
            current[step].train_batch()
    found = [handles[name] for name in sorted(handles)]
    chosen = [(each.enabled, each._hooks._step if each._hooks is not None else 0) for each in found]
    for each in found:
        each.detach()
    return chosen


CHOSEN = [
    ("AaBaAa", [(True, 1), (False, 0)]),
    ("ABabaABab", [(True, 1), (False, 0)]),
    ("AaBTbtbt", [(False, 1), (True, 2), (False, 0)]),
    ("ABbbbaaaaaaaaa", [(True, 9), (False, 3)]),
    ("AaaAaa", [(True, 2)]),
    ("TABabab", [(True, 2), (False, 0), (False, 0)]),
    ("ABaababbbb", [(False, 3), (True, 5)]),
    ("ABbbbaaaaaaaa", [(False, 0), (True, 3)]),
]


@pytest.mark.parametrize(("steps", "chosen"), others_slow(CHOSEN, CHOSEN[:4]))
def test_all_ranks_choose_the_same_engine_and_number_its_steps_alike(
    tmp_path: Path, steps: str, chosen: list[tuple[bool, int]]
) -> None:
    """Whether a former engine was freed differs between them. They leave the same steps alone, by their numbers."""
    engines: list[Engine] = []
    assert [choose(engines, steps, tmp_path / f"{kept}", kept=kept) for kept in (False, True)] == [chosen, chosen]


@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize("fails", ["connection.take_page", "handle.StepHooks"])
def test_a_takeover_that_fails_leaves_the_training_alone(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, above: bool, fails: str
) -> None:
    formers = [Engine(engine.page_path)]
    first = attach(formers[0], directory=tmp_path / "run", local_rank=0)
    second = attach(engine, directory=tmp_path / "run", local_rank=0)
    if above:
        run: Any = engine.train_batch
        engine.train_batch = lambda: run()  # type: ignore[method-assign]

    def no_room(*_: Any) -> None:
        raise OSError("no room")

    is_dropped = fails == "connection.take_page"
    if is_dropped:
        del first
        formers.clear()
        gc.collect()
    with monkeypatch.context() as while_it_takes_over:
        while_it_takes_over.setattr(f"ds_hooks.{fails}", no_room)
        assert [engine.train_batch(), engine.train_batch()] == [0.5, 0.5]
    assert not second.enabled and "no room" in str(second.fault)
    if not is_dropped:
        for _ in range(9):
            assert not first.enabled
            formers[0].train_batch()
        assert first.enabled, "it goes on where the other one cannot"
        first.detach()
    assert list((tmp_path / "run").iterdir()) == []


def test_an_engine_that_cannot_be_squeezed_takes_no_hooks_from_another(engine: Engine, tmp_path: Path) -> None:
    handle = attach(engine, directory=tmp_path / "run", local_rank=0)
    assert attach(SimpleNamespace(device="cpu"), directory=tmp_path / "run", local_rank=0).fault
    assert handle.enabled
    handle.detach()


def test_a_page_that_cannot_be_removed_costs_the_script_nothing(engine: Engine, tmp_path: Path) -> None:
    handle = attach(engine, directory=tmp_path / "run", local_rank=0)
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").touch()
    handle.detach()
    assert engine.train_batch() == 0.5
    assert not (tmp_path / "run").read_bytes()


def test_a_fault_in_leaving_by_choice_is_told_and_kept_from_the_script(
    handle: Handle, engine: Engine, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    connect(engine, daemon)
    assert handle._connection is not None

    def refused() -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(handle._connection.side, "halt", refused)
    handle.detach()
    assert "rank 0: cleaning up failed: PermissionError" in capsys.readouterr().err
    assert daemon.page.words[Field.MAIN_PID] == 0 and daemon.hear_all()[-1] == Bye(0, 0)


def test_a_forked_child_leaves_its_parents_hooks_alone(handle: Handle, engine: Engine, daemon: Daemon) -> None:
    child = os.fork()
    if child == 0:
        handle.detach()
        os._exit(0)
    os.waitpid(child, 0)
    assert daemon.page.words[Field.MAIN_PID] == os.getpid()
    engine.train_batch()
    assert engine.seen[1] == ("RecvGrad", True)
