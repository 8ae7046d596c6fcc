"""A DeepSpeed pipeline engine for one stage, in a process group that exists only in this process."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from benchmarks.ghost.network import Network
from benchmarks.ghost.program import GhostShape, Op
from benchmarks.ghost.wire import GhostWire


def build_engine(
    shape: GhostShape,
    programs: Sequence[Sequence[Op]],
    network: Network,
    undo: contextlib.ExitStack,
) -> tuple[Any, GhostWire]:
    """Build the true stage's DeepSpeed engine on a fake process group, with ghosts at the other ends.

    Args:
        shape: the pipeline and the true stage in it.
        programs: one program for each stage.
        network: what is trained.
        undo: collects the clean-up, even if this raises.

    Returns:
        The engine, and the wire, which still answers everything at once.
    """
    import deepspeed
    import deepspeed.comm.comm
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if get_accelerator().device_name() != "cpu":
        raise RuntimeError("a ghost stage runs on the CPU: set DS_ACCELERATOR=cpu before DeepSpeed is imported")
    _join_fake_group(shape, undo)
    backend = deepspeed.comm.comm.cdb  # below what the hooks wrap
    wire = GhostWire(
        programs,
        shape.stage,
        size=network.exchanged,
        dtype_id=PipelineEngine.DTYPE_TO_ID[torch.float32],
        broadcast=comm.broadcast,
        all_reduce=backend.all_reduce,
        seed=shape.seed,
    )
    for owner, name in ((p2p, "send"), (p2p, "recv"), (comm, "broadcast"), (backend, "all_reduce")):
        undo.enter_context(mock.patch.object(owner, name, getattr(wire, name)))
    if shape.dualpipev:
        undo.enter_context(mock.patch.object(comm, "batch_isend_irecv", wire.batch))
    with torch.random.fork_rng(), mock.patch.dict(os.environ, {"LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}):
        torch.manual_seed(shape.seed)
        engine, *_ = deepspeed.initialize(model=network.make(), config=network.config)
        undo.callback(engine.destroy)
    table = engine._INSTRUCTION_MAP
    engine._INSTRUCTION_MAP = {
        kind: _after(wire.think, run) if kind.__name__ in ("ForwardPass", "BackwardPass") else run
        for kind, run in table.items()
    }
    engine.set_dataiterator(network.batches)
    wire.loss_group = engine.grid.get_pipe_parallel_group()
    wire.norm_group = engine.grid.get_model_parallel_group()
    return engine, wire


def _after(first: Callable[[], None], run: Callable[..., None]) -> Callable[..., None]:
    def instruction(*args: Any, **kwargs: Any) -> None:
        first()
        run(*args, **kwargs)

    return instruction


def _join_fake_group(shape: GhostShape, undo: contextlib.ExitStack) -> None:
    """Make this process rank `shape.stage` of a process group that exists only in this process."""
    import deepspeed
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # As attributes, these two names are other things: the package imports `torch` itself, and star-imports `comm`.
    backend_state = importlib.import_module("deepspeed.comm.comm")
    torch_backend = importlib.import_module("deepspeed.comm.torch")
    if distributed.is_initialized():
        raise RuntimeError("a process group exists already: a process can be one ghost stage at a time")
    distributed.init_process_group("fake", rank=shape.stage, world_size=shape.stages, store=FakeStore())
    undo.callback(distributed.destroy_process_group)
    undo.callback(setattr, backend_state, "cdb", None)
    # DeepSpeed's shared-memory all-reduce takes a minute to compile, then waits for ranks that do not exist.
    with mock.patch.object(torch_backend, "build_shm_op", lambda: None):
        deepspeed.init_distributed(verbose=False, auto_mpi_discovery=False)
