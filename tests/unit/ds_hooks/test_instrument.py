"""The wrappers: no fault of a hook reaches the training, and the training's own errors pass through."""

import pytest

from ds_hooks import Handle
from ds_hooks.shared.page import Field
from tests.support.hooked_engine import Daemon, Engine, connect


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
