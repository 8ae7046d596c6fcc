"""A DeepSpeed pipeline engine for one stage, in a process group that exists only in this process."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from benchmarks.ghost.program import GhostShape, Op
from benchmarks.ghost.wire import GhostWire


def build_engine(
    shape: GhostShape,
    programs: Sequence[Sequence[Op]],
    *,
    size_BH: tuple[int, int],
    layers: int,
    undo: contextlib.ExitStack,
) -> tuple[Any, GhostWire]:
    """Build the true stage's DeepSpeed engine on a fake process group, with ghosts at the other ends.

    Args:
        shape: the pipeline and the true stage in it.
        programs: one program for each stage.
        size_BH: rows and columns of the tensors that stages exchange.
        layers: blocks in each rank.
        undo: collects the clean-up, even if this raises.

    Returns:
        The engine, and the wire, which still answers everything at once.
    """
    import deepspeed
    import deepspeed.comm.comm
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if get_accelerator().device_name() != "cpu":
        raise RuntimeError("a ghost stage runs on the CPU: set DS_ACCELERATOR=cpu before DeepSpeed is imported")
    _join_fake_group(shape, undo)
    backend = deepspeed.comm.comm.cdb  # below what the hooks wrap
    wire = GhostWire(
        programs,
        shape.stage,
        size_BH=size_BH,
        dtype_id=PipelineEngine.DTYPE_TO_ID[torch.float32],
        broadcast=comm.broadcast,
        all_reduce=backend.all_reduce,
        seed=shape.seed,
    )
    for owner, name in ((p2p, "send"), (p2p, "recv"), (comm, "broadcast"), (backend, "all_reduce")):
        undo.enter_context(mock.patch.object(owner, name, getattr(wire, name)))
    module_class = PipelineModule
    if shape.dualpipev:
        from deepspeed.pipe import DualPipeVModule

        module_class, wire.queues = DualPipeVModule, True
        undo.enter_context(mock.patch.object(comm, "batch_isend_irecv", wire.batch))
    with torch.random.fork_rng(), mock.patch.dict(os.environ, {"LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}):
        torch.manual_seed(shape.seed)
        module = module_class(
            [LayerSpec(_Block, size_BH[1]) for _ in range(layers * shape.stages)],
            num_stages=shape.stages,
            loss_fn=torch.nn.MSELoss(),
            partition_method="uniform",
        )
        config = {
            "train_micro_batch_size_per_gpu": size_BH[0],
            "gradient_accumulation_steps": shape.micro_batches,
            # The incoming gradient is always the same, so a larger rate would let the weights diverge.
            "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "torch_adam": True}},
            "gradient_clipping": 1.0 if shape.clipping else 0.0,
            "steps_per_print": 1_000_000_000,
        }
        engine, *_ = deepspeed.initialize(model=module, config=config)
        undo.callback(engine.destroy)
    table = engine._INSTRUCTION_MAP
    engine._INSTRUCTION_MAP = {
        kind: _after(wire.think, run) if kind.__name__ in ("ForwardPass", "BackwardPass") else run
        for kind, run in table.items()
    }
    feed(engine, size_BH, seed=shape.seed)
    wire.loss_group = engine.grid.get_pipe_parallel_group()
    wire.norm_group = engine.grid.get_model_parallel_group()
    return engine, wire


def feed(engine: Any, size_BH: tuple[int, int], *, seed: int) -> None:
    """Give `engine` batches of this size from the next step on."""
    generator = torch.Generator().manual_seed(seed)
    batches = [tuple(torch.randn(size_BH, generator=generator) for _ in range(2)) for _ in range(4)]
    engine.set_dataiterator(itertools.cycle(batches))


class _Block(torch.nn.Module):
    """Linear and GELU: x_BH -> y_BH."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden, hidden)

    def forward(self, x_BH: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.linear(x_BH))


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
