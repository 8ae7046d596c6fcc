"""The head of a surrogate whose weight is the embedding too."""

from torch import Tensor, nn


class TiedHead(nn.Linear):
    """A `Linear` whose result is multiplied, because the weight has an embedding's size (TP5's third form).

    Attributes:
        multiplier: the target's width ÷ the surrogate's.
    """

    multiplier: float = 1.0

    def forward(self, input: Tensor) -> Tensor:
        """See `nn.Linear`; the bias is not multiplied."""
        return nn.functional.linear(input * self.multiplier, self.weight, self.bias)


def make_tied(head: nn.Linear, multiplier: float) -> None:
    """Let `head` multiply its result."""
    head.__class__ = TiedHead
    assert isinstance(head, TiedHead)
    head.multiplier = multiplier
