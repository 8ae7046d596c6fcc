"""K adapters on one frozen base, fused, against plain PyTorch on one adapter with a batch K times as large.

The plain run does the same work on the base, and is the most that fused trials could reach. It trains one adapter where
they train K. Both take AdamW steps in one process with one thread, in short blocks in random order; CPU time counts.
Trials train on the same batch of B examples (`shared`), or each on its own (`own`). GPT-2 asks for values,
which are alike in all trials here; `peft_gpt2_masked` has attention masks and eager attention, and asks for none.

Memory is what a group holds, each storage once, ÷ one base and K adapters, with gradients and optimizer states.
"""

import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.shared.fused_models import gpt
from benchmarks.shared.intervals import ratio_with_ci95
from benchmarks.shared.results import finish, kept_runs, parse
from trials import Study, TrialGroup, build_member
from trials.gate.base import OpenGate

os.environ["HF_HUB_OFFLINE"] = "1"  # all models are made from their configuration

NAME = "adapters"
SIZE = 8
EXAMPLES, TOKENS, RANK = 4, 32, 8
PAIRS, QUICK_PAIRS = 60, 8
BLOCK_S = 0.15
"""The least time of a block."""


class Lora(nn.Module):
    """A low-rank adapter beside a frozen layer."""

    def __init__(self, base: nn.Linear) -> None:
        """Freeze `base`."""
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, RANK, bias=False)
        self.b = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x_B...I`` to ``y_B...O``."""
        y: Tensor = self.base(x) + self.b(self.a(x)) * 2
        return y


def _of_users() -> nn.Module:
    """A GPT with adapters by a user's own code, which is traced."""
    model = gpt(256, TOKENS).requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.endswith(("qkv", "out")):
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, Lora(module))
    return model


class Logits(nn.Module):
    """A model's logits alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Of ``x_BT`` tokens."""
        logits: Tensor = self.model(x).logits
        return logits


class Masked(Logits):
    """The same of a model that is given attention masks, as a tokenizer's batches have them."""

    def forward(self, x: Tensor) -> Tensor:
        """Of ``x_BT`` tokens."""
        logits: Tensor = self.model(x, attention_mask=torch.ones_like(x)).logits
        return logits


def _of_peft(name: str, is_masked: bool = False) -> nn.Module:
    """A model of `transformers` with adapters of `peft`, whose forward runs under one `vmap`."""
    import peft
    import transformers

    given: dict[str, Any] = {"vocab_size": 1000, "num_labels": 10, "pad_token_id": 0}
    if name == "bert":
        given |= {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
        base: nn.Module = transformers.BertForSequenceClassification(transformers.BertConfig(**given))
        targets = ["query", "value"]
    else:
        given |= {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": TOKENS, "bos_token_id": 1, "eos_token_id": 2}
        base, targets = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**given)), ["c_attn"]
    if is_masked:
        base.set_attn_implementation("eager")  # type: ignore[operator]
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=RANK, target_modules=targets, lora_dropout=0.05, init_lora_weights=False
    )
    return (Masked if is_masked else Logits)(peft.get_peft_model(base, config))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own_gpt": _of_users,
    "peft_bert": lambda: _of_peft("bert"),
    "peft_gpt2": lambda: _of_peft("gpt2"),
    "peft_gpt2_masked": lambda: _of_peft("gpt2", is_masked=True),
}


class Adapters(Study):
    """Every model here classifies; the base is the same in all trials."""

    trials, epochs, audit = SIZE, 1, False

    def __init__(self, name: str) -> None:
        self._make = MODELS[name]
        torch.manual_seed(0)
        self.batches_K = [self._batch(EXAMPLES) for _ in range(SIZE)]

    def _batch(self, examples: int) -> tuple[Tensor, Tensor]:
        return torch.randint(1, 64, (examples, TOKENS)), torch.randint(10, (examples,))

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Draw a learning rate."""
        return {"lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True)}

    def model(self, params: dict[str, Any]) -> nn.Module:
        """Make the base of one seed, and draw the trial's adapter."""
        seed = torch.initial_seed()
        torch.manual_seed(0)
        model = self._make()
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.02)
        return model

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        """AdamW over the adapter."""
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=params["lr"])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(outputs, targets)

    def batches(self, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        """The one batch, over and over."""
        return self.batches_K[:1]

    def validation(self) -> Iterable[tuple[Tensor, Tensor]]:
        """The same batch."""
        return self.batches_K[:1]

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Accuracy."""
        return (outputs.argmax(-1) == targets).float().mean()


class _Plain:
    """One adapter in plain PyTorch, on the examples of all trials."""

    def __init__(self, study: Adapters) -> None:
        member = build_member(study, 0, {"lr": 1e-3})
        self._study, self.model = study, member.model.train()
        self._inputs, self._targets = (torch.cat(parts) for parts in zip(*study.batches_K, strict=True))
        self._optimizer = study.optimizer(member.params, member.model)

    def step(self) -> None:
        """Train on the batch."""
        self._optimizer.zero_grad()
        self._study.loss(self.model(self._inputs), self._targets).backward()
        self._optimizer.step()


class _Together:
    """K adapters fused."""

    def __init__(self, study: Adapters, own: bool) -> None:
        members = [build_member(study, row, {"lr": 1e-3 / (1 + row)}) for row in range(SIZE)]
        self.group = TrialGroup(study, members, OpenGate())
        stacked = [torch.stack(parts) for parts in zip(*study.batches_K, strict=True)]
        self._batch = (*stacked, True) if own else (*study.batches_K[0], False)

    def step(self) -> None:
        """Train on the batch."""
        self.group.train_step(*self._batch)  # type: ignore[arg-type]


def main() -> None:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    torch.set_num_threads(1)
    runs = kept_runs(options)
    for name in MODELS:
        for batches in ("own", "shared"):
            scenario = f"{name}, {batches}"
            if options.only in (None, scenario):
                runs.append(_measure(scenario, name, batches == "own", QUICK_PAIRS if options.quick else PAIRS))
    finish(NAME, options, runs, _summary(runs))


def _measure(scenario: str, name: str, own: bool, count: int) -> dict[str, Any]:
    study = Adapters(name)
    plain, together = _Plain(study), _Together(study, own)
    pairs = in_random_blocks(plain.step, together.step, count)
    ratio, ci95 = ratio_with_ci95(pairs)
    memory = _held(together.group) / _least(plain.model)
    print(
        f"{scenario}: {1 + ratio:.2f} of one adapter with {SIZE}x the batch [{1 + ci95[0]:.2f}, {1 + ci95[1]:.2f}]; "
        f"memory {memory:.2f} of one base and {SIZE} adapters",
        file=sys.stderr,
        flush=True,
    )
    found = {"scenario": scenario, "k": SIZE, "ratio": 1 + ratio, "ratio_ci95": [1 + bound for bound in ci95]}
    return {**found, "memory_ratio": memory, "pairs_s": [[round(x, 6) for x in pair] for pair in pairs]}


def in_random_blocks(one: Callable[[], None], other: Callable[[], None], count: int) -> list[tuple[float, float]]:
    """`count` pairs of CPU seconds per step, from blocks of either in random order."""
    draws = random.Random(0)
    for step in (one, other, one, other):
        step()
    steps = {step: max(1, round(BLOCK_S / _time(step, 1))) for step in (one, other)}
    gc.collect()
    pairs = []
    for _ in range(count):
        order = [one, other]
        draws.shuffle(order)
        took = {step: _time(step, steps[step]) for step in order}
        pairs.append((took[one], took[other]))
    return pairs


def _time(step: Callable[[], None], count: int) -> float:
    start_s = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - start_s) / count


def _held(group: TrialGroup) -> int:
    """The bytes of all storages of parameters, gradients and optimizer states."""
    rows = group._fused.rows
    tensors = [*rows.parameters.values(), *(p.grad for p in rows.parameters.values() if p.grad is not None)]
    for _, optimizer in group._optimizers.items():
        tensors += [t for kinds in optimizer._tables().values() for t in kinds.values()]  # type: ignore[attr-defined]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _least(model: nn.Module) -> int:
    """One base and K adapters, each with its gradient and two moments."""
    return sum(p.nbytes * (4 * SIZE if p.requires_grad else 1) for p in model.parameters())


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "worst_ratio": min(run["ratio"] for run in runs),
        "worst_memory_ratio": max(run["memory_ratio"] for run in runs),
        **{f"ratio {run['scenario']}": run["ratio"] for run in runs},
    }


if __name__ == "__main__":
    main()
