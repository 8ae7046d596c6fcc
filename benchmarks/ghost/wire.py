"""The ghosts' end of the wire: replacements for DeepSpeed's point-to-point functions and two collectives."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.ghost.model import PipelineModel, Timing, Wait
from benchmarks.ghost.program import Op, StageCursor, Verb
from benchmarks.ghost.recording import Pace

_WAITS_KEPT = 65_536
_COPIED = 16_384
"""Numbers that are copied at once while a message is handed over."""
_META_SIZE = 256  # deepspeed.runtime.pipe.engine.TENSOR_META_SIZE


class _Done:
    """A request of a batch that is already complete."""

    def wait(self) -> None:
        """Return at once."""


class GhostWire:
    """Answers the true stage's messages and collectives when real peers would.

    A wait sleeps until all parties are there (the kernel waits, the core is free), on `time.monotonic_ns`'s clock.
    Where stages meet, it then copies memory until the message is handed over: gloo takes the core for that, too.

    Args:
        programs: one program for each stage.
        stage: the true stage.
        size: of the float32 tensors that stages exchange.
        dtype_id: DeepSpeed's number for float32 in its tensor metadata.
        broadcast: DeepSpeed's own broadcast, which the replacement calls.
        all_reduce: that of DeepSpeed's communication backend, which the replacement calls.
        seed: of the tensors that arrive.

    Attributes:
        waits: every receive so far, every loss broadcast and norm all-reduce among them, and where stages meet, every
            send; newest last.
        step_ends_ns: when each step's loss broadcast returned.
        on_wait: called when the true stage begins to wait for a message that is not there yet.
        at_once: True: no model and no waits; every message is there already.
        loss_group: the process group of the loss broadcast; broadcasts in other groups pass through.
        norm_group: the same for the all-reduce of the gradients' norm.
    """

    def __init__(
        self,
        programs: Sequence[Sequence[Op]],
        stage: int,
        *,
        size: tuple[int, ...],
        dtype_id: int,
        broadcast: Callable[..., Any],
        all_reduce: Callable[..., Any],
        seed: int = 0,
    ) -> None:
        self._programs = programs
        self._stage = stage
        self._sends_loss = any((op.verb, op.what) == ("send", "loss") for op in programs[stage])
        self._real_broadcast = broadcast
        self._real_all_reduce = all_reduce
        self._meta = torch.tensor([0, dtype_id, len(size), *size], dtype=torch.int32)  # 0: a single tensor
        generator = torch.Generator().manual_seed(seed)
        self._scratch = torch.zeros(min(_COPIED, math.prod(size)))
        self._payloads = {
            "activation": torch.randn(size, generator=generator),
            "gradient": torch.randn(size, generator=generator) / math.prod(size),
        }
        self._payload = self._payloads["activation"].view(-1)[: self._scratch.numel()]
        self.at_once = True
        self.on_wait: Callable[[], None] | None = None
        self.loss_group: Any = None
        self.norm_group: Any = None

    def restart(self, timing: Timing) -> None:
        """Forget everything; step 0 begins at `begin`, or with the first message."""
        self.waits: deque[Wait] = deque(maxlen=_WAITS_KEPT)
        self.step_ends_ns: deque[int] = deque(maxlen=_WAITS_KEPT)
        self._timing = timing
        self._cursor = StageCursor(self._programs[self._stage])
        self._model: PipelineModel | None = None
        recorded = timing.recorded
        self._pace = Pace(recorded[self._stage]) if recorded else None
        self._step_begin_ns = self._waited_ns = 0

    def begin(self) -> PipelineModel:
        """Start all ghosts' clocks, unless they run already."""
        if self._model is None:
            start_ns = self._step_begin_ns = time.monotonic_ns()
            self._model = PipelineModel(self._programs, self._timing, true_stage=self._stage, start_ns=start_ns)
        return self._model

    def think(self) -> None:
        """Advance the ghosts as far as they can: during the true stage's computations, so that its waits are idle."""
        if self._model is not None and not self.at_once:
            self._model.advance()

    def send(self, tensor: torch.Tensor, dest_stage: int, async_op: bool = False) -> None:
        """Replaces `deepspeed.runtime.pipe.p2p.send`: where stages meet, it waits for the receiver."""
        start_ns = time.monotonic_ns()
        if not self.at_once and not self._is_meta(tensor):
            self._meet("send", "activation" if dest_stage > self._stage else "gradient", start_ns)

    def recv(self, tensor: torch.Tensor, src_stage: int, async_op: bool = False) -> None:
        """Replaces `deepspeed.runtime.pipe.p2p.recv`: sleeps until the ghost's message would arrive.

        Metadata, which travels ahead of the first tensor alone, is there at once.
        """
        start_ns = time.monotonic_ns()
        what = "activation" if src_stage < self._stage else "gradient"
        # Filled before the wait: afterwards it would lengthen the wait by the copy.
        if self._is_meta(tensor):
            tensor[: self._meta.numel()].copy_(self._meta)
            return
        if tensor.dim():
            tensor.copy_(self._payloads[what])
        if not self.at_once:
            self._meet("recv", what, start_ns)

    def batch(self, operations: Sequence[Any]) -> list[_Done]:
        """Replaces `deepspeed.comm.batch_isend_irecv`: sends are eager, and returns when every message has arrived.

        The requests that the caller then waits for are complete.
        """
        start_ns = time.monotonic_ns()
        named = [("activation" if each.tensor.requires_grad else "gradient", each) for each in operations]
        receives = [(what, each) for what, each in named if each.op == "irecv"]
        for what, each in receives:
            each.tensor.detach().copy_(self._payloads[what])
        if not self.at_once:
            for what, each in named:
                if each.op == "isend":
                    step, op = self._cursor.take("send", what, each.peer)
                    self.begin().sent(step, op, start_ns)
            self._wait_for([self._cursor.take("recv", what, each.peer) for what, each in receives])
        return [_Done() for _ in operations]

    def broadcast(self, tensor: torch.Tensor, src: int, group: Any = None, **options: Any) -> Any:
        """Replaces `deepspeed.comm.broadcast`: the loss arrives when the last stage has finished its schedule."""
        start_ns = time.monotonic_ns()
        result = self._real_broadcast(tensor, src, group=group, **options)
        if self.at_once or group is not self.loss_group:
            return result
        self._meet("send" if self._sends_loss else "recv", "loss", start_ns)
        self._end_step()
        return result

    def all_reduce(self, tensor: torch.Tensor, op: Any, group: Any = None, async_op: bool = False) -> Any:
        """Replaces the backend's `all_reduce`: the gradients' norm is known when every stage has reached it."""
        start_ns = time.monotonic_ns()
        result = self._real_all_reduce(tensor, op, group, async_op)
        if not self.at_once and group is not None and group is self.norm_group:
            self._meet("sync", "norm", start_ns)
        return result

    def _end_step(self) -> None:
        now_ns = time.monotonic_ns()
        self.step_ends_ns.append(now_ns)
        if self._pace is not None:
            self.begin().pace = self._pace.after(now_ns - self._step_begin_ns - self._waited_ns)
        self._step_begin_ns, self._waited_ns = now_ns, 0

    def _meet(self, verb: Verb, what: str, start_ns: int) -> None:
        step, op = self._cursor.take(verb, what)
        together_ns, end_ns = self.begin().meets(step, op, start_ns)
        if verb == "send" and not self._timing.meets:
            return
        wait_until_ns = together_ns if self._timing.meets else end_ns
        self._begin_wait(wait_until_ns)
        _sleep_until(wait_until_ns)
        while time.monotonic_ns() < end_ns:
            self._scratch.copy_(self._payload)
        self._waited(step, op, start_ns, end_ns)

    def _wait_for(self, messages: Sequence[tuple[int, Op]]) -> None:
        """Sleep until all of a batch have arrived."""
        arrivals_ns = [self.begin().arrival_ns(step, op) for step, op in messages]
        if arrivals_ns:
            self._begin_wait(max(arrivals_ns))
        for (step, op), arrival_ns in zip(messages, arrivals_ns, strict=True):
            begin_ns = time.monotonic_ns()
            _sleep_until(arrival_ns)
            self._waited(step, op, begin_ns, arrival_ns)

    def _begin_wait(self, until_ns: int) -> None:
        if self.on_wait is not None and until_ns > time.monotonic_ns():
            self.on_wait()

    def _waited(self, step: int, op: Op, start_ns: int, arrival_ns: int) -> None:
        end_ns = time.monotonic_ns()
        self._waited_ns += end_ns - start_ns
        self.waits.append(Wait(step, op.slot, op.what, op.micro_batch, start_ns, arrival_ns, end_ns))

    @staticmethod
    def _is_meta(tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.int32 and tensor.numel() == _META_SIZE


def _sleep_until(time_ns: int) -> None:
    left_ns = time_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
