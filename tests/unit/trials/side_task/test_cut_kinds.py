"""Studies of many kinds are ended in the middle of an epoch, and give what they would have given, bit for bit."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

from tests.support.fused_and_solo import Batch
from tests.support.interrupted import BATCHES, Asked, Long, result, trained, work
from tests.support.side_task_runs import data
from tests.support.slow_cases import others_slow
from trials.gate.base import StopRequested


class Kind(Long):
    epochs = 2
    rungs = (1,)

    def __init__(self) -> None:
        super().__init__(lambda n: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2)), adam)
        self.data = [(x.float(), y) for x, y in data(0, 2)]

    def batches(self, epoch: int) -> Iterable[Batch]:
        return [(x.float(), y) for x, y in data(epoch, BATCHES)]


def adam(n: int, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    first, *others = parameters
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.1}, {"params": others}]
    return torch.optim.Adam(groups, lr=0.01 * (n + 1), amsgrad=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3, momentum=None), nn.Linear(8, 2)
        self.gru = nn.GRU(1, 4, 2, dropout=0.3, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.gru(self.norm(x)[..., None])[0][:, -1])
        return y


class InHalf(Kind):
    """Recurrent, in bfloat16 with loss scales, several batches a step, and rates and momenta of each step."""

    autocast, accumulate, scheduler_every = torch.bfloat16, 2, "step"

    def model(self, params: dict[str, Any]) -> nn.Module:
        return Recurrent()

    def scaler(self, params: dict[str, Any]) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + 8 * params["n"]), growth_interval=2)

    def scheduler(self, params: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
        return lrs.OneCycleLR(optimizer, max_lr=0.1, total_steps=7)


class Rivals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2)), nn.Linear(3, 2)

    def criticize(self, x: Tensor) -> Tensor:
        y: Tensor = self.judge(self.maker(x).detach())
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.judge(self.maker(x))
        return y


class TwoOptimizers(Kind):
    """With several objectives, and metrics of the whole validation set."""

    directions = ("maximize", "minimize")

    def model(self, params: dict[str, Any]) -> nn.Module:
        return Rivals()

    def optimizer(self, params: dict[str, Any], model: Any) -> dict[str, torch.optim.Optimizer]:
        judge = torch.optim.SGD(model.judge.parameters(), lr=0.01, momentum=0.3 * params["n"])
        return {"criticize": judge, "forward": torch.optim.RMSprop(model.maker.parameters(), centered=True)}

    def score(self, outputs: Tensor, targets: Tensor) -> Any:
        return outputs.mean(), outputs.square().mean()

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        return {"median": outputs.median()}


class OfSizes(Kind):
    """Trials of unlike batch sizes, one of which leaves a remainder; they are surrogates."""

    batch_params, shrink = ("size",), 2

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {"n": trial.number, "size": (2, 5)[trial.number % 2]}

    def model(self, params: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 2))

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def batches(self, epoch: int, params: dict[str, Any]) -> Iterable[Batch]:  # type: ignore[override]
        x = torch.randn(11, 3, generator=torch.Generator().manual_seed(epoch))
        return [(each, torch.zeros(len(each))) for each in x.split(params["size"])]


class OneByOne(Kind):
    """Neither model nor loss can be mapped, and both draw random numbers."""

    def model(self, params: dict[str, Any]) -> nn.Module:
        class Looks(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                y = super().forward(x) + 0.1 * torch.randn(len(x), 2)
                return y if y.sum().item() < 1e9 else x

        return Looks(3, 2)

    def loss(self, outputs: Tensor, targets: Tensor, params: dict[str, Any]) -> Tensor:  # type: ignore[override]
        noise = torch.rand(2) if params["n"] > 1 else 0.5
        return (outputs + noise).square().mean()


KINDS: dict[str, Callable[[], Kind]] = {made.__name__: made for made in (InHalf, TwoOptimizers, OfSizes, OneByOne)}


@pytest.mark.parametrize("kind", others_slow(KINDS, ["TwoOptimizers", "OneByOne"]))
def test_one_that_is_asked_to_end_gives_the_same(kind: str, tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("whole", "parts")]
    for directory in directories:
        directory.mkdir()
    gate = Asked()
    worker, reported, _ = work(KINDS[kind](), directories[0], gate)
    wanted, all_work = result(worker, directories[0]), trained(reported)
    assert all(scores.keys() == {1, 2} or not scores for scores, _ in wanted[0])
    _, first, ended = work(KINDS[kind](), directories[1], Asked(gate.asked // 3))
    _, second, ended_again = work(KINDS[kind](), directories[1], Asked(gate.asked // 4))
    assert isinstance(ended, StopRequested) and isinstance(ended_again, StopRequested)
    worker, third, _ = work(KINDS[kind](), directories[1])
    assert sum(map(trained, (first, second, third))) == all_work, "nothing is trained twice"
    found = result(worker, directories[1])
    assert found[0] == wanted[0] and found[1].keys() == wanted[1].keys() and wanted[1]
    for name, weights in wanted[1].items():
        assert all(torch.equal(found[1][name][key], value) for key, value in weights.items()), name
