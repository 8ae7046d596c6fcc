"""What a ghost stage trains: blocks of any size, or the network of an example."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from benchmarks.ghost.program import GhostShape
from benchmarks.shared.paths import ROOT

EXAMPLES: dict[str, Callable[[ModuleType, Any], tuple[int, ...]]] = {
    "pretrain": lambda script, options: (options.micro_batch_size, script.TOKENS, options.width),
    "denoise": lambda script, options: (options.micro_batch_size, options.width, script.PIXELS, script.PIXELS),
}
"""Script -> the size of what its stages exchange."""


@dataclass(frozen=True, slots=True)
class Network:
    """A pipeline's layers, data and settings.

    Attributes:
        make: returns DeepSpeed's module of the pipeline, once there is a process group.
        config: DeepSpeed's configuration.
        batches: endless pairs of inputs and targets.
        exchanged: the size of the tensors that stages exchange, float32.
    """

    make: Callable[[], Any]
    config: dict[str, Any]
    batches: Iterator[tuple[torch.Tensor, ...]]
    exchanged: tuple[int, ...]


def blocks(shape: GhostShape, *, size_BH: tuple[int, int], layers: int) -> Network:
    """Blocks of Linear and GELU, `layers` in each rank, that exchange x_BH."""

    def make() -> Any:
        from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule

        return (DualPipeVModule if shape.dualpipev else PipelineModule)(
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
    return Network(make, config, noise(size_BH, seed=shape.seed), size_BH)


def noise(size_BH: tuple[int, int], *, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Endless random inputs and targets, both of this size."""
    generator = torch.Generator().manual_seed(seed)
    batches = [tuple(torch.randn(size_BH, generator=generator) for _ in range(2)) for _ in range(4)]
    return itertools.cycle(batches)


def of_example(name: str, stage: int, arguments: Sequence[str] = ()) -> tuple[GhostShape, Network]:
    """The shape and the network of an example's training script, one stage of which is to be a ghost stage.

    Args:
        name: one of `EXAMPLES`.
        stage: the true stage.
        arguments: the script's.
    """
    script = _load(name)
    options = script.parse_arguments(arguments)
    config = script.make_config(options)
    clipping = bool(config.get("gradient_clipping", True))  # as DeepSpeed does by default
    shape = GhostShape(stages=options.stages, stage=stage, micro_batches=options.micro_batches, clipping=clipping)
    data = script.batches(options.micro_batch_size, options.seed)
    return shape, Network(lambda: script.make_pipeline(options), config, data, EXAMPLES[name](script, options))


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Block(torch.nn.Module):
    """Linear and GELU: x_BH -> y_BH."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden, hidden)

    def forward(self, x_BH: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.linear(x_BH))
