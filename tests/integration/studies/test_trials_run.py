"""`trials run` and `trials best`: a study from its file to its best model, with no main job."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
import torch
from optuna.trial import TrialState

from benchmarks.shared.postgres import Server
from ds_hooks.shared.processes.endings import USER_ERROR_STATUS
from tests.support.sandbox import children, is_alive, wait_for
from tests.support.slow_cases import others_slow
from tests.support.steady_study import STUDY, assert_all_ended_once, has_trained, ran, started, told, trials, write
from trials import load_study
from trials.cli import main
from trials.run import FAILED_STATUS, RunConfig, _Bar
from trials.search.storage.claims import MOST_DEATHS
from trials.search.storage.database import database_url

pytestmark = pytest.mark.integration


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands are given."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def status_of(*words: str) -> int | str | None:
    """The exit status of a `trials` command that starts no process."""
    try:
        return main(words)
    except SystemExit as end:
        return end.code


@pytest.fixture
def database(postgres: Server) -> Iterator[str]:
    """The URL of a database of PostgreSQL's that is empty, without any table."""
    with postgres.database() as name:
        yield postgres.url(name)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory in which the study has been trained, and what the command said. Its name is not UTF-8."""
    folder = tmp_path_factory.mktemp("finished") / os.fsdecode(b"na\xefve")
    folder.mkdir()
    (folder / "steady.py").write_text(STUDY.format(slow_s=0.0))
    command = [sys.executable, "-m", "trials", "run", "steady.py"]
    return folder, subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def trained(place: Path, finished: tuple[Path, str]) -> str:
    """The study has been trained in `place`; what the command said."""
    shutil.copytree(finished[0], place, dirs_exist_ok=True)
    return finished[1]


def test_a_directory_whose_name_is_not_utf8_is_as_good_as_any(finished: tuple[Path, str]) -> None:
    folder, said = finished
    assert b"\xef" in os.fsencode(folder) and " 0 failed; best score" in said


def test_from_a_study_to_its_best_model(place: Path, trained: str) -> None:
    assert_all_ended_once()
    counts = [sum(trial.state is state for trial in trials()) for state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert f"study steady: {counts[0]} completed, {counts[1]} pruned, 0 failed; best score" in trained
    assert trained.endswith("Next: trials best steady.py\n")
    best = max((trial for trial in trials() if trial.value is not None), key=lambda trial: trial.value or 0.0)
    shown = ran("best", "steady.py", "--save", "kept").stdout
    assert shown.startswith(f"trial {best.number}: score {best.value:.6g} after 20 epochs; weights: kept/trial-")
    described = json.loads((place / "kept" / f"trial-{best.number}.json").read_text())
    assert described["score"] == best.value and described["params"] == {"lr": best.params["lr"], "wide": 3}
    names: dict[str, torch.nn.Module] = {}
    exec("\n".join(described["load"]), names)
    study = load_study("steady.py")
    ((inputs, targets),) = study.validation()
    score = study.score(names["model"](inputs), targets).item()
    assert score == pytest.approx(best.value, rel=1e-5)
    assert "\n".join(described["load"]) in shown
    assert not list(Path("studies/steady/best").glob("*.tmp"))
    kept = told("best", "steady.py", "--save", "studies/steady/best")[0]
    assert f"weights: studies/steady/best/trial-{best.number}.pt" in kept, "where they are already"


def test_whoever_looks_before_a_worker_has_made_the_study_makes_nothing(storage: str, place: Path) -> None:
    """Two who make the tables of one database at once are in each other's way."""
    config = RunConfig(
        study=Path("steady.py"),
        name="steady",
        storage=storage,
        directory=Path("studies"),
        device="cpu",
        threads=1,
        workers=1,
    )
    with _Bar(config) as bar:
        assert bar.summary() == ([], False)
    assert not list(place.iterdir())
    if storage.startswith("postgresql"):
        engine = sa.create_engine(database_url(storage))
        assert sa.inspect(engine).get_table_names() == []
        engine.dispose()


@pytest.mark.slow
def test_a_terminal_shows_a_progress_bar(place: Path) -> None:
    write(slow_s=0.1)
    process, terminal = os.forkpty()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-m", "trials", "run", "steady.py"])
    termios.tcsetwinsize(terminal, (24, 100))
    shown = b""
    with suppress(OSError):  # its end is an error
        while more := os.read(terminal, 65536):
            shown += more
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert "0/12 [" in shown.decode() and "running, best score " in shown.decode()


@pytest.mark.slow
def test_a_hyperparameter_that_trials_under_way_lack_costs_none_of_them(place: Path) -> None:
    write(slow_s=0.03)
    with started("run", "steady.py") as process:
        wait_for(has_trained, "a score")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    right = Path("steady.py").read_text()
    wrong = right.replace(
        '"wide": 3}', '"wide": trial.suggest_int("wide", 2, 3), "bias": trial.suggest_int("bias", 0, 1)}'
    )
    Path("steady.py").write_text(wrong.replace("nn.Tanh()", "nn.Dropout(params['bias'])"))
    for _ in range(MOST_DEATHS):
        said = ran("run", "steady.py", status=USER_ERROR_STATUS).stderr
        assert "was begun without hyperparameter 'bias'" in said and "Traceback" not in said
        assert {trial.state for trial in trials()} <= {TrialState.WAITING, TrialState.COMPLETE, TrialState.PRUNED}
    write()
    ran("run", "steady.py")
    assert_all_ended_once()


def test_a_killed_run_leaves_nothing_alive_and_its_trials_to_the_next(place: Path) -> None:
    write(slow_s=0.03)
    with started("run", "steady.py") as process:
        wait_for(has_trained, "a score")
        family = [process.pid, *(each for child in children(process.pid) for each in (child, *children(child)))]
        assert len(family) == 3, "a worker, and its search worker"
        process.kill()
        wait_for(lambda: not any(map(is_alive, family[1:])), "the end of all")
    write()
    told("run", "steady.py")  # it does not wait for a lease to end
    assert_all_ended_once()


def test_a_worker_that_is_killed_is_no_success(place: Path) -> None:
    write(slow_s=0.03)
    with started("run", "steady.py") as process:
        wait_for(has_trained, "a score")
        (worker,) = children(process.pid)
        os.kill(worker, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL and "a worker was ended by SIGKILL" in errors
    assert TrialState.RUNNING in {trial.state for trial in trials()}, "as a killed run leaves them to the next"


@pytest.mark.parametrize("status", others_slow([0, USER_ERROR_STATUS, 7], [0]))
@pytest.mark.slow
def test_a_study_that_ends_its_process_is_no_success_and_loses_no_trial(status: int, place: Path) -> None:
    quits = f"if epoch == 12: import os; os._exit({status})\n        time.sleep"
    Path("steady.py").write_text(STUDY.format(slow_s=0).replace("time.sleep", quits))
    done = ran("run", "steady.py", status=status if status == 7 else 1)
    assert ("error: the study's code has ended a worker's process" in done.stderr) == (status != 7)
    assert " unfinished; " in done.stdout
    write()
    ran("run", "steady.py")
    assert_all_ended_once()


@pytest.mark.slow
def test_weights_that_were_not_kept_are_none(place: Path) -> None:
    Path("steady.py").write_text(
        STUDY.format(slow_s=0).replace("rungs = 12", "rungs, keep_best = 12").replace("10)", "10), 0")
    )
    ran("run", "steady.py")
    shown = ran("best", "steady.py", "--save", "kept").stdout
    (described,) = (place / "kept").iterdir()
    assert json.loads(described.read_text())["weights"] is None
    assert "its weights were not kept" in shown and "load_state_dict" not in shown


@pytest.mark.slow
def test_workers_of_several_runs_share_a_study(place: Path) -> None:
    write(slow_s=0.1)
    with started("run", "steady.py", "--workers", "2") as first:
        wait_for(has_trained, "a score")
        ran("run", "steady.py", "--threads", "2")
        assert first.wait(timeout=60) == 0
    assert_all_ended_once()
    workers = {trial.user_attrs["squeezer_worker"] for trial in trials()}
    assert {worker.rpartition(":")[2] for worker in workers} <= {"run0", "run1", "run2"} and len(workers) > 1


def test_a_storage_and_a_name_of_the_users(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name may look like an option. The study may change the working directory."""
    write()
    Path("steady.py").write_text(f"import os\nos.chdir('/')\n{Path('steady.py').read_text()}")
    monkeypatch.setenv("WHERE", "sqlite:///mine.db")
    words = ("steady.py", "--study-name=-my study", "--storage", "env:WHERE", "--directory", "there")
    said, _ = told("run", *words)
    assert said.endswith("Next: trials best steady.py '--study-name=-my study' --storage env:WHERE --directory there\n")
    assert len(trials("-my study", "sqlite:///mine.db")) == 12
    assert "weights: kept/trial-" in told("best", *words, "--save", "kept")[0]
    assert list((place / "kept").glob("trial-*.pt"))


def test_whatever_looks_like_an_option_may_be_the_name_of_a_file(place: Path) -> None:
    name = "-" + "größe/日本 " * 20
    write()
    Path("steady.py").rename("-steady.py")
    words = (f"--study-name={name}", "--storage=-s.journal", "--directory=-there")
    said, _ = told("run", "./-steady.py", *words)
    assert said.endswith(f"Next: trials best {shlex.join(['./-steady.py', *words])}\n")
    assert len(trials(name, "./-s.journal")) == 12
    assert "weights: -there/" in told("best", "./-steady.py", *words)[0]


def test_a_study_that_fails_says_where(place: Path) -> None:
    Path("steady.py").write_text(STUDY.format(slow_s=0).replace("nn.Tanh()", "nn.Linear(7, 7)"))
    done = ran("run", "steady.py", status=FAILED_STATUS)
    assert done.stdout == "study steady: 0 completed, 0 pruned, 12 failed; no score yet\n"
    assert f"[trials] error: every trial failed, such as trial 0: {next(_reasons(done.stderr))}\n" in done.stderr
    assert {trial.user_attrs["squeezer_reason"] for trial in trials()} == {reason for reason in _reasons(done.stderr)}
    (logged,) = Path("studies/steady").glob("*.run0.log")
    assert "Traceback (most recent call last)" in logged.read_text()
    no_trial = "trials best: no trial of study steady has completed yet\n"
    assert told("best", "steady.py", status=USER_ERROR_STATUS) == ("", no_trial)


@pytest.mark.usefixtures("place", "trained")
def test_the_trials_of_a_run_decide_whether_it_has_failed() -> None:
    text = STUDY.format(slow_s=0).replace("trials, epochs, fused, rungs = 12", "trials, epochs, fused, rungs = 14")
    Path("steady.py").write_text(text.replace("nn.Tanh()", "nn.Linear(7, 7)"))
    done = ran("run", "steady.py", status=FAILED_STATUS)
    assert "error: every trial failed, such as trial 12: " in done.stderr
    assert done.stdout.endswith("Next: trials best steady.py\n"), "of those before"


def _reasons(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if " failed: " in line and line.startswith("[trials] warning: trials ["):
            yield line.partition(" failed: ")[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "no.py"), "trials run: no.py: no such file; expected a Python file that defines a Study"),
        (("best", "steady.py"), "trials best: no journal studies/study.journal; train a study first (trials run), "),
        (("run", "steady.py", "--directory", "steady.py"), "trials run: steady.py: File exists"),
        (("run", "steady.py", "--study-name", ""), "trials run: the study's name is empty; allowed: --study-name NAM"),
        (
            ("best", "steady.py", "--study-name=\udcff"),
            r"trials best: the study's name '\udcff' is not UTF-8; allowed: ",
        ),
        (("run", "steady.py", "--storage", "env:NOWHERE"), "trials run: --storage env:NOWHERE: the environment variab"),
        (("run", "steady.py", "--storage", "x://me:pw@host/db"), "trials run: other users can read the password on a "),
        (
            ("best", "steady.py", "--storage", "sqlite:///steady.py"),
            "trials best: sqlite:///steady.py: DatabaseError: ",
        ),
        (
            ("best", "steady.py", "--storage", "steady.py"),
            "trials best: the study's storage steady.py is not Optuna's ",
        ),
        (
            ("close", "--storage", "x://me@127.0.0.1:1/s", "--study-name", "x"),
            "trials close: x://me@127.0.0.1:1/s is not the URL of a database that can be used; allowed: a ",
        ),
        (("close", "--storage", "x://me:pw@host/db", "--study-name", "x"), "trials close: other users "),
    ],
)
@pytest.mark.usefixtures("place")
def test_what_is_refused(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write()
    assert status_of(*words) == USER_ERROR_STATUS
    said = capsys.readouterr().err
    assert said.startswith(message) and "pw" not in said and len(said.splitlines()) == 1


def test_a_file_that_is_no_study_is_named(place: Path) -> None:
    Path("steady.py").write_text("x = 1\n")
    done = ran("run", "steady.py", status=USER_ERROR_STATUS)
    assert f"{os.getcwd()}/steady.py: defines no subclass of trials.Study" in done.stderr and not done.stdout.strip()


@pytest.mark.usefixtures("place", "trained")
def test_a_study_that_does_not_fit_its_storage_is_refused_in_one_line() -> None:
    Path("steady.py").write_text(STUDY.format(slow_s=0).replace("slow_s = ", "direction, slow_s = 'minimize', "))
    done = ran("run", "steady.py", status=USER_ERROR_STATUS)
    assert done.stderr == (
        "[trials] error: study 'steady' has another direction in this storage: maximize there and minimize here; "
        "allowed: another study_name\n"
    )


@pytest.mark.slow
def test_a_storage_that_cannot_be_made_is_refused_in_one_line(place: Path) -> None:
    write()
    done = ran("run", "steady.py", "--study-name", "new", "--storage", "no/such/study.journal", status=1)
    assert done.stderr == f"[trials] error: {place}/no/such/study.journal: No such file or directory\n"
    assert done.stdout == ""


@pytest.mark.usefixtures("place", "trained")
def test_another_study_of_that_storage_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("best", "steady.py", "--study-name", "other") == USER_ERROR_STATUS
    assert capsys.readouterr().err == "trials best: there is no study other; found: steady\n"
