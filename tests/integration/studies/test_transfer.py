"""The target of a study is trained with the hyperparameters of its best surrogates, by real workers."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
import pytest
import torch

from ds_hooks.shared.trial_attributes import SOURCE
from tests.support.paths import ROOT
from tests.support.sandbox import wait_for
from tests.support.slow_cases import others_slow
from tests.support.steady_study import told
from trials import load_study
from trials.search.files.best_weights import params_of
from trials.search.storage.optuna_storage import open_storage
from trials.shrinking.errors import ShrinkError
from trials.transfer import CHOICE, Source

NARROW = ROOT / "tests" / "support" / "studies" / "narrow.py"

pytestmark = pytest.mark.integration


def trials(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trials", *arguments, "--directory", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)


OWN_WAY = """
import time
from pathlib import Path
from torch import nn
from narrow import Narrow

BEGUN = Path(__file__).with_name("begun")

class OwnWay(Narrow):
    trials, fused = 12, 2

    def suggest(self, trial):
        late = time.monotonic() + 100
        while {waits} and trial.number == 11 and not BEGUN.exists() and time.monotonic() < late:
            time.sleep(0.05)
        return super().suggest(trial)

    def model(self, params, shrink):
        width = 128 // shrink
        return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 2))

    def batches(self, epoch):
        if epoch == 1 and getattr(self.shrink, "is_target", False):
            BEGUN.touch()
        return super().batches(epoch)
"""


def own_way(folder: Path, waits: bool = False) -> Path:
    """A study that divides its widths itself; with `waits`, its last trial begins after the target."""
    made = folder / "own_way.py"
    made.write_text(f"import sys; sys.path.insert(0, {str(NARROW.parent)!r})\n{OWN_WAY.format(waits=waits)}")
    return made


def loaded(printed: str) -> torch.nn.Module:
    """The model that the printed code makes."""
    lines = printed.splitlines()
    code = lines[lines.index("import torch") :][:4]
    names: dict[str, torch.nn.Module] = {}
    exec("\n".join(code), names)
    return names["model"]


def score_of(study: Path, model: torch.nn.Module) -> float:
    own = load_study(study)
    return float(torch.stack([own.score(model(x), y) for x, y in own.validation()]).mean())


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of `narrow.py`, whose surrogates have been trained."""
    studies = tmp_path_factory.mktemp("searched") / "studies"
    told("run", str(NARROW), "--directory", str(studies))
    return studies


def test_surrogates_then_the_target(tmp_path: Path, searched: Path) -> None:
    studies = tmp_path / "studies"
    shutil.copytree(searched, studies)
    transfer = ("transfer", str(NARROW), "--top", "2", "--directory", str(studies))
    printed, _ = told(*transfer, "--save", str(tmp_path / "best"))
    assert "torch.nn.init.zeros_(model.get_parameter('4.weight'))" in printed
    storage = open_storage(str(studies / "study.journal"))
    surrogates = optuna.load_study(study_name="narrow", storage=storage)
    targets = optuna.load_study(study_name="narrow-target", storage=storage).get_trials()
    best = sorted(surrogates.get_trials(), key=lambda trial: -(trial.value or 0))[:2]
    assert [trial.user_attrs[SOURCE] for trial in targets] == [f"narrow#{trial.number}" for trial in best]
    assert [params_of(trial) for trial in targets] == [params_of(trial) for trial in best]
    why = [f"score {trial.value:.6g} in the search, not confirmed" for trial in best]
    assert [trial.user_attrs[CHOICE] for trial in targets] == why, "six trials of two epochs allow no further seeds"
    assert all(trial.state.name == "COMPLETE" for trial in targets)
    saved = max((json.loads(f.read_text()) for f in (tmp_path / "best").glob("*.json")), key=lambda each: each["score"])
    assert saved["is_surrogate"] is False
    model = loaded(printed)
    assert model.get_parameter("2.weight").shape == (128, 128)  # the target's own size
    assert score_of(NARROW, model) == pytest.approx(saved["score"], rel=1e-5)
    told(*transfer, "--confirm", "0")
    assert len(optuna.load_study(study_name="narrow-target", storage=storage).get_trials()) == 2
    shown, _ = told("best", str(NARROW), "--study-name", "narrow-target", "--directory", str(studies))
    assert score_of(NARROW, loaded(shown)) == pytest.approx(saved["score"], rel=1e-5)
    assert "a surrogate's" not in shown


@pytest.mark.parametrize("own", others_slow([False, True], [False]))
def test_the_best_of_a_study_that_shrinks_is_a_surrogate(own: bool, tmp_path: Path, searched: Path) -> None:
    studies, file = tmp_path / "studies" if own else searched, own_way(tmp_path) if own else NARROW
    if own:
        assert trials("run", str(file), directory=studies).returncode == 0
    shown, _ = told("best", str(file), "--save", str(tmp_path / file.stem), "--directory", str(studies))
    saved = json.loads(next((tmp_path / file.stem).glob("trial-*.json")).read_text())
    model = loaded(shown)
    assert model.get_parameter("0.weight").shape == (32, 20)
    assert score_of(file, model) == pytest.approx(saved["score"], rel=1e-5)
    assert saved["is_surrogate"] is True
    said = "These weights are a surrogate's, 4 times narrower than the model itself, for which"
    assert said in shown and json.dumps(saved["params"]) in shown.splitlines()
    assert shown.splitlines()[-1] == f"Next: trials transfer {file} --directory {studies}"
    if own:
        moved = trials("transfer", str(file), "--top", "1", directory=studies).stdout
        assert loaded(moved).get_parameter("0.weight").shape == (128, 20)


@contextmanager
def started(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([sys.executable, "-m", "trials", *arguments], cwd=ROOT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_an_eager_target_begins_after_half_of_the_search(tmp_path: Path) -> None:
    studies, file = tmp_path / "studies", own_way(tmp_path, waits=True)
    with started("run", str(file), "--directory", str(studies)) as search:
        wait_for(lambda: "own_way" in names_in(studies / "study.journal"), "the study")
        moved = trials("transfer", str(file), "--top", "1", "--eager", directory=studies)
        assert moved.returncode == 0, moved.stderr
        assert search.wait(timeout=120) == 0
    storage = open_storage(str(studies / "study.journal"))
    surrogates = optuna.load_study(study_name="own_way", storage=storage).get_trials()
    (target,) = optuna.load_study(study_name="own_way-target", storage=storage).get_trials()
    ends = sorted(trial.datetime_complete for trial in surrogates if trial.datetime_complete is not None)
    assert target.datetime_start is not None and ends[5] <= target.datetime_start < ends[-1]
    assert target.state.name == "COMPLETE"
    assert loaded(moved.stdout).get_parameter("0.weight").shape == (128, 20)


def names_in(journal: Path) -> list[str]:
    return optuna.get_all_study_names(open_storage(str(journal))) if journal.exists() else []


def test_nothing_to_transfer(tmp_path: Path) -> None:
    tiny = ROOT / "tests" / "support" / "studies" / "tiny.py"
    with pytest.raises(ShrinkError, match="the study has no attribute shrink"):
        journal = str(tmp_path / "study.journal")
        Source(study=load_study(tiny), file=tiny, storage=journal, name="tiny", directory=tmp_path).best()
