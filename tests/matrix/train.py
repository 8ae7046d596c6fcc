"""Trains a small Transformer in one of the matrix's ways: an ordinary training script, but for `--patient`."""

import argparse
import contextlib
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.matrix.modes import EVERY, MICRO_BATCHES, MODES, STEPS, WAITS_FROM, Mode
from tests.support.patient import may_be_squeezed, wait_until_squeezed

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from pretrain import VOCABULARY, Block, Embedding, Head, batches, loss_of

WIDTH = 64
BATCH = 4
BLOCKS = 4


class Tied(nn.Embedding):
    """Bytes as vectors, and vectors as logits of bytes."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)


def logits_of(tied: Tied, x_BTD: Tensor) -> Tensor:
    return x_BTD @ tied.weight.T


def make_model(mode: Mode) -> nn.Module:
    blocks = [LayerSpec(Block, WIDTH) for _ in range(BLOCKS)]
    if mode.is_dualpipev:
        from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

        # it takes modules of one shape
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)]
        return DualPipeVModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    if mode.is_tied:
        first, last = TiedLayerSpec("bytes", Tied), TiedLayerSpec("bytes", Tied, forward_fn=logits_of)
    else:
        first, last = LayerSpec(Embedding, WIDTH), LayerSpec(Head, WIDTH)
    recompute: dict[str, Any] = {}
    if mode.checkpoints:  # blocks alone: where no input has a gradient, as before the first layer, nothing would have
        recompute = {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Block"]}
    if mode.checkpoints == "torch":
        recompute["activation_checkpoint_func"] = partial(checkpoint, use_reentrant=True)
    return PipelineModule([first, *blocks, last], num_stages=2, loss_fn=loss_of, **recompute)


def make_data(mode: Mode, replica: int) -> Any:
    if not mode.is_dualpipev:
        return batches(BATCH, replica)
    generator = torch.Generator().manual_seed(replica)
    return ((x, x.flip(1)) for x in iter(lambda: torch.randn(BATCH, WIDTH, generator=generator), None))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--patient", action="store_true", help="wait until every rank has been squeezed")
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    mode = MODES[options.mode]
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    torch.manual_seed(torch.distributed.get_rank())
    model = make_model(mode)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 1e-3}},
        "steps_per_print": 10**9,
        **mode.config,
    }
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    replica = engine.grid.get_data_parallel_id()
    # for evaluation its own data, so that training's are the same whoever looks ahead
    data, held_out = make_data(mode, replica), make_data(mode, 100 + replica)
    found: list[float] = []
    must_wait = options.patient
    with contextlib.ExitStack() as ends:
        saved = ends.enter_context(tempfile.TemporaryDirectory())
        if mode.interrupts:
            where = [saved]
            torch.distributed.broadcast_object_list(where, src=0)
            saved = where[0]
        for step in range(1, STEPS + 1):
            since = step - WAITS_FROM[engine.stage_id]
            if must_wait and since >= 0 and since % 2 == 0:
                peer = engine.grid.stage_to_global(1 - engine.stage_id)
                must_wait = not (may_be_squeezed(peer, step) and wait_until_squeezed(peer))
            found.append(float(engine.train_batch(data_iter=data)))
            if mode.interrupts and step % EVERY == 0:
                found.append(float(engine.eval_batch(held_out)))
                engine.save_checkpoint(saved)
        if torch.distributed.get_rank() == 0:
            options.losses.write_text("".join(f"{loss.hex()}\n" for loss in found), encoding="ascii")
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
