"""The wrappers: no fault of a hook reaches the training, and the training's own errors pass through."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_hooks import Handle, attach
from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.page.plan import plan_slot, plan_steps
from tests.support import hooked_engine
from tests.support.hooked_engine import Daemon, Engine, ForwardPass, OptimizerStep, RecvGrad, Schedule, connect


def test_an_error_of_the_training_goes_through_and_leaves_the_gate_shut(
    handle: Handle, engine: Engine, daemon: Daemon
) -> None:
    engine.fail_in = "RecvGrad"
    with pytest.raises(StopIteration, match="no more data"):
        engine.train_batch()
    assert not daemon.page.is_open()
    assert handle.enabled, "not the hooks' fault"
    engine.fail_in = ""
    engine.train_batch()
    assert engine.seen[-3] == ("RecvGrad", True)


@pytest.mark.parametrize(
    "place", ["begin_step", "begin_schedule", "_open_bubble", "close_bubble", "begin_loss", "end_step"]
)
def test_a_fault_in_any_hook_switches_them_off_once_and_the_step_goes_on(
    handle: Handle,
    engine: Engine,
    daemon: Daemon,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    connect(engine, daemon)
    engine.seen.clear()
    assert handle._instrument is not None and handle._hooks is not None
    handle._instrument.unwrap()
    monkeypatch.setattr(handle._hooks, place, lambda *_: 1 / 0)
    handle._instrument.wrap()  # the hooks are bound when the engine is wrapped
    assert engine.train_batch() == 0.5
    assert engine.train_batch() == 0.5
    assert len([name for name, _ in engine.seen if name == "RecvGrad"]) == 2
    assert not handle.enabled and handle.fault == "ZeroDivisionError: division by zero"
    assert not daemon.page.is_open()
    assert daemon.page.words[Field.HOOK_FAULTS] == 1
    assert "train_batch" not in engine.__dict__
    shown = capsys.readouterr().err
    assert shown.count("switched off; training continues") == 1
    assert daemon.hear_all()[-1].fault == 1


def test_a_fault_that_comes_again_in_leaving_shuts_the_gate_and_gives_the_page_back(
    handle: Handle, engine: Engine, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(engine, daemon)
    assert handle._connection is not None
    plan_slot(daemon.page.words, 1, 10**9)
    plan_steps(daemon.page.words, 1, 10**9)
    side = handle._connection.side

    def refused() -> None:
        monkeypatch.setattr(side, "halt", refused)
        raise RuntimeError("a hook of the script's lets nobody send signals")

    monkeypatch.setattr(side, "wake", refused)
    assert engine.train_batch() == 0.5
    assert not handle.enabled
    assert not daemon.page.is_open()
    assert daemon.page.words[Field.MAIN_PID] == 0
    assert daemon.hear_all()[-1].fault == 1


class SpeechlessError(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("not even this")


def test_a_fault_that_cannot_be_told_is_kept_from_the_training(
    handle: Handle, engine: Engine, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault() -> None:
        raise SpeechlessError

    assert handle._hooks is not None and handle._instrument is not None
    handle._instrument.unwrap()
    monkeypatch.setattr(handle._hooks, "begin_loss", fault)
    handle._instrument.wrap()
    assert engine.train_batch() == 0.5
    assert handle.fault == "SpeechlessError" and not handle.enabled
    assert not daemon.page.is_open()


def others_wrap(run: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
    @functools.wraps(run)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        seen.append(run.__name__)
        return run(*args, **kwargs)

    return theirs


@pytest.mark.parametrize("name", ["train_batch", "_exec_schedule", "_aggregate_total_loss"])
def test_a_wrapper_that_others_set_later_stays_when_the_hooks_leave(
    engine: Engine, daemon: Daemon, tmp_path: Path, name: str
) -> None:
    handle = attach(engine, directory=tmp_path / "run", local_rank=0)
    seen: list[str] = []
    theirs = others_wrap(getattr(engine, name), seen)
    setattr(engine, name, theirs)
    handle.detach()
    assert getattr(engine, name) is theirs
    assert engine.train_batch() == 0.5
    assert len(seen) == 1 and not any(is_open for _, is_open in engine.seen), "ours only passes through"
    again = attach(engine, directory=tmp_path / "run", local_rank=0)
    assert again.enabled, again.fault
    engine.train_batch()
    assert ("RecvGrad", True) in engine.seen and len(seen) == 2
    again.detach()
    assert getattr(engine, name) is theirs


def test_a_second_attach_is_refused_whatever_wraps_the_engine(
    handle: Handle, engine: Engine, daemon: Daemon, tmp_path: Path
) -> None:
    ours = engine.train_batch
    engine.train_batch = lambda: ours()  # type: ignore[method-assign]
    second = attach(engine, directory=tmp_path / "run", local_rank=1)
    assert not second.enabled and "this engine already has hooks" in str(second.fault)
    vars(engine)["train_batch"] = ours


@pytest.mark.parametrize("how", ["in place", "copy"])
def test_an_instruction_that_others_replace_stays_theirs(
    engine: Engine, daemon: Daemon, tmp_path: Path, how: str
) -> None:
    handle = attach(engine, directory=tmp_path / "run", local_rank=0)
    seen: list[str] = []
    mine = {ForwardPass: others_wrap(engine._INSTRUCTION_MAP[ForwardPass], seen)}
    if how == "in place":
        engine._INSTRUCTION_MAP.update(mine)  # type: ignore[arg-type]
    else:
        vars(engine)["_INSTRUCTION_MAP"] = {**engine._INSTRUCTION_MAP, **mine}
    handle.detach()
    assert engine._INSTRUCTION_MAP[ForwardPass] is mine[ForwardPass]
    engine.train_batch()
    assert len(seen) == 1 and [name for name, _ in engine.seen] == ["ForwardPass", "RecvGrad", "OptimizerStep", "loss"]


@pytest.mark.parametrize("name", ["train_batch", "_exec_schedule", "_aggregate_total_loss"])
def test_a_method_that_others_replace_in_the_class_is_the_one_that_runs(
    handle: Handle, engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(Engine, name, others_wrap(getattr(Engine, name), seen))
    assert engine.train_batch() == 0.5
    assert seen == [name] and ("RecvGrad", True) in engine.seen
    handle.detach()
    assert engine.train_batch() == 0.5
    assert len(seen) == 2


@pytest.mark.parametrize("holder", ["class", "engine"])
def test_instructions_that_others_replace_add_or_remove_below_the_hooks_are_the_ones_that_run(
    engine: Engine, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    theirs = dict(Engine._INSTRUCTION_MAP)
    if holder == "class":
        monkeypatch.setattr(Engine, "_INSTRUCTION_MAP", theirs)
    else:
        vars(engine)["_INSTRUCTION_MAP"] = theirs
    handle = attach(engine, directory=tmp_path / "run", local_rank=0)
    seen: list[str] = []
    theirs[ForwardPass] = others_wrap(theirs[ForwardPass], seen)
    engine.train_batch()
    assert len(seen) == 1 and ("RecvGrad", True) in engine.seen

    class Own: ...

    class OwnSchedule(Schedule):
        def steps(self) -> Iterator[list[object]]:
            yield [Own()]
            yield [RecvGrad(), OptimizerStep()]

    theirs[Own] = lambda engine: seen.append("own")
    theirs[ForwardPass] = Engine._INSTRUCTION_MAP[ForwardPass]
    monkeypatch.setattr(hooked_engine, "Schedule", OwnSchedule)
    engine.train_batch()
    assert seen[1:] == ["own"]
    del theirs[Own]
    with pytest.raises(KeyError, match="Own"):
        engine.train_batch()
    assert handle.enabled, handle.fault
    handle.detach()
    assert engine._INSTRUCTION_MAP is theirs


def test_hooks_that_leave_in_the_middle_of_a_step_hook_nothing_more(
    engine: Engine, daemon: Daemon, tmp_path: Path
) -> None:
    handle = attach(engine, directory=tmp_path / "run", local_rank=0)
    kept = dict(engine._INSTRUCTION_MAP)

    def forward_and_leave(engine: Engine) -> None:
        handle.detach()

    engine._INSTRUCTION_MAP = {**kept, ForwardPass: forward_and_leave}
    assert engine.train_batch() == 0.5
    assert handle.fault is None
    assert [name for name, _ in engine.seen] == ["RecvGrad", "OptimizerStep", "loss"]


def test_a_collective_that_others_wrap_later_stays_theirs(
    engine: Engine, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SimpleNamespace(all_reduce=lambda _tensor: "reduced")
    before = backend.all_reduce
    monkeypatch.setitem(sys.modules, "deepspeed.comm.comm", SimpleNamespace(cdb=backend))
    handle = attach(engine, directory=tmp_path / "run", local_rank=0)
    ours = backend.all_reduce
    assert ours is not before
    backend.all_reduce = theirs = lambda tensor: ours(tensor)
    handle.detach()
    assert backend.all_reduce is theirs and theirs(None) == "reduced"


class CtrlC:
    """Interrupts what runs in the hooks when it has run so many lines."""

    def __init__(self, lines: int) -> None:
        self.left = lines

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        if f"{os.sep}ds_hooks{os.sep}" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.trace


def test_wherever_ctrl_c_comes_in_a_hook_the_gate_is_shut_and_the_next_step_has_hooks(
    handle: Handle, engine: Engine, daemon: Daemon
) -> None:
    connect(engine, daemon)
    plan_slot(daemon.page.words, 1, 10**9)
    plan_slot(daemon.page.words, 3, 10**9)
    plan_steps(daemon.page.words, 1, 10**9)
    before = sys.gettrace()
    for lines in count(1):
        interrupt = CtrlC(lines)
        sys.settrace(interrupt.trace)
        try:
            engine.train_batch()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if interrupt.left > 0:
            break
        assert not daemon.page.is_open(), lines
        engine.seen.clear()
        engine.eval_batch()
        assert not any(is_open for _, is_open in engine.seen), (lines, "an evaluation is no step")
        engine.seen.clear()
        engine.train_batch()
        assert [name for name, is_open in engine.seen if is_open] == ["RecvGrad", "loss"], lines
    assert lines > 100 and handle.enabled
