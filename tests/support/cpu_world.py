"""A page, a main job and a daemon that act while the side task sleeps, and a clock that is given."""

import signal
from collections.abc import Callable
from types import SimpleNamespace

import pytest

import trials.gate.cpu as gate_module
from ds_hooks.shared.page.file import Page
from ds_hooks.shared.page.layout import Field
from trials.gate.cpu import CpuGate

US, MS = 1_000, 1_000_000


class World:
    """A page with a main job and a daemon that act while the side task sleeps."""

    def __init__(self, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
        self.page, self.words = page, page.words
        self.now_ns = self.cpu_ns = 10 * MS
        self.others_ns = 0  # CPU time of further threads
        self.sleeps = 0
        self.while_asleep: list[Callable[[], int | None]] = []
        monkeypatch.setattr(gate_module, "monotonic_ns", lambda: self.now_ns)
        monkeypatch.setattr(gate_module, "thread_time_ns", lambda: self.cpu_ns)
        monkeypatch.setattr(gate_module, "process_time_ns", lambda: self.cpu_ns + self.others_ns)
        monkeypatch.setattr(signal, "sigtimedwait", self._sleep)
        monkeypatch.setattr(gate_module, "ACCOUNT_EVERY_NS", 0)

    def open(self, epoch: int, until_ns: int) -> int:
        self.words[Field.PERMIT_UNTIL_NS] = until_ns
        self.words[Field.BUBBLE] = epoch << 1 | 1
        return signal.SIGUSR1

    def close(self, epoch: int) -> None:
        self.words[Field.BUBBLE] = epoch << 1

    def work(self, wall_ns: int, cpu_ns: int | None = None) -> None:
        self.now_ns += wall_ns
        self.cpu_ns += wall_ns if cpu_ns is None else cpu_ns

    def _sleep(self, _signals: object, _timeout_s: float) -> SimpleNamespace | None:
        self.sleeps += 1
        assert not self.words[Field.SIDE_ACTIVITY], "asleep without having acknowledged"
        number = self.while_asleep.pop(0)()
        return None if number is None else SimpleNamespace(si_signo=number)


def decline(world: World, gate: CpuGate, *left_ms: float) -> int:
    """Ask for unit 0, which takes longer than the bubbles left it; in the last one it starts. Returns the sleeps."""

    def bubble(epoch: int, ms: float) -> Callable[[], int]:
        return lambda: world.open(epoch, world.now_ns + round(ms * MS))

    before = world.sleeps
    world.close(0)
    world.while_asleep = [bubble(epoch, ms) for epoch, ms in enumerate(left_ms, start=1)]
    gate.enter(0)
    assert not world.while_asleep, "it started too early"
    return world.sleeps - before
