"""What the `trials` command prints."""

import json
import re
import sqlite3
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import optuna
import pytest
import torch
from optuna.trial import TrialState

from ds_hooks.shared.trial_attributes import MILESTONE
from tests.support.logged import logged
from tests.support.paths import ROOT
from trials.cli import main
from trials.cli_options import again
from trials.search.storage.optuna_storage import open_storage
from trials.training.inputs import endless

STUDY = """
import torch
from torch import nn
from trials import Study

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.rnn = nn.Linear(4, 4), nn.LSTM(4, 3)
        self.norm = nn.CrossMapLRN2d(3)
        self.scale = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    def forward(self, x):
        y, _ = self.rnn(self.a(x))
        y = self.norm(y.unsqueeze(0))[0]
        return self.scale(y.flip(-1)).logcumsumexp(0)

class Mine(Study):
    trials, epochs = 4, 1
    def suggest(self, trial): return {"lr": trial.suggest_float("lr", 0.1, 1)}
    def model(self, params): return Model()
    def optimizer(self, params, model): return torch.optim.SGD(model.parameters(), params["lr"])
    def loss(self, outputs, targets): return outputs.mean()
    def score(self, outputs, targets): return outputs.mean()
    def batches(self, epoch): return [(torch.randn(5, 2, 4), torch.zeros(5))]
    def validation(self): return self.batches(0)
"""


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """As they were: the command sets them up."""
    with logged():
        yield


def test_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(STUDY)
    assert main(["explain", str(path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "a.Linear rule FusedLinear"
    assert lines[1] == "rnn.LSTM rule FusedRecurrent"
    assert lines[2].startswith(
        "norm.CrossMapLRN2d loop over trials: RuntimeError: In order to use an autograd.Function"
    )
    assert lines[3].startswith("node 'flip' vmap of the call")
    assert lines[4].startswith("scale.ParametrizedLinear vmap: module 'scale' (torch.nn")
    units = lines[lines.index("Units, in the order of a training step:") + 1 :]
    forward = [
        "a.Linear forward",
        "rnn.LSTM forward",
        "norm.CrossMapLRN2d forward",
        "scale.ParametrizedLinear forward",
        "loss",
    ]
    assert units[:5] == forward and units[-1] == "score" and "optimizer step" in units


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command ends for a mistake of the user's."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("trials")
    return captured.err


@pytest.mark.parametrize("command", ["explain", "check"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", "mine.py: cannot be imported: line 1: SyntaxError"),
        ("x = 1", "defines no subclass of trials.Study"),
        (STUDY.replace("return outputs.mean()", "return outputs"), "Study.loss returned [5, 2, 3]; allowed: a scalar"),
        (STUDY.replace("nn.LSTM(4, 3)", "nn.LSTM(5, 3)"), "mine.py: RuntimeError: input.size(-1) must be equal to"),
        (STUDY.replace("return [(", "return [][:0] and [("), "the study gave no batches in epoch 0"),
    ],
)
def test_a_bad_study(command: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert message in refused(capsys, command, str(path))


@pytest.mark.parametrize("command", ["explain", "check", "measure"])
def test_a_missing_study(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, command, str(tmp_path / "none.py"))
    assert (
        message.startswith(f"trials {command}: ")
        and "no such file; expected a Python file that defines a Study" in message
    )


def test_check_trains_a_whole_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(STUDY.replace("torch.zeros(5))]", "torch.zeros(5))] * 3"))
    assert main(["check", str(path)]) == 0
    study, layers, epoch, audit, *table = capsys.readouterr().out.splitlines()
    assert study == "study   Mine: 4 trials of 1 epochs, up to 16 fused, no rungs; maximize the score"
    assert layers == "layers  2 by rule, 3 by vmap, 1 in a loop over the trials"
    assert epoch.startswith("epoch   3 steps of 2 trials in ") and "; scores " in epoch
    assert audit == "audit   4 steps of a trial among 2 against the trial alone: equal but for rounding"
    assert {line.split()[0] for line in table if "the model's output" in line} == {"training", "evaluation"}
    path.write_text(STUDY.replace("    trials", "    audit = False; trials", 1))
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == ["audit   none: Study.audit is False"]


@pytest.mark.parametrize("method", ["batches", "validation"])
def test_check_says_that_batches_seem_to_have_no_end(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endless, "CHECKED_S", 0.0)
    path = tmp_path / "mine.py"
    path.write_text(f"""{STUDY.replace(f"def {method}", "def few")}
    def {method}(self, *epoch):
        for step in range(40):
            yield torch.randn(5, 2, 4), torch.zeros(5)
        raise KeyboardInterrupt  # somebody has waited for long enough
""")
    assert main(["check", str(path)]) == 130
    text = capsys.readouterr().err
    counts = re.findall(rf"Study\.{method} has given (\d+) batches.* and goes on", text)
    assert counts == ["1", "3", "7", "15", "31"], "so many need no further word"
    assert "itertools.islice" in text and text.endswith("\nInterrupted.\n")


def test_check_finds_what_is_wrong_in_a_later_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(STUDY.replace("torch.zeros(5))]", "torch.zeros(5)), (torch.randn(5, 2, 3), torch.zeros(5))]"))
    assert "mine.py: RuntimeError: " in refused(capsys, "check", str(path))


def test_measure_prints_the_rate_for_people_and_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(STUDY)
    threads = torch.get_num_threads()
    try:
        assert main(["measure", str(path), "--seconds", "0.01"]) == 0
        # how many is measured, so a busy machine may choose fewer than the study's four
        assert re.match(r"[1-4] trials fused: ", capsys.readouterr().out)
        assert main(["measure", str(path), "--seconds", "0.01", "--trials", "3", "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    measured = json.loads(capsys.readouterr().out)
    assert measured["trials"] == 3 and measured["work_per_s"] > 0


def test_close_ends_paused_trials_as_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "study.journal"
    study = optuna.create_study(storage=open_storage(str(journal)), study_name="mine")
    for scores in ({1: 0.5}, {1: float("nan")}, {}):
        study.add_trial(
            optuna.trial.create_trial(state=TrialState.WAITING, user_attrs={MILESTONE: 1}, intermediate_values=scores)
        )
    assert main(["close", "--storage", str(journal), "--study-name", "mine"]) == 0
    said = capsys.readouterr().out
    assert said == "1 unfinished trial of mine ended as failed, 2 paused as pruned: the run ended\n"
    ended = [(trial.state, trial.value) for trial in study.trials]
    assert ended == [(TrialState.PRUNED, 0.5), (TrialState.PRUNED, None), (TrialState.FAIL, None)]


def test_close_ends_what_is_unfinished_as_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "study.journal"
    study = optuna.create_study(storage=open_storage(str(journal)), study_name="mine")
    study.tell(study.ask(), 1.0)
    study.ask()
    study.enqueue_trial({"lr": 0.1})
    close = ["close", "--storage", str(journal), "--study-name", "mine", "--reason", "a crash"]
    assert main(close) == 0
    assert capsys.readouterr().out == "2 unfinished trials of mine ended as failed: a crash\n"
    states = [trial.state for trial in study.get_trials()]
    assert states == [TrialState.COMPLETE, TrialState.FAIL, TrialState.FAIL]
    assert main(close) == 0
    assert capsys.readouterr().out.startswith("0 unfinished trials")


def test_close_of_no_study_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "study.journal"
    optuna.create_study(storage=open_storage(str(journal)), study_name="mine")
    said = refused(capsys, "close", "--storage", str(journal), "--study-name", "mind")
    assert said == "trials close: there is no study mind; found: mine\n"


@pytest.mark.parametrize("command", ["best", "deadline", "transfer", "close"])
def test_no_command_that_reads_a_database_makes_one(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = [] if command == "close" else [str(ROOT / "examples" / "digits.py")]
    words = [command, *study, "--storage", f"sqlite:///{tmp_path}/x.db", "--study-name", "mine"]
    assert f"trials {command}: no database {tmp_path}/x.db; allowed: " in refused(capsys, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["best", "deadline", "close"])
def test_no_command_that_reads_a_database_writes_to_anothers(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as other:
        other.execute("CREATE TABLE bookmarks (id integer)")
        study = [] if command == "close" else [str(ROOT / "examples" / "digits.py")]
        words = [command, *study, "--storage", f"sqlite:///{tmp_path}/x.db", "--study-name", "mine"]
        assert refused(capsys, *words) == f"trials {command}: there is no study mine; found: none\n"
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("bookmarks",)]


def test_close_makes_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no journal" in refused(capsys, "close", "--storage", str(tmp_path / "x"), "--study-name", "mine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "the following arguments are required: COMMAND; see trials --help"),
        (("chek", "study.py"), "no command 'chek'; did you mean: trials check"),
        (
            ("frobnicate",),
            "no command 'frobnicate'; allowed: check, explain, measure, run, best, deadline, shrink, rank",
        ),
        (("runner",), "no command 'runner'; use: trials measure"),
        (("check",), "trials check: the following arguments are required: STUDY"),
        (("measure", "study.py", "--seconds", "0"), "trials measure: argument --seconds: invalid positive float"),
    ],
)
def test_a_mistake_in_the_command_line(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refused(capsys, *words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (None, []),
        ("mine", ["--study-name", "mine"]),
        ("my own", ["--study-name", "'my own'"]),
        ("-x", ["--study-name=-x"]),
    ],
)
def test_the_next_command_names_the_same_study(name: str | None, words: list[str]) -> None:
    parsed = Namespace(study=Path("mine.py"), study_name=name, storage="x.db", directory=Path("there"))
    assert again(parsed) == " ".join(["mine.py", *words, "--storage x.db --directory there"])
    parsed.storage, parsed.directory = None, Path("studies")
    assert again(parsed) == " ".join(["mine.py", *words]), "without what is so by default"
    parsed.study, parsed.directory = Path("-mine.py"), Path("-there")
    assert again(parsed) == " ".join(["./-mine.py", *words, "--directory=-there"]), "for a shell"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The status and the answer of `trials deadline`."""
    status = main(["deadline", "mine.py", *arguments])
    return status, capsys.readouterr().out.strip()


def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, epochs: float) -> None:
    """A worker trains so many epochs in ten minutes, of a study of four trials of one epoch."""
    from trials.search.storage.claims import Claims, Sign
    from trials.search.storage.database import connect
    from trials.search.storage.measured import Minute

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(STUDY)
    (tmp_path / "studies").mkdir()
    optuna.create_study(study_name="mine", storage=open_storage("studies/study.journal"))
    claims = Claims(connect("studies/study.journal", tmp_path / "studies" / "mine"), "mine", "w")
    now = int(time.time() // 60)
    claims.renew(Sign({}, minutes=[Minute(now - ago, 60.0, epochs / 10) for ago in range(10)] if epochs else ()))
    claims.close()


def test_a_deadline_is_admitted_or_refused_at_any_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(monkeypatch, tmp_path, epochs=2)  # so the four take twenty minutes
    now = datetime.now().replace(microsecond=0)
    soon, late = (str(now + timedelta(minutes=minutes)) for minutes in (10, 30))
    status, said = told(capsys, "--by", late)
    assert status == 0 and said.startswith(f"deadline {late}: admitted, at its pace so far the study ends by {now:%Y-}")
    status, said = told(capsys, "--by", soon)
    assert status == 1 and said.endswith("by the deadline 1 of 4 trials would have ended"), said
    status, said = told(capsys)
    assert status == 0 and said.startswith("no deadline: at its pace so far the study ends by ")
    (tmp_path / "mine.py").write_text(STUDY.replace("epochs = 4, 1", f"epochs = 4, 1\n    deadline = '{soon}'"))
    assert told(capsys)[0] == 1 and told(capsys, "--by", late)[0] == 0
    status, said = told(capsys, "--by", "2020-01-01 00:00")
    assert status == 1 and "deadline 2020-01-01 00:00 has passed; " in said


def test_a_deadline_of_which_nothing_is_known_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(monkeypatch, tmp_path, epochs=0)
    status, said = told(capsys, "--by", "2126-01-01 00:00")
    assert status == 2 and "not known yet, because nothing has been trained; 0 of 4 trials" in said


def test_a_deadline_that_is_no_time_or_of_no_study(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(monkeypatch, tmp_path, epochs=0)
    assert "--by 'soon': not a time; allowed: a date" in refused(capsys, "deadline", "mine.py", "--by", "soon")
    assert "there is no study x; found: mine" in refused(capsys, "deadline", "mine.py", "--study-name", "x")
    assert "no journal else" in refused(capsys, "deadline", "mine.py", "--directory", "else")
    assert not (tmp_path / "else").exists() and not (tmp_path / "studies" / "x").exists()


def test_a_home_behind_an_equals_sign(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"no journal {tmp_path}/else/study.journal" in refused(capsys, "best", "mine.py", "--directory=~/else")
    assert f"no database {tmp_path}/else.db" in refused(capsys, "best", "mine.py", "--storage=sqlite:///~/else.db")


@pytest.mark.parametrize("before", ["return Model()", "trials, epochs = 4, 1"])
def test_an_interrupt_in_the_studys_own_code_ends_it_in_a_word(
    before: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(STUDY.replace(before, f"import signal; signal.raise_signal(signal.SIGINT); {before}"))
    assert main(["check", str(file)]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"
