"""Adapters of `peft` on models of `transformers`, and on plain ones, are what each trial is alone."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.adapters import Logits
from tests.support.common_bits import held, held_bytes, trained
from tests.support.fused_and_alone import Verdict, fused_and_alone
from tests.support.fused_and_solo import OPTIMIZERS, ToyStudy, assert_fused_is_solo, close, members
from tests.support.slow_cases import crossed, others_slow
from tests.support.torchvision_import import make_importable
from trials import TrialGroup
from trials.fusion.compared.peft_configs import Differs
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit
from trials.training.member import group_key

make_importable()
os.environ["HF_HUB_OFFLINE"] = "1"

import peft  # noqa: E402
import transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

SIZES: dict[str, Any] = {"vocab_size": 24, "num_labels": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
GPT2: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
BASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "BERT": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **BERT)),
        ["query", "value"],
    ),
    "GPT-2": (
        lambda: transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**SIZES, **GPT2)),
        ["c_attn", "c_fc"],
    ),
    "Llama": (
        lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, **BERT)),
        ["q_proj", "v_proj", "down_proj"],
    ),
}  # fmt: skip
"""The model, and the layers that are adapted."""

ADAPTERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "alike": lambda n: {"lora_dropout": 0.1},
    "alpha": lambda n: {"lora_alpha": 4 + 5 * n},
    "dropout": lambda n: {"lora_dropout": 0.1 + 0.2 * n},
    "both, rank-stabilized": lambda n: {"lora_alpha": 4 + 5 * n, "lora_dropout": 0.1 + 0.1 * n, "use_rslora": True},
    "without a rule": lambda n: {"use_dora": True},
}
"""What a trial's adapter is configured with."""


def adapted(base: str, number: int, config: Callable[[int], dict[str, Any]] = ADAPTERS["alike"]) -> nn.Module:
    """Trial `number`'s adapter on a base that is the same for all trials."""
    make, targets = BASES[base]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().double()
    given = {"r": 2, "target_modules": targets, **config(number)}
    own = peft.LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, **given)
    return Logits(peft.get_peft_model(model, own)).double()


def study_of(make: Callable[[int], nn.Module], optimizer: str = "adamw") -> ToyStudy:
    stream = torch.Generator().manual_seed(3)
    data = [(torch.randint(1, 24, (3, 6), generator=stream), torch.zeros(3)) for _ in range(2)]
    return ToyStudy(make, lambda n, ps: OPTIMIZERS[optimizer](n % 3, trained(ps)), data)


def assert_alike(verdict: Verdict) -> None:
    assert verdict.share <= 1, f"{verdict.worst} differs by {verdict.share}"
    assert 0 < verdict.blind < 1e-3


@pytest.mark.parametrize(
    ("base", "config"),
    others_slow(
        [(base, config) for base in BASES for config in ADAPTERS if base == "BERT" or "both" in config],
        [("GPT-2", "both, rank-stabilized")],
    ),
)
def test_adapters_are_what_they_are_alone(base: str, config: str) -> None:
    study = study_of(lambda n: adapted(base, n, ADAPTERS[config]))
    verdict = fused_and_alone(study)
    assert_alike(verdict)
    by_rule = {
        how for name, how in verdict.ways if name.endswith((".query.Linear", ".c_attn.Linear", ".q_proj.Linear"))
    }
    assert by_rule == (set() if config == "without a rule" else {"rule FusedLora"})


@pytest.mark.parametrize("base", others_slow(BASES, ["GPT-2"]))
def test_the_base_is_held_once(base: str) -> None:
    size, study = 4, study_of(lambda n: adapted(base, n))
    group = TrialGroup(study, members(study, range(size)), OpenGate())
    group.train_step(*study.data[0])
    model = adapted(base, 0)
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert held(group) == {name for name, p in model.named_parameters() if not p.requires_grad}
    common = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    adapter = sum(4 * p.nbytes for p in own.values())  # with its gradient, and AdamW's two moments
    assert held_bytes(group) <= 1.2 * (common + size * adapter)


@pytest.mark.parametrize(
    "other",
    others_slow(
        [{"r": 3}, {"target_modules": ["query"]}, {"lora_dropout": 0.0}, {"rank_pattern": {"query": 1}}],
        [{"target_modules": ["query"]}],
    ),
)
def test_other_shapes_and_targets_are_other_groups(other: dict[str, Any]) -> None:
    study = study_of(lambda n: adapted("BERT", n, lambda n: {"lora_dropout": 0.1, **(other if n else {})}))
    one, two = members(study, range(2))
    assert group_key(one) != group_key(two)
    assert_alike(fused_and_alone(ToyStudy(lambda n: study.make(1 + n), study.make_optimizer, study.data), size=2))


def test_audits() -> None:
    study = study_of(lambda n: adapted("GPT-2", n, ADAPTERS["both, rank-stabilized"]))
    audit = Audit(study)
    group = TrialGroup(study, members(study, range(3)), OpenGate(), audit)
    for batch in study.data:
        group.train_step(*batch)
    group.evaluate()
    assert audit.done >= 2
    assert not audit.mismatches


def plain(number: int, config: Callable[[int], dict[str, Any]], looks: bool = False) -> nn.Module:
    """An adapter in a model that can be traced, or only be run in a loop."""

    class Looking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() < 1e9 else -x

    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(6, 8), nn.Tanh(), *([Looking()] if looks else []), nn.Linear(8, 4)]
    given = {"r": 2, "target_modules": ["0", "3" if looks else "2"], **config(number)}
    model: nn.Module = peft.inject_adapter_in_model(
        peft.LoraConfig(init_lora_weights=False, **given), nn.Sequential(*layers)
    )
    return model


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize(("config", "size"), crossed(ADAPTERS, [1, 3], 3))
def test_adapters_in_a_graph_and_in_a_loop(config: str, size: int, looks: bool) -> None:
    stream = torch.Generator().manual_seed(1)
    x = [torch.randn(5, 6, generator=stream) for _ in range(2)]
    group = assert_fused_is_solo(
        lambda n: plain(n, ADAPTERS[config], looks), x, lambda n, ps: OPTIMIZERS["adamw"](n, trained(ps)), size=size
    )
    assert len(held(group)) == 4
    assert any("FusedLora" in how for _, how in group.ways()) == (config != "without a rule")


@pytest.mark.parametrize("kind", [None, torch.bfloat16])
def test_scalings_are_rounded_as_alone(kind: torch.dtype | None) -> None:
    """In float32, and in what autocast makes of it."""
    models = [plain(n, lambda n: {"lora_alpha": 1 + 2 * n, "r": 3}).float() for n in range(3)]
    study = ToyStudy(lambda n: models[n], lambda n, ps: OPTIMIZERS["sgd"](n, trained(ps)))
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    x = torch.randn(5, 6)
    with nullcontext() if kind is None else torch.autocast("cpu", kind), torch.no_grad():
        fused = group._fused.train.run(x, torch.device("cpu"))
        for row, model in enumerate(models):
            assert fused[row].dtype == model(x).dtype
            torch.testing.assert_close(fused[row], model(x), rtol=1e-6 if kind is None else 2**-7, atol=1e-6)


def test_code_that_reads_a_number_in_which_trials_differ() -> None:
    class Reads(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.model: Any = adapted("BERT", number, ADAPTERS["alpha"])

        def forward(self, x: Tensor) -> Tensor:
            config = self.model.model.peft_config["default"]
            logits: Tensor = self.model(x) * config.lora_alpha
            return logits

    study = study_of(lambda n: Reads(n))
    verdict = fused_and_alone(study)
    assert_alike(verdict)
    assert verdict.ways[0][1].startswith("loop")


@pytest.mark.parametrize("use", [bool, lambda value: value == 1, lambda value: value + 1, float, hash])
def test_what_differs_has_no_value(use: Callable[[Any], Any]) -> None:
    with pytest.raises(Exception, match=r"trials differ|Differs"):
        use(Differs())


def test_forward_that_others_have_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora.layer import Linear

    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x) * 2
        return y

    monkeypatch.setattr(Linear, "forward", forward)
    study = ToyStudy(
        lambda n: plain(n, ADAPTERS["alike"]).double(), lambda n, ps: OPTIMIZERS["sgd"](n, ps),
        [(torch.randn(5, 6, dtype=torch.float64), torch.zeros(5))],
    )  # fmt: skip
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    fused = group._fused.train.run(study.data[0][0], torch.device("cpu"))
    close(fused[1], study.model({"n": 1})(study.data[0][0]), "output")
    assert not any("FusedLora" in how for _, how in group.ways())
