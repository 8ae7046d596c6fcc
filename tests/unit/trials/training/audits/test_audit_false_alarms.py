"""No audit takes rounding for a fault: for every layer, every optimizer and every way of training."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler as lrs

from tests.support.fused_and_solo import Batch, ToyStudy, members
from tests.support.layer_cases import LAYERS, OF_EACH_KIND, batches, before, fresh
from tests.support.own_optimizers import OWN_OPTIMIZERS
from tests.support.rich_study import RichStudy
from tests.support.toy_models import Branching, DataDependent, dcgan_discriminator, dcgan_generator
from trials import Study, TrialGroup
from trials.fusion.layers.norm import FusedBatchNorm
from trials.gate.base import OpenGate
from trials.optim.registry import RULES
from trials.training.audits.audit import Audit

pytestmark = pytest.mark.filterwarnings("ignore:Implicit dimension choice", "ignore:dropout2d. Received a 3D input")

Make = Callable[[int], nn.Module]


def assert_no_alarm(study: Study, size: int = 2, steps: int = 2) -> None:
    """Audit each step, and an evaluation."""
    audit = Audit(study)
    audit.tables = []
    group = TrialGroup(study, members(study, range(size)), OpenGate(), audit)
    for step, batch in enumerate(group.batches(0)):
        if step < steps:
            group.train_step(*batch)
            group.unproven = {"training", "evaluation"}
    group.end_epoch()
    group.evaluate()
    assert audit.mismatches == 0
    assert audit.done >= 2
    assert all(audit.tables), "something was compared"


def toy(make: Make, inputs: list[Tensor], kind: torch.dtype, optimizer: Any = "adamw") -> ToyStudy:
    data = [(x.to(kind) if x.is_floating_point() else x, torch.zeros(len(x))) for x in inputs]
    return ToyStudy(lambda n: make(n).to(kind), optimizer, data)


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_layer(name: str) -> None:
    shape, make = LAYERS[name]
    study = toy(lambda n: nn.Sequential(before(name), fresh(make(n))), batches(*shape), torch.float32, "adam")
    assert_no_alarm(study, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_over_steps(name: str, kind: torch.dtype) -> None:
    shape, make = LAYERS[name]
    study = toy(lambda n: nn.Sequential(before(name), fresh(make(n))), batches(*shape), kind)
    try:
        study.make(0)(study.data[0][0]).sum().backward()
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"PyTorch itself cannot: {error}")
    assert_no_alarm(study, 3, 2)


def convolutional(n: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3)),
        *(nn.ReLU(), nn.Flatten(), nn.Dropout(0.1 * n), nn.Linear(8 * 2 * 2, 3)),
    )


IMAGES = [torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


class Encoder(nn.Module):
    """A small Transformer over token numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.tokens(x)).mean(1))


WORDS = [torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.mark.parametrize("kind", sorted(RULES, key=str))
def test_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    def made(n: int, parameters: Any) -> torch.optim.Optimizer:
        own = [p for p in parameters if p.ndim == 2] if kind.__name__ == "Muon" else parameters
        return kind(own, lr=0.01 * (n + 1))  # type: ignore[call-arg]

    assert_no_alarm(toy(lambda n: Encoder(), WORDS, torch.float32, made), 3, 3)
    assert_no_alarm(
        toy(lambda n: nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Linear(9, 2)), IMAGES, torch.float64, made)
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_convolutions(kind: torch.dtype, optimizer: str) -> None:
    assert_no_alarm(toy(convolutional, IMAGES, kind, optimizer), 3, 3)


@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_optimizer_without_a_rule(name: str) -> None:
    def schedule(n: int, optimizer: torch.optim.Optimizer) -> Any:
        return [] if name == "a tensor as rate" else lrs.StepLR(optimizer, 2, 0.5)

    data = [(x, torch.zeros(len(x))) for x in IMAGES]
    for size in (1, 3):
        assert_no_alarm(RichStudy(convolutional, OWN_OPTIMIZERS[name], data, schedule=schedule, every="step"), size, 3)


@pytest.mark.parametrize("batch", [2, 3])
def test_batch_norm_over_tiny_batches(batch: int) -> None:
    def chaotic(n: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(6)))

    inputs = [torch.randn(batch, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    for kind in (torch.float32, torch.float64):
        assert_no_alarm(toy(chaotic, inputs, kind, "adam"), 3, 4)


class Tenths(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double() / 10


def test_whole_numbers_that_a_chaotic_model_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """No parameter comes before the layer in which rounding decides."""
    run = FusedBatchNorm.run

    def rounded(layer: FusedBatchNorm, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        signs = torch.arange(6).unsqueeze(1) % 2 * 2 - 1  # as a sum in another order might
        return run(layer, x + x * signs * torch.finfo(x.dtype).eps, per_trial, training)

    monkeypatch.setattr(FusedBatchNorm, "run", rounded)
    inputs = [torch.full((6, 4), 3 + batch) for batch in range(2)]

    def chaotic(n: int) -> nn.Module:
        return nn.Sequential(Tenths(), nn.BatchNorm1d(4, eps=1e-34, track_running_stats=False), nn.Linear(4, 3))

    assert_no_alarm(toy(chaotic, inputs, torch.float64, "sgd"))


class Plain(nn.Module):
    """Autocast meets no layer here that gives other types for several trials."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(64, 16), nn.Linear(16, 4), nn.Dropout(0.1 * n)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(functional.gelu(self.first(x.flatten(1)))))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_autocast(precision: torch.dtype, optimizer: str) -> None:
    study = toy(Plain, IMAGES, torch.float32, optimizer)
    study.autocast = precision
    assert_no_alarm(study, 3, 3)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_layers_under_autocast(precision: torch.dtype) -> None:
    for make, inputs in ((convolutional, IMAGES), (lambda n: Encoder(), WORDS)):
        study = toy(make, inputs, torch.float32)
        study.autocast = precision
        assert_no_alarm(study, 3, 3)


def test_whole_model_of_16_bits() -> None:
    assert_no_alarm(toy(Plain, IMAGES, torch.bfloat16), 3, 3)


@pytest.mark.parametrize("to_number", [False, True])
def test_code_that_is_not_traced(to_number: bool) -> None:
    inputs = [torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    assert_no_alarm(toy(lambda n: Branching(to_number), inputs, torch.float32), 3, 3)


def test_a_layer_in_a_loop() -> None:
    inputs = [torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    assert_no_alarm(toy(lambda n: nn.Sequential(DataDependent(), nn.Linear(4, 2)), inputs, torch.float64), 3, 3)


def rich(**settings: Any) -> RichStudy:
    return RichStudy(convolutional, "sgd", [(x, torch.zeros(len(x))) for x in IMAGES], **settings)


def own(n: int, epoch: int) -> Iterator[Batch]:
    for x in IMAGES:
        yield x * (n + 1), torch.zeros(len(x))


RICH: dict[str, dict[str, Any]] = {
    "clipped by norm": {"norm": lambda n: 0.1 * (n + 1)},
    "clipped by value": {"value": lambda n: 0.01},
    "scaled": {"scale": lambda n: torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + n), growth_interval=1)},
    "scaled too much, and clipped": {
        "scale": lambda n: torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1),
        "norm": lambda n: 0.5,
    },
    "schedulers every step": {"schedule": lambda n, o: lrs.OneCycleLR(o, 0.1 * (n + 1), 9), "every": "step"},
    "two schedulers": {"schedule": lambda n, o: [lrs.StepLR(o, 1, 0.5), lrs.ReduceLROnPlateau(o, patience=0)]},
    "batches of their own": {"own": own},
}


@pytest.mark.parametrize("name", RICH)
def test_settings_of_a_study(name: str) -> None:
    assert_no_alarm(rich(**RICH[name]), 3, 3)


class Pair(nn.Module):
    """A GAN whose two parts are trained in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = dcgan_generator(), dcgan_discriminator()

    def judging(self, x: Tensor) -> Tensor:
        return self.judge(self.maker(x).detach()) - self.judge(x.new_ones(len(x), 1, 16, 16))

    def making(self, x: Tensor) -> Tensor:
        return -self.judge(self.maker(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(self.maker(x))


def test_several_optimizers() -> None:
    class Turns(ToyStudy):
        def optimizer(self, params: dict[str, Any], model: Any) -> dict[str, torch.optim.Optimizer]:
            return {
                "judging": torch.optim.Adam(model.judge.parameters(), 0.002 * (params["n"] + 1)),
                "making": torch.optim.SGD(model.maker.parameters(), 0.01, momentum=0.3),
            }

        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return functional.softplus(outputs).mean()

    noise = [torch.randn(4, 6, 1, 1, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    assert_no_alarm(Turns(lambda n: Pair(), batches=[(x, torch.zeros(len(x))) for x in noise]), 3, 3)


class Likelihood(nn.Module):
    """Accepts zeros and ones alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return -torch.distributions.Bernoulli(logits=self.first(x), validate_args=True).log_prob(x)


class Bounded(nn.Module):
    """Accepts parameters up to one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.share, self.first = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and bool((self.share > 1).any()):
            raise ValueError("more than all")
        return self.first(x * self.share)


def test_code_that_refuses_changed_numbers() -> None:
    bits = [(x[0, 0, :6, :4] > 0).float() for x in IMAGES]
    assert_no_alarm(toy(lambda n: Likelihood(), bits, torch.float32, "sgd"), 3, 3)
    assert_no_alarm(toy(lambda n: Bounded(), bits, torch.float64, "sgd"), 3, 1)


def test_one_trial() -> None:
    assert_no_alarm(toy(convolutional, IMAGES, torch.float32), 1, 3)
