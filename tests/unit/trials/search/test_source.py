"""Workers of one study that have different versions of its code."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.fused_and_solo import AtOnce
from trials import load_study
from trials.search.source import source_of
from trials.search.worker import SearchWorker, WorkerConfig

STUDY = """
import torch
from beside_the_study import RATE
from trials import Study

class Small(Study):
    trials, epochs, fused = 6, 1, 2
    def suggest(self, trial): return {"lr": RATE}
    def model(self, params): return torch.nn.Linear(1, 1)
    def optimizer(self, params, model): return torch.optim.SGD(model.parameters(), params["lr"])
    def loss(self, outputs, targets): return outputs.mean()
    def batches(self, epoch): return [(torch.ones(1, 1), torch.ones(1))]
    def validation(self): return self.batches(0)
    def score(self, outputs, targets): return outputs.mean()
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "beside_the_study", raising=False)
    (tmp_path / "beside_the_study.py").write_text("RATE = 0.1")
    (tmp_path / "small.py").write_text(STUDY)
    return tmp_path / "small.py"


def said(file: Path, caplog: pytest.LogCaptureFixture, name: str) -> tuple[SearchWorker, str]:
    """A new worker, and what is said about versions when it begins."""
    caplog.clear()
    config = WorkerConfig(
        storage=f"{file.parent}/study.journal", study_name="s", worker=name, directory=file.parent / "s"
    )
    worker = SearchWorker(load_study(file), config, AtOnce())
    return worker, " ".join(message for message in caplog.messages if "another version" in message)


def test_a_worker_with_another_version_says_what_has_changed_and_who_has_not(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, text = said(file, caplog, "one")
    one.ask(2)
    assert not text and not said(file, caplog, "two")[1], "both have the same"
    file.write_text(STUDY.replace('"lr": RATE', '"lr": 2 * RATE'))
    three, text = said(file, caplog, "three")
    assert text == (
        "study 's': small.py has changed since a worker began: trials below 2 were begun by another version; "
        "workers that train with the one before: one, two"
    )
    assert three.ask(1)["trials"][0]["params"] == {"lr": 0.2}, "it goes on"
    assert not said(file, caplog, "four")[1]


def test_modules_beside_the_study_are_its_code(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    said(file, caplog, "one")[0].stop()
    assert list(source_of(load_study(file))) == ["small.py", "beside_the_study.py"]
    (file.parent / "beside_the_study.py").write_text("RATE = 0.3")
    worker, text = said(file, caplog, "one")
    assert text.startswith("study 's': beside_the_study.py has changed") and "workers that" not in text
    worker.stop()
    file.rename(file.with_name("smaller.py"))
    assert "smaller.py has changed" in said(file.with_name("smaller.py"), caplog, "one")[1]


def test_what_is_installed_below_the_study_is_not_its_code(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = file.parent / "venv" / "site-packages" / "installed.py"
    installed.parent.mkdir(parents=True)
    installed.touch()
    other = file.parent / "other.py"
    other.touch()
    for made in (installed, other):
        module = ModuleType(made.stem)
        module.__file__ = str(made)
        monkeypatch.setitem(sys.modules, f"{made.stem}_of_a_test", module)
    assert set(source_of(load_study(file))) == {"small.py", "beside_the_study.py", "other.py"}


def test_what_is_edited_beside_the_study_is_its_code_though_a_link_installs_it(
    file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, installed = file.parent / "src" / "edited", tmp_path_factory.mktemp("venv") / "site-packages"
    for folder in (own, installed):
        folder.mkdir(parents=True)
    (own / "part.py").touch()
    (installed / "edited").symlink_to(own)
    module = ModuleType("edited.part")
    module.__file__ = str(installed / "edited" / "part.py")
    monkeypatch.setitem(sys.modules, "edited.part", module)
    assert "src/edited/part.py" in source_of(load_study(file))
