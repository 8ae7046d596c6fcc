"""What `trials shrink` and `trials rank` print."""

import io
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import optuna
import pytest
import torch
from torch import Tensor, nn

from tests.support.logged import logged
from tests.support.paths import ROOT
from trials import cli_shrinking, load_study
from trials.cli import main
from trials.coordinates import Moved, coordinates, slope_of
from trials.search.storage.optuna_storage import open_storage

NARROW = ROOT / "tests" / "support" / "studies" / "narrow.py"
TINY = ROOT / "tests" / "support" / "studies" / "tiny.py"


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """As they were: the command sets them up."""
    with logged():
        yield


def test_shrink(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shrink", str(NARROW)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == [
        "name target surrogate role rate decay eps",
        "0.weight 128 × 20 32 × 20 input 0.25 4 1",
        "0.bias 128 32 vector 0.25 4 1",
        "2.weight 128 × 128 32 × 32 hidden 1 1 1",
    ]
    assert "lr: transfers (lr of the optimizer)" in lines
    assert lines[-1].startswith("parameters 19458 → 1794; multiplications of a forward ÷ 11.1; 10 surrogates have")


def test_shrink_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shrink", str(NARROW), "--scale", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scale"] == 8
    assert found["parameters"][0]["surrogate"] == [16, 20]
    assert any("only 16 units" in each for each in found["warnings"])
    assert found["target_multiplications"] > found["surrogate_multiplications"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([str(TINY)], "the study has no attribute shrink; allowed: shrink = 8 there, or --scale 8"),
        ([str(NARROW), "--scale", "3"], "does not shrink by 3: '0.weight' axis 0 stays 128"),
    ],
)
def test_shrink_refuses(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["shrink", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_coordinate_check_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shrink", str(NARROW), "--coordinates", str(tmp_path / "x.svg")]) == 0
    assert "activations move alike at all widths" in capsys.readouterr().err
    drawn = ElementTree.parse(tmp_path / "x.svg").getroot()
    texts = [each.text or "" for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text.startswith("÷")] == ["÷ 4", "÷ 2", "÷ 1"] * 2
    assert [text.partition(":")[0] for text in texts[-4:]] == ["0", "2", "4", "the output"]
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))) == 2 * 4


def test_the_coordinate_check_finds_where_surrogates_move_otherwise() -> None:
    found = coordinates(load_study(NARROW), 8)
    assert found.scales == [8, 4, 2, 1] and found.steep() == {}
    plain = Moved(found.scales, found.plain, {})
    assert max(map(abs, plain.steep().values())) > 0.5
    assert found.shrunk["4"][-1] == found.plain["4"][-1], "the target has no multipliers"
    assert slope_of([2, 1], [1.0, float("nan")]) == float("inf")


def test_where_the_coordinate_check_is_to_be_drawn_must_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["shrink", str(NARROW), "--coordinates", str(tmp_path / "none" / "x.svg")])
    assert "x.svg: No such file or directory" in capsys.readouterr().err


def test_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank", str(NARROW), "--scales", "2", "4", "--configurations", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 random configurations, trained at full size and as surrogates:"
    assert [line.partition(":")[0] for line in lines[1:]] == ["÷ 2", "÷ 4"]


def test_rank_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli_shrinking, "LINE_EVERY_S", 0.0)
    assert main(["rank", str(NARROW), "--scales", "2", "--configurations", "4"]) == 0
    said = capsys.readouterr()
    told = re.findall(r"(\d) of 8 trials have trained; now: (.*)", said.err)
    assert told[0] == ("0", "full size, epoch 1 of 2, batch 1")
    assert told[-1] == ("6", "÷ 2, epoch 2 of 2, batch 20")
    assert len(told) == 2 * 2 * 20 and "trained; now" not in said.out


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with cli_shrinking._Progress(8) as progress:
        progress.tell(0, "full size, epoch 1 of 2, batch 1")
        time.sleep(0.15)  # a bar is drawn ten times a second at most
        progress.tell(4, "÷ 2, epoch 1 of 2, batch 1")
    assert "4/8" in screen.getvalue() and "÷ 2, epoch 1" in screen.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Normed(type(load_study(NARROW))):
    """Of models that cannot be fused."""

    def model(self, params: dict[str, Any]) -> nn.Module:
        layers = super().model(params)
        layers[2] = nn.utils.parametrizations.weight_norm(layers[2])
        return layers


class Expert(nn.Module):
    """A layer that at first gets all examples, and then those for which a gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.expert = nn.Linear(20, 128), nn.Linear(128, 1, bias=False), nn.Linear(128, 128)
        self.last = nn.Linear(128, 2)
        nn.init.zeros_(self.gate.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        opened = self.gate(y)
        (rows,) = torch.where(opened[:, 0] >= 0)
        return self.last(y.index_add(0, rows, self.expert(y[rows]) * (1 + opened[rows])))


class Routed(type(load_study(NARROW))):
    """Of such models."""

    def model(self, params: dict[str, Any]) -> nn.Module:
        return Expert()


def test_layers_that_get_other_examples_later_are_not_compared() -> None:
    found = coordinates(Routed(), 4)
    assert {"first", "last", "the output"} <= set(found.shrunk) and "expert" not in found.shrunk


def test_models_that_do_not_fuse_are_checked_one_by_one() -> None:
    found = coordinates(Normed(), 4)
    assert found.steep() == {}
    assert set(found.shrunk) == {"0", "2", "4", "the output"}, "a weight is no activation"


def test_transfer_needs_a_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["transfer", str(NARROW), "--directory", str(tmp_path / "none")])
    assert "no journal" in capsys.readouterr().err


def test_transfer_needs_surrogates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = str(tmp_path / "study.journal")
    optuna.create_study(study_name="other", storage=open_storage(storage))
    with pytest.raises(SystemExit):
        main(["transfer", str(NARROW), "--directory", str(tmp_path)])
    assert capsys.readouterr().err == f"trials transfer: there is no study {NARROW.stem}; found: other\n"
