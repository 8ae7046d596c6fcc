"""Loading a study says what is wrong with it."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trials import StudyError, load_study

GOOD = """
from trials import Study

class Mine(Study):
    trials = 3
    epochs = 5
    def suggest(self, trial): return {}
    def model(self, params): ...
    def optimizer(self, params, model): ...
    def loss(self, outputs, targets): ...
    def batches(self, epoch): ...
    def validation(self): ...
    def score(self, outputs, targets): ...
"""


SEVERAL = "directions = ('maximize', 'minimize')"


def with_settings(settings: str) -> str:
    return GOOD.replace("epochs = 5", f"epochs = 5; {settings}")


def pruner(made: str) -> str:
    return f"    def pruner(self): import optuna; return {'optuna.pruners.' * made[0].isupper()}{made}\n"


def sampler(made: str) -> str:
    return f"    def sampler(self): import optuna; return {'optuna.samplers.' * made[0].isupper()}{made}\n"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(directory: Path, text: str, name: str = "mine.py") -> Path:
    file = directory / name
    file.write_text(text)
    return file


def test_good_study(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, GOOD))
    assert (study.trials, study.fused, study.rows, study.epochs, study.rungs, study.direction) == (
        3,
        "auto",
        16,
        5,
        (),
        "maximize",
    )
    assert study.seed({}, 7) == 7


def test_helpers_beside_the_study(tmp_path: Path) -> None:
    write(tmp_path, "TRIALS = 9\n", "my_own_helper.py")
    text = "import my_own_helper\n" + GOOD.replace("trials = 3", "trials = my_own_helper.TRIALS")
    assert load_study(str(write(tmp_path, text))).trials == 9


def test_same_file_name_in_two_directories(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        file = write(tmp_path / str(number), GOOD.replace("trials = 3", f"trials = {number}"))
        assert load_study(file).trials == number


BAD = {
    "syntax": ("x = 1\ny = (\n", "line 2: SyntaxError: "),
    "import": ("x = 1\nimport no_such_module_of_ours\n", "line 2: ModuleNotFoundError: .*no_such_module_of_ours"),
    "failure": ("def f():\n    raise KeyError('k')\nf()\n", "line 2: KeyError: 'k'"),
    "exit": ("raise SystemExit(3)\n", "line 1: SystemExit: 3"),
    "none": ("from trials import Study\n", "defines no subclass of trials.Study; exactly one"),
    "several": (GOOD + "class Other(Mine): pass\n", r"several studies \(Mine, Other\); exactly one"),
    "methods": (
        GOOD.replace("def loss", "def los").replace("def score", "def scor"),
        "class Mine lacks the methods loss, score",
    ),
    "trials": (GOOD.replace("trials = 3", ""), "class Mine lacks the attribute 'trials', a positive whole number"),
    "epochs": (GOOD.replace("epochs = 5", "epochs = 0"), "epochs = 0; allowed: a positive whole number"),
    "bool": (GOOD.replace("epochs = 5", "epochs = True"), "epochs = True; allowed: a positive whole number"),
    "fused": (GOOD.replace("epochs = 5", "epochs = 5; fused = 1.5"), "fused = 1.5; allowed"),
    "rungs": (GOOD.replace("epochs = 5", "epochs = 5; rungs = (2, 2)"), r"rungs = \(2, 2\); allowed: increasing"),
    "late rung": (GOOD.replace("epochs = 5", "epochs = 5; rungs = (2, 6)"), "increasing epochs from 1 to epochs = 5"),
    "rung": (GOOD.replace("epochs = 5", "epochs = 5; rungs = 2"), "rungs = 2; allowed"),
    "mix": (GOOD.replace("epochs = 5", "epochs = 5; mix_epochs = 1"), "mix_epochs = 1; allowed: True or False"),
    "audit": (GOOD.replace("epochs = 5", "epochs = 5; audit = True"), "audit = True; allowed: 'epoch', 'start' or"),
    "every": (GOOD.replace("epochs = 5", "epochs = 5; scheduler_every = 2"), "scheduler_every = 2; allowed: 'epoch'"),
    "shared": (GOOD.replace("epochs = 5", "epochs = 5; shared = 'a'"), "shared = 'a'; allowed: patterns of names"),
    "batch": (GOOD.replace("epochs = 5", "epochs = 5; batch_params = [1]"), r"batch_params = \[1\]; allowed: names of"),
    "direction": (GOOD.replace("epochs = 5", "epochs = 5; direction = 'up'"), "'up'; allowed: 'maximize' or"),
    "search": (with_settings("search = 'hyperband'"), "search = 'hyperband'; allowed: None or 'asha'"),
    "no rungs": (with_settings("search = 'asha'"), r"'asha' with rungs = \(\); allowed: with a rung before"),
    "last rung": (with_settings("search = 'asha'; rungs = (5,)"), r"'asha' with rungs = \(5,\); allowed: with a rung"),
    "factor": (with_settings("reduction_factor = 1"), "reduction_factor = 1; allowed: a whole number, 2 or more"),
    "two searches": (
        with_settings("search = 'asha'; rungs = (1,)") + pruner("MedianPruner()"),
        r"pruner\(\) returned .*MedianPruner.* with search = 'asha'; allowed: one of the two",
    ),
    "pruner": (GOOD + pruner("3"), r"pruner\(\) returned 3; allowed: a pruner of Optuna's, or None"),
    "sampler": (GOOD + sampler("'tpe'"), r"sampler\(\) returned 'tpe'; allowed: a sampler of Optuna's"),
    "failing sampler": (GOOD + sampler("RandomSampler(sed=3)"), "failed: TypeError: .*sed"),
    "package": (
        GOOD + "    def sampler(self): import no_such_package_of_ours\n",
        "ModuleNotFoundError: No module named 'no_such_package_of_ours'; install it: pip install no_such_package",
    ),
    "enqueue": (
        GOOD + "    def enqueue(self): return {'x': 1}\n",
        r"enqueue\(\) returned .*; allowed: a list of dicts",
    ),
    "enqueued values": (
        GOOD + "    def enqueue(self): return [{'x': 1}, {'x': {2}}]\n",
        r"enqueue\(\) has .*: Object of type set is not JSON serializable; allowed: values that JSON can hold",
    ),
    "one direction": (with_settings("directions = ('maximize',)"), "allowed: none, or two or more of 'maximize'"),
    "directions": (with_settings("directions = ('up', 'down')"), "directions = .*; allowed: none, or two or more"),
    "several and rungs": (with_settings(SEVERAL + "; rungs = (1,)"), r"rungs = \(1,\) with several directions"),
    "several and asha": (with_settings(SEVERAL + "; search = 'asha'; rungs = (1,)"), "'asha' with several directions"),
    "several and a pruner": (with_settings(SEVERAL) + pruner("NopPruner()"), "pruner.* with several directions"),
    "several and CMA-ES": (with_settings(SEVERAL) + sampler("CmaEsSampler()"), "CmaEsSampler with several directions"),
    "several and a metric": (with_settings(SEVERAL + "; metric = 'a'"), "metric = 'a'; .*; with directions, 2 of them"),
    "a deadline without a time": (
        with_settings("deadline = '2026-12-01'"),
        "deadline = '2026-12-01'; allowed: None, or",
    ),
    "a deadline in words": (with_settings("deadline = 'tomorrow'"), "a date and a time, such as '2099-12-31 08:00'"),
    "a deadline as a number": (with_settings("deadline = 8"), "deadline = 8; allowed: None, or a date and a time"),
    "constructor": (GOOD + "    def __init__(self): self.x = 1 / 0\n", r"Mine\(\) failed: line 14: ZeroDivisionError"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_study(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    path = list(sys.path)
    with pytest.raises(StudyError, match=f"mine.py: .*{message}"):
        load_study(write(tmp_path, text))
    if name in ("syntax", "import", "failure", "exit"):
        assert sys.path == path


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"absent\.py: no such file"):
        load_study(tmp_path / "absent.py")
    with pytest.raises(StudyError, match=r"its name must end in \.py"):
        load_study(write(tmp_path, GOOD, "mine.txt"))


@pytest.mark.parametrize("name", ["trials", "squeezer", "ds_hooks", "launch"])
def test_modules_that_hide_ours(name: str, tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    (tmp_path / name).mkdir()
    assert load_study(file).trials == 3  # a folder without __init__ hides nothing
    write(tmp_path / name, "", "__init__.py")
    with pytest.raises(StudyError, match=f"contains {name}/, which hides the package '{name}'"):
        load_study(file)
    other = tmp_path / "other"
    other.mkdir()
    write(other, "", f"{name}.py")
    with pytest.raises(StudyError, match=f"contains {name}.py, which hides"):
        load_study(write(other, GOOD))


def test_a_sampler_whose_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cmaes" else find(name))
    with pytest.raises(StudyError, match="CmaEsSampler needs the package cmaes; install it: pip install cmaes"):
        load_study(write(tmp_path, GOOD + sampler("CmaEsSampler()")))


@pytest.mark.parametrize("text", ["2026-12-01 08:00", "2026-12-01T08:00:30+05:30", "2020-01-01 00:00Z"])
def test_a_deadline_is_a_time_which_may_have_passed(text: str, tmp_path: Path) -> None:
    assert load_study(write(tmp_path, with_settings(f"deadline = '{text}'"))).deadline == text


def test_settings_of_a_search(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, with_settings("search = 'asha'; rungs = [1, 5]; reduction_factor = 4")))
    assert study.promotes and study.reduction_factor == 4
    several = load_study(write(tmp_path, with_settings(SEVERAL) + sampler("NSGAIISampler(seed=1)"), "other.py"))
    assert several.directions == ("maximize", "minimize") and not several.promotes
