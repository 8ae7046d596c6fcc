"""The masks of all trials by one kernel are those that PyTorch's kernel draws for each trial alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.fused_and_solo import ToyStudy, members, same_bits
from tests.support.triton_interpreter import run_with_triton
from trials import TrialGroup
from trials.fusion.layers import philox
from trials.fusion.layers.dropout import Masks
from trials.fusion.rows import generator
from trials.gate.base import OpenGate
from trials.training.member import build_on

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RATES = 0.1, 0.0, 0.5, 1.0, 0.999
SHAPES = [(1,), (2,), (3, 3), (4,), (255,), (257, 2), (1024,), (33, 63), (700, 1000), (3001, 1001), (1 << 22,)]


def test_the_kernel_draws_what_is_published() -> None:
    run_with_triton("the kernel of the masks", "tests.support.philox_reference")


def both(x_K: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, list[torch.Generator]]:
    """What our kernel and PyTorch's give, in that order, and the streams afterwards."""
    found, streams = [], []
    for ours in (True, False):
        own = [generator(x_K.device, 2**63 + number) for number in range(len(RATES))]
        for each in own:
            each.set_offset(4 * (2**32 - 2))
        if not ours:
            monkeypatch.setattr(philox, "noise", lambda *_: None)
        masks = Masks(RATES, own)
        found.append(torch.stack([masks.drop(x_K) for _ in range(3)]))
        streams += own
    monkeypatch.undo()
    return found[0], found[1], streams


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_bit(shape: tuple[int, ...], kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    x_K = torch.randn(len(RATES), *shape, device="cuda", dtype=kind)
    ours, theirs, streams = both(x_K, monkeypatch)
    assert torch.equal(ours, theirs)
    half = len(streams) // 2
    assert [s.get_offset() for s in streams[:half]] == [s.get_offset() for s in streams[half:]]
    assert philox._layouts[x_K.device, kind, x_K[0].numel()], "it was PyTorch's kernel"


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": lambda x: x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2]),
    "transposed": lambda x: x.mT.contiguous().mT,
    "gaps": lambda x: torch.cat([x, x], -1)[..., ::2],
    "one for all": lambda x: x[:1].expand_as(x),
    "trials last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("order", ORDERS)
def test_orders_in_memory(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x_K = ORDERS[order](torch.randn(len(RATES), 3, 8, 6, 10, device="cuda"))
    ours, theirs, _ = both(x_K, monkeypatch)
    assert torch.equal(ours, theirs)


class Attends(nn.Module):
    """Draws by our kernel and, in attention, by PyTorch's."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 24), nn.Dropout(rate), nn.Linear(8, 3)
        self.rate = 0.25

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.drop(self.first(x)).view(-1, 1, 3, 2, 4).unbind(2)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.rate if self.training else 0.0)
        out: Tensor = self.last(self.drop(y.flatten(1)))
        return out


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "alike": lambda n: nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.3), nn.Linear(40, 3)),
    "some draw": lambda n: nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.2 * n), nn.Dropout(0.5), nn.Linear(40, 3)),
    "functional": lambda n: Functional(),
    "attention": lambda n: Attends(0.1 + 0.1 * n),
    "nothing": lambda n: nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)),
}


class Functional(nn.Module):
    """Calls dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(functional.dropout(x, 0.4, self.training))


class Plain(ToyStudy):
    """Whose loss can be traced."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", MODELS)
def test_steps_by_graph(name: str) -> None:
    """Weights and streams are those of ordinary steps, with masks by PyTorch's kernel or ours."""
    torch.cuda.set_stream(torch.cuda.Stream())
    groups = []
    for graphs in (True, False):
        study = Plain(MODELS[name], "adamw")
        study.cuda_graphs = graphs
        build_on(study, torch.device("cuda", 0))
        groups.append(TrialGroup(study, members(study, range(3)), OpenGate()))
    x, y = torch.randn(5, 6, device="cuda"), torch.randn(5, 3, device="cuda")
    for step in range(14):
        for group in groups:
            group.train_step(x + step, y)
        assert same_bits(groups[0].losses_K(), groups[1].losses_K()), step
        for row in range(3):
            assert same_bits(groups[0].extract(row), groups[1].extract(row)), step
    assert groups[0].graphs_ns(), "no graph was used"
