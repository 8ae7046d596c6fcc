"""No audit takes the form of what a layer returns, or keeps, for a fault."""

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import ToyStudy, members
from tests.support.keeping import Base, inputs, study_of
from trials import TrialGroup
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit


class Cells(nn.Module):
    """The hidden state is computed from the cell's, which the layer returns too."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 5)
        for step in range(x.shape[1]):
            h, c = self.cell(x[:, step], (h, c))
        return self.out(h)


class Growing(Base):
    """A table in a buffer that is not saved: made for three positions, and again for longer inputs."""

    cos: Tensor

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.register_buffer("cos", self.table(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.cos) < x.shape[1]:
            self.register_buffer("cos", self.table(x.shape[1]), persistent=False)
        return self.b(self.a(x) * self.cos[: x.shape[1]]).mean(1)


class Ragged(Base):
    """A layer on sequences of several lengths."""

    def forward(self, x: Tensor) -> Tensor:
        ragged = torch.nested.as_nested_tensor([each[: 1 + index % 2] for index, each in enumerate(x)])
        return self.b(self.a(ragged).to_padded_tensor(0.0)).mean(1)


class Slope(Base):
    """Layers inside transforms, whose values nothing may keep."""

    def forward(self, x: Tensor) -> Tensor:
        def energy(one: Tensor) -> Tensor:
            return self.b(self.a(one).tanh()).sum()

        slope_B = torch.func.vmap(torch.func.grad(energy))(x)
        _, along = torch.func.jvp(lambda y: self.a(y).tanh(), (x,), (torch.ones_like(x),))
        return self.b(self.a(x) + slope_B.square().mean() + along).mean(1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", [Cells, Growing, Ragged, Slope])
def test_it_is_no_fault(kind: type[nn.Module]) -> None:
    study: ToyStudy = study_of(kind, 3, 5, 4)
    audit = Audit(study)
    audit.tables = []
    group = TrialGroup(study, members(study, range(2)), OpenGate(), audit)
    for x in inputs(3, 5, 4):
        group.train_step(x, torch.zeros(len(x)))
        group.unproven = {"training", "evaluation"}
    group.evaluate()
    assert (audit.mismatches, audit.done) == (0, 6)
