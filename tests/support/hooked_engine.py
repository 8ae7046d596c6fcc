"""An engine that looks like DeepSpeed's, and the listening end of its hooks."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import zmq

from ds_hooks.shared.page.file import Page, page_path, socket_path
from ds_hooks.shared.wire import Bye, decode


class RecvGrad: ...


class ForwardPass: ...


class OptimizerStep: ...


class Schedule:
    micro_batches, stages, stage_id = 1, 2, 0

    def steps(self) -> Iterator[list[object]]:
        yield [ForwardPass()]
        yield [RecvGrad(), OptimizerStep()]


class Engine:
    """As much of a pipeline engine as hooks touch."""

    device = SimpleNamespace(type="cpu")
    global_rank = stage_id = 0
    num_stages, micro_batches = 2, 1
    is_data_parallel, is_pipe_parallel = False, True
    grid = SimpleNamespace(world_size=2)
    module = SimpleNamespace(tied_comms={})

    def __init__(self, page: Path) -> None:
        self.page_path = page
        self.seen: list[tuple[str, bool]] = []
        self.fail_in = ""

    def is_last_stage(self) -> bool:
        return False

    def _run(self, name: str) -> None:
        words = None
        if self.page_path.exists():
            page = Page.open(self.page_path)
            words = page.is_open()
            page.close()
        self.seen.append((name, bool(words)))
        if name == self.fail_in:
            raise StopIteration("no more data")

    def _exec_forward(self) -> None:
        self._run("ForwardPass")

    def _exec_recv(self) -> None:
        self._run("RecvGrad")

    def _exec_optimizer(self) -> None:
        self._run("OptimizerStep")

    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        ForwardPass: _exec_forward,
        RecvGrad: _exec_recv,
        OptimizerStep: _exec_optimizer,
    }

    def _exec_schedule(self, schedule: Schedule) -> None:
        for commands in schedule.steps():
            for command in commands:
                self._INSTRUCTION_MAP[type(command)](self)

    def _aggregate_total_loss(self) -> float:
        self._run("loss")
        return 0.5

    def train_batch(self) -> float:
        self._exec_schedule(Schedule())
        return self._aggregate_total_loss()

    def eval_batch(self) -> None:
        self._exec_schedule(Schedule())


class Daemon:
    """A listening socket, and the page."""

    def __init__(self, directory: Path) -> None:
        self.page = Page.open(page_path(directory, 0))
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.bind(f"ipc://{socket_path(directory, 0)}")

    def hear_all(self) -> list[Any]:
        """All messages up to the goodbye."""
        messages: list[Any] = []
        while not any(isinstance(message, Bye) for message in messages):
            assert self._socket.poll(10_000), f"no goodbye; heard {messages}"
            messages += [decode(part).message for part in self._socket.recv_multipart()]
        return messages

    def hear_batches(self) -> list[list[Any]]:
        """All messages up to the goodbye, as they came together."""
        batches: list[list[Any]] = [[None]]
        while not isinstance(batches[-1][-1], Bye):
            assert self._socket.poll(10_000), f"no goodbye; heard {batches}"
            batches.append([decode(part).message for part in self._socket.recv_multipart()])
        return batches[1:]

    def is_connected(self) -> bool:
        return bool(self._socket.poll(1))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        self.page.close()


def connect(engine: Engine, daemon: Daemon) -> None:
    """Train until the socket's thread has connected: older messages are dropped, and counted."""
    for _ in range(10_000):
        engine.train_batch()
        if daemon.is_connected():
            return
