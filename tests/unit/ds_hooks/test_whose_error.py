"""What the script itself raises while a hook happens to run is the training's; all else is the hooks' fault."""

import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ds_hooks import Handle
from ds_hooks.shared.wire import WaitKind
from tests.support.hooked_engine import Daemon, Engine, connect


class OutOfTimeError(Exception):
    """What a script's signal handler raises."""


class Stops:
    """A handler that is an object."""

    def __call__(self, number: int, frame: object) -> None:
        raise OutOfTimeError


def raise_once(number: int, *interrupted: object) -> None:
    """As the usual recipe for a time limit."""
    signal.signal(number, signal.SIG_DFL)
    raise TimeoutError


HANDLERS: dict[str, Callable[[], Any]] = {
    "object": Stops,
    "method": lambda: Stops().__call__,
    "partial": lambda: functools.partial(Stops.__call__, Stops()),
    "once": lambda: raise_once,
}


@pytest.fixture
def own_handler(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR2, HANDLERS[request.param]())
    yield
    signal.signal(signal.SIGUSR2, before)


HOOKS = ["begin_step", "begin_schedule", "before_instruction", "_open_bubble", "close_bubble", "begin_loss", "end_step"]
INTERRUPTED = [(place, when, "object") for place in HOOKS for when in ("before", "after")]


@pytest.mark.parametrize(
    ("place", "when", "own_handler"),
    [*INTERRUPTED, *(("begin_step", "before", handler) for handler in ("method", "partial", "once"))],
    indirect=["own_handler"],
)
def test_what_a_signal_handler_of_the_script_raises_in_a_hook_is_the_trainings(
    handle: Handle,
    engine: Engine,
    daemon: Daemon,
    place: str,
    when: str,
    own_handler: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect(engine, daemon)
    assert handle._instrument is not None and handle._hooks is not None
    hook, pending = getattr(handle._hooks, place), [True]

    def interrupted(*args: Any) -> Any:
        if when == "before" and pending and pending.pop():
            signal.raise_signal(signal.SIGUSR2)
        result = hook(*args)
        if pending and pending.pop():
            signal.raise_signal(signal.SIGUSR2)
        return result

    handle._instrument.unwrap()
    monkeypatch.setattr(handle._hooks, place, interrupted)
    handle._instrument.wrap()
    with pytest.raises((OutOfTimeError, TimeoutError)):
        engine.train_batch()
    assert handle.enabled and handle.fault is None
    assert not daemon.page.is_open() and not pending
    engine.seen.clear()
    assert engine.train_batch() == 0.5
    assert [name for name, is_open in engine.seen if is_open] == ["RecvGrad", "loss"]
    engine.seen.clear()
    engine.eval_batch()
    assert not any(is_open for _, is_open in engine.seen)


INJECTIONS = 100
"""Where an engine computes nothing, at least one in ten hits a hook."""


@pytest.mark.parametrize("kind", [OutOfTimeError, RuntimeError])
def test_what_another_thread_of_the_script_raises_in_a_hook_is_the_trainings(
    handle: Handle, engine: Engine, kind: type[Exception]
) -> None:
    main, found = ctypes.c_ulong(threading.get_ident()), 0

    def inject(after_s: float) -> None:
        time.sleep(after_s)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(kind))

    for number in range(INJECTIONS):
        thread = threading.Thread(target=inject, args=(1e-4 * (number % 20),))
        try:
            thread.start()
            while thread.is_alive():
                engine.train_batch()
            engine.train_batch()
        except kind:
            found += 1
        thread.join()
        assert handle.enabled, handle.fault
    assert found > INJECTIONS / 2


FAULTS = {
    "an assertion": "assert False",
    "an iterator": "next(iter(()))",
    "memory": "[0] * sys.maxsize",
    "a class": "raise ValueError",
    "the kernel": "os.kill(2**22 + 1, 0)",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_built_in_class_is_the_hooks(
    handle: Handle, engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {"__name__": "ds_hooks.step_hooks", "os": os, "sys": sys}
    exec(f"def fault(_):\n    {FAULTS[name]}", names)
    monkeypatch.setattr(handle._hooks, "before_instruction", names["fault"])
    assert engine.train_batch() == 0.5
    assert not handle.enabled


@pytest.mark.parametrize("own_handler", ["object"], indirect=True)
def test_a_fault_beside_a_signal_handler_is_the_hooks(
    handle: Handle, engine: Engine, own_handler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle._hooks, "before_instruction", lambda _: WaitKind(99))
    assert engine.train_batch() == 0.5
    assert not handle.enabled and "99 is not a valid WaitKind" in str(handle.fault)
