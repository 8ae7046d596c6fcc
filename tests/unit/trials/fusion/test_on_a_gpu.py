"""On a GPU, where PyTorch has other kernels, each trial computes and draws what it does alone."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.layer_cases import LAYERS, batches, before, fresh
from trials import fuse
from trials.fusion.own_code.streams import drawing_from, seeded_recurrence
from trials.fusion.registry import RULES
from trials.fusion.rows import generator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Implicit dimension choice", "ignore:dropout2d. Received a 3D input"),
]

TRIALS, STEPS = 3, 2
APART = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Type -> how far apart results may be, as a share of the largest number. Other masks are apart by a third of it."""

Make = Callable[[int], nn.Module]


@pytest.fixture(autouse=True)
def whole_products() -> Iterator[None]:
    """Convolutions in whole float32: what TF32 rounds off would hide small faults."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def assert_fused_is_alone(make: Make, inputs: list[Tensor], kind: torch.dtype = torch.float64) -> None:
    """Outputs, gradients, buffers and the next random numbers of some steps of each trial."""
    device = torch.device("cuda", torch.cuda.current_device())
    models = []
    for number in range(TRIALS):
        torch.manual_seed(number)
        models.append(make(number).to(device, kind))
    fused = fuse(models, [generator(device, 100 + number) for number in range(TRIALS)])
    streams = [generator(device, 100 + number) for number in range(TRIALS)]
    for step in range(STEPS):
        given = inputs[step % len(inputs)]
        x = given.to(device, kind if given.is_floating_point() else None)
        y_K = fused(x)
        fused.zero_grad()
        torch.stack([loss_of(y) for y in y_K]).sum().backward()
        for row, (model, stream) in enumerate(zip(models, streams, strict=True)):
            what = f"step {step}, trial {row}"
            model.zero_grad()
            with drawing_from(stream):
                y = model(x)
                loss_of(y).backward()
            assert_close(y_K[row], y, f"{what}: the output")
            # of 16 bits, what cancels behind a norm says nothing
            for name, parameter in model.named_parameters() if kind.itemsize > 2 else ():
                whole = fused.rows.parameters[name].grad
                assert parameter.grad is not None and whole is not None
                assert_close(whole[row], parameter.grad, f"{what}: the gradient of {name}")
            for name, buffer in model.named_buffers():
                assert_close(fused.rows.buffers[name][row], buffer, f"{what}: {name}")
            own = fused.rows.generators[row]
            assert torch.equal(own.get_state(), stream.get_state()), f"{what}: it goes on with other random numbers"


def loss_of(y: Tensor) -> Tensor:
    return (y.double().sin() * y.double()).mean()


def assert_close(fused: Tensor, alone: Tensor, what: str) -> None:
    assert fused.shape == alone.shape and fused.dtype == alone.dtype, what
    if not alone.numel():
        return
    largest = max(1e-3, float(alone.detach().abs().max()))
    apart = float((fused.detach().double() - alone.detach().double()).abs().max()) / largest
    assert apart <= APART.get(alone.dtype, 0.0), f"{what} is apart by {apart:.1e}"


@pytest.mark.parametrize("name", LAYERS)
def test_layer_behind_another(name: str) -> None:
    shape, make = LAYERS[name]
    assert_fused_is_alone(lambda n: nn.Sequential(before(name), fresh(make(n))), batches(*shape))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in LAYERS if "ropout" in name or "RReLU" in name or "rrelu" in name])
def test_random_layer_in_less_precision(name: str, kind: torch.dtype) -> None:
    shape, make = LAYERS[name]
    assert_fused_is_alone(lambda n: nn.Sequential(before(name), make(n)), batches(*shape), kind)


class WithDevice(nn.Module):
    """A layer without tensors, on the device of a parameter."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.place = nn.Parameter(torch.zeros((), device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


@pytest.mark.parametrize("shape", [(64, 64), (63, 33), (5, 7), (1, 1), (4, 3, 2, 6), (1000, 130)], ids=str)
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dropout_is_the_same_in_every_bit(shape: tuple[int, ...], kind: torch.dtype) -> None:
    x = torch.randn(*shape, device="cuda", dtype=kind)
    models = [WithDevice(nn.Dropout(rate)) for rate in (0.1, 0.0, 0.5, 1.0, 0.9)]
    streams = [generator(x.device, number) for number in range(len(models))]
    y_K = fuse(models, [generator(x.device, number) for number in range(len(models))])(x)
    for y, model, stream in zip(y_K, models, streams, strict=True):
        with drawing_from(stream):
            assert torch.equal(y, model(x))


class Attends(nn.Module):
    """Attention by PyTorch's own function, with dropout."""

    def __init__(self, causal: bool, masked: bool) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)
        self.causal, self.masked = causal, masked

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril() if self.masked else None
        rate = 0.3 if self.training else 0.0
        return functional.scaled_dot_product_attention(q, k, v, mask, rate, self.causal)


MODELS: dict[str, Make] = {
    "a transformer's layer": lambda n: nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1 * n, batch_first=True),
    "the same, norms first": lambda n: nn.TransformerEncoderLayer(32, 2, 64, 0.2, batch_first=True, norm_first=True),
    "attention": lambda n: Attends(causal=False, masked=False),
    "causal attention": lambda n: Attends(causal=True, masked=False),
    "masked attention": lambda n: Attends(causal=False, masked=True),
    "convolutions": lambda n: nn.Sequential(
        nn.Unflatten(1, (4, 4)), nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(8, 4, 3, padding=1), nn.Dropout2d(0.3), nn.Flatten(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, kind: torch.dtype) -> None:
    assert_fused_is_alone(MODELS[name], batches(4, 16, 32), kind)


class Recurs(nn.Module):
    """A recurrent layer's outputs, without its states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


RECURRENT = pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])


def recurs(kind: type[nn.LSTM], dropout: float) -> Make:
    return lambda n: Recurs(kind(8, 6, num_layers=2, batch_first=True, dropout=dropout * n))


@RECURRENT
def test_recurrent_layer(kind: type[nn.LSTM]) -> None:
    assert_fused_is_alone(recurs(kind, 0.0), batches(3, 5, 8))


@RECURRENT
def test_recurrent_layer_that_drops(kind: type[nn.LSTM]) -> None:
    with seeded_recurrence():
        assert_fused_is_alone(recurs(kind, 0.3), batches(3, 5, 8))


@RECURRENT
def test_recurrent_layer_in_a_loop_over_trials(kind: type[nn.LSTM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, kind)
    assert_fused_is_alone(recurs(kind, 0.0), batches(3, 5, 8))
