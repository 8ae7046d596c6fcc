"""Before a target is trained, `trials transfer` trains the best surrogates again, with real workers."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared.trial_attributes import HISTORY, PARAMS, SOURCE
from tests.support.paths import ROOT
from tests.support.sandbox import wait_for
from tests.support.steady_study import told
from trials import load_study
from trials.best_trials import best_trials, is_surrogate
from trials.confirmation import are_near
from trials.run import INTERRUPTED_STATUS
from trials.search.files.best_weights import ranked
from trials.search.storage.optuna_storage import open_storage
from trials.transfer import CHOICE, CONFIRMS, FIRST_SEED

NARROW = ROOT / "tests" / "support" / "studies" / "narrow.py"

UNLUCKY = """
import torch
from narrow import Narrow

class Unlucky(Narrow):
    \"\"\"With one rate and the first of the further seeds, weights are no numbers.\"\"\"
    direction = "minimize"

    def model(self, params):
        made = super().model(params)
        if torch.initial_seed() == {seed} and params["lr"] == {lr}:
            torch.nn.init.constant_(made[0].weight, float("nan"))
        return made

    def score(self, outputs, targets):
        return self.loss(outputs, targets)
"""

SEVERAL = """
import torch
from torch import nn
from narrow import Narrow

class Several(Narrow):
    \"\"\"Of two objectives, with a category, and a hyperparameter that only one of its choices has.\"\"\"
    trials, directions = 12, ("maximize", "minimize")

    def suggest(self, trial):
        kind = trial.suggest_categorical("kind", ["sgd", "adam"])
        found = {"kind": kind, **super().suggest(trial)}
        return found | ({"momentum": trial.suggest_float("momentum", 0.5, 0.9)} if kind == "sgd" else {})

    def optimizer(self, params, model):
        if params["kind"] == "adam":
            return torch.optim.Adam(model.parameters(), lr=params["lr"])
        return torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=params["momentum"])

    def score(self, outputs, targets):
        return super().score(outputs, targets), self.loss(outputs, targets)
"""

pytestmark = pytest.mark.integration


def command(*arguments: str, directory: Path) -> list[str]:
    return [sys.executable, "-m", "trials", *arguments, "--directory", str(directory)]


def trials(*arguments: str, directory: Path) -> str:
    done = subprocess.run(
        command(*arguments, directory=directory), capture_output=True, text=True, timeout=240, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def study_file(folder: Path, name: str, code: str) -> Path:
    made = folder / f"{name}.py"
    made.write_text(f"import sys; sys.path.insert(0, {str(NARROW.parent)!r})\n{code}")
    return made


def opened(studies: Path, name: str) -> optuna.Study:
    return optuna.load_study(study_name=name, storage=open_storage(str(studies / "study.journal")))


def of(number: int, name: str, again: list[FrozenTrial]) -> list[FrozenTrial]:
    return [each for each in again if each.user_attrs[CONFIRMS] == f"{name}#{number}"]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of `narrow.py`, whose surrogates have been trained."""
    studies = tmp_path_factory.mktemp("searched") / "studies"
    told("run", str(NARROW), "--directory", str(studies))
    return studies


def test_the_best_are_trained_again_and_their_means_choose(tmp_path: Path, searched: Path) -> None:
    studies = tmp_path / "studies"
    shutil.copytree(searched, studies)
    wanted = ("transfer", str(NARROW), "--top", "2", "--directory", str(studies), "--seeds", "2")
    printed, _ = told(*wanted, "--confirm", "4")
    search, again = opened(studies, "narrow"), opened(studies, "narrow-confirm").get_trials()
    best = ranked(search)[:4]
    assert [each.user_attrs[CONFIRMS] for each in again] == [f"narrow#{each.number}" for each in best] * 2
    assert [each.params for each in again] == [each.params for each in best] * 2
    assert all(each.state is TrialState.COMPLETE and len(each.user_attrs[HISTORY]["loss"]) == 2 for each in again)
    means = {each.number: fmean(own.value or 0.0 for own in of(each.number, "narrow", again)) for each in best}
    by_mean = sorted(best, key=lambda each: -means[each.number])
    second = next((each for each in by_mean[1:] if not are_near(each, by_mean[0])), by_mean[1])
    targets = opened(studies, "narrow-target").get_trials()
    assert [each.user_attrs[SOURCE] for each in targets] == [f"narrow#{by_mean[0].number}", f"narrow#{second.number}"]
    for target in targets:
        number = int(target.user_attrs[SOURCE].partition("#")[2])
        assert target.user_attrs[CHOICE].startswith(f"mean score {means[number]:.6g} of 2 further seeds, score ")
        assert f"  trial {number}: {target.user_attrs[CHOICE]}\n" in printed
    assert f"study narrow-confirm: trials {[each.number for each in best]} of narrow again, each with 2" in printed
    assert not (studies / "narrow-confirm" / "best").exists(), "it keeps no weights"
    storage = str(studies / "study.journal")
    shown = best_trials(storage, "narrow-confirm", studies / "narrow-confirm")
    assert is_surrogate(load_study(NARROW), shown[0])
    told(*wanted, "--confirm", "5")
    more = opened(studies, "narrow-confirm").get_trials()
    assert [each.user_attrs[CONFIRMS] for each in more[8:]] == [f"narrow#{ranked(search)[4].number}"] * 2
    assert all(each.state is TrialState.COMPLETE for each in more)


# how failures count, `tests/unit/trials/test_confirmation.py` shows in less time
@pytest.mark.slow
def test_one_that_fails_with_a_further_seed_is_not_chosen(tmp_path: Path) -> None:
    studies, file = tmp_path / "studies", study_file(tmp_path, "unlucky", UNLUCKY.format(seed=FIRST_SEED, lr=0.0))
    told("run", str(file), "--directory", str(studies))
    first = ranked(opened(studies, "unlucky"))[0]
    study_file(tmp_path, "unlucky", UNLUCKY.format(seed=FIRST_SEED, lr=repr(first.params["lr"])))
    wanted = ("--top", "2", "--confirm", "3", "--seeds", "2", "--directory", str(studies))
    printed, _ = told("transfer", str(file), *wanted)
    again = of(first.number, "unlucky", opened(studies, "unlucky-confirm").get_trials())
    assert [each.state for each in again] == [TrialState.FAIL, TrialState.COMPLETE]
    sources = [each.user_attrs[SOURCE] for each in opened(studies, "unlucky-target").get_trials()]
    assert len(sources) == 2 and f"unlucky#{first.number}" not in sources
    assert "5 completed, 0 pruned, 1 failed" in printed


@pytest.mark.slow
def test_several_objectives_categories_and_conditional_hyperparameters(tmp_path: Path) -> None:
    studies, file = tmp_path / "studies", study_file(tmp_path, "several", SEVERAL)
    trials("run", str(file), directory=studies)
    front = ranked(opened(studies, "several"))
    trials("transfer", str(file), "--top", "1", "--confirm", "4", "--seeds", "2", directory=studies)
    (target,) = opened(studies, "several-target").get_trials()
    assert target.state is TrialState.COMPLETE
    names = optuna.get_all_study_names(open_storage(str(studies / "study.journal")))
    if len(front) > 1:
        again = opened(studies, "several-confirm").get_trials()
        assert len(again) == 2 * min(4, len(front))
        assert all(each.state is TrialState.COMPLETE and len(each.values) == 2 for each in again)
        sources = {f"several#{each.number}": each.user_attrs[PARAMS] for each in front}
        assert all(each.user_attrs[PARAMS] == sources[each.user_attrs[CONFIRMS]] for each in again)
        assert target.user_attrs[CHOICE].startswith("mean scores ")
    else:
        assert "several-confirm" not in names


@pytest.mark.slow
def test_an_interrupted_confirmation_goes_on(tmp_path: Path, searched: Path) -> None:
    studies = tmp_path / "studies"
    shutil.copytree(searched, studies)
    wanted = command(*("transfer", str(NARROW), "--top", "1", "--confirm", "6", "--seeds", "20"), directory=studies)
    with subprocess.Popen(wanted, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        wait_for(lambda: any(each.state.is_finished() for each in confirming(studies)), "a surrogate's further seed")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == INTERRUPTED_STATUS
    assert not all(each.state.is_finished() for each in confirming(studies))
    assert subprocess.run(wanted, cwd=ROOT, timeout=240, capture_output=True).returncode == 0
    assert [each.state for each in confirming(studies)] == [TrialState.COMPLETE] * 120
    assert len(opened(studies, "narrow-target").get_trials()) == 1


def confirming(studies: Path) -> list[FrozenTrial]:
    storage = open_storage(str(studies / "study.journal"))
    known = "narrow-confirm" in optuna.get_all_study_names(storage)
    return opened(studies, "narrow-confirm").get_trials() if known else []
