"""squeezer/config.py: defaults, paths, and errors that say what to do."""

import json
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from pydantic import ValidationError

from ds_hooks.shared.wire import WaitKind
from squeezer.config import Config, ConfigError, load_config
from tests.support.paths import ROOT

RUN = '[run]\ndirectory = "out"\n'


def load(folder: Path, text: str) -> Config:
    (folder / "squeezer.toml").write_text(text, encoding="utf-8")
    return load_config(folder / "squeezer.toml")


def mistakes(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    lines = str(caught.value).splitlines()
    name = f"{folder / 'squeezer.toml'}: "
    assert all(line.startswith(name) for line in lines)
    return [line.removeprefix(name) for line in lines]


def test_nothing_is_required(tmp_path: Path) -> None:
    config = load(tmp_path, "")
    assert config.side is None
    assert config.run.directory == Path.cwd() / "runs" / "observed"
    assert config.squeeze.kinds == tuple(kind.name for kind in WaitKind if kind is not WaitKind.REDUCE_GRADS)
    assert (config.squeeze.alone_share, config.squeeze.alone_block_steps, config.squeeze.observe_steps) == (0.1, 3, 6)
    assert (config.guard.enabled, config.guard.slowdown_budget, config.guard.retry_steps) == (True, 0.01, 200)
    assert (config.run.pin_cores, config.run.trace_steps, config.run.calibrate_s) == (True, 40, 2.0)


def test_the_demo_has_the_defaults() -> None:
    examples = ROOT / "examples"
    demo, minimal = load_config(examples / "demo.toml"), Config.model_validate({"run": {"directory": "x"}})
    assert demo.squeeze == minimal.squeeze
    assert demo.guard == minimal.guard.model_copy(update={"slowdown_budget": 0.1})
    assert demo.device == minimal.device
    assert demo.run == minimal.run.model_copy(update={"directory": demo.run.directory})


def test_a_home_is_meant_by_its_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").touch()
    side = '[side]\nstudy = "~/mine.py"\nstudy_directory = "~/kept"\nstorage = "sqlite:///~/study.db"\n'
    config = load(tmp_path, '[run]\ndirectory = "~/out"\n' + side)
    assert config.run.directory == tmp_path / "out" and config.side is not None
    assert (config.side.study, config.side.study_directory) == (tmp_path / "mine.py", tmp_path / "kept")
    assert config.side.storage == f"sqlite:///{tmp_path}/study.db"
    side = '[side]\nstudy = "mine.py"\nstudy_directory = "$SCRATCH/kept"\nstorage = "sqlite:///$SCRATCH/study.db"\n'
    found = mistakes(tmp_path, '[run]\ndirectory = "$SCRATCH/out"\n' + side)
    assert len(found) == 3 and all("$SCRATCH is not replaced in a path" in each for each in found), found


def test_paths_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits.py").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load(tmp_path, RUN + '[side]\nstudy = "digits.py"\n')
    assert config.side is not None
    assert config.side.study == tmp_path / "digits.py", "beside the file that names it"
    assert config.run.directory == tmp_path / "elsewhere" / "out", "where the command is started"
    assert config.side.study_name == "digits"
    assert config.storage(config.run.directory) == f"{tmp_path}/elsewhere/out/study/study.journal"


def test_a_study_may_outlive_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits.py").touch()
    monkeypatch.chdir(tmp_path)
    side = RUN + '[side]\nstudy = "digits.py"\nstudy_directory = "{}"\n'
    config = load(tmp_path, side.format("kept"))
    here = Path.cwd()
    assert config.storage(tmp_path / "run") == f"{here}/kept/study.journal"
    assert config.studies(tmp_path / "run") == here / "kept"
    assert config.as_record()["side"]["study_directory"] == f"{here}/kept"
    assert mistakes(tmp_path, side.format("digits.py"))[0].startswith(
        'side.study_directory = "digits.py" is not allowed: it is not a directory; allowed: a path'
    )


def test_a_queue_takes_the_place_of_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits.py").touch()
    monkeypatch.chdir(tmp_path)
    config = load(tmp_path, RUN + '[side]\nqueue = "all"\n')
    assert config.side is not None and config.side.study is None and config.side.turn_minutes == 10.0
    assert config.studies(tmp_path / "run") == Path.cwd() / "all"
    assert config.storage(tmp_path / "run") == str(Path.cwd() / "all" / "study.journal")
    for further in ('study = "digits.py"', 'study_name = "x"', 'study_directory = "kept"'):
        (mistake,) = mistakes(tmp_path, RUN + f'[side]\nqueue = "all"\n{further}\n')
        assert mistake.startswith(f"side.{further.split()[0]} = ") and "the studies in side.queue have" in mistake
    (mistake,) = mistakes(tmp_path, RUN + '[side]\nqueue = "digits.py"\n')
    assert mistake.startswith('side.queue = "digits.py" is not allowed: it is not a directory')
    (mistake,) = mistakes(tmp_path, RUN + '[side]\nstudy = "digits.py"\nturn_minutes = 5.0\n')
    assert mistake.startswith("side.turn_minutes = 5.0 is not allowed: there is no side.queue")
    assert mistakes(tmp_path, RUN + "[side]\n") == [
        "side.study is missing; allowed: the path of an existing Python file, relative to the configuration"
    ]


def test_names_of_the_user_win(tmp_path: Path) -> None:
    (tmp_path / "digits.py").touch()
    side = '[side]\nstudy = "digits.py"\nstudy_name = "mine"\nstorage = "sqlite:////of/mine.db"\n'
    config = load(tmp_path, RUN + side)
    assert config.side is not None
    assert config.side.study_name == "mine"
    assert config.storage(tmp_path) == "sqlite:////of/mine.db"


def test_a_database_is_found_from_where_the_command_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "50% of it?"
    here.mkdir()
    (here / "digits.py").touch()
    monkeypatch.chdir(here)
    side = RUN + '[side]\nstudy = "digits.py"\nstorage = "{}"\n'
    named = load(here, side.format("sqlite:///my%20db?timeout=7")).storage(here)
    monkeypatch.chdir("/")
    assert sa.make_url(named).database == f"{here}/my db" and sa.make_url(named).query == {"timeout": "7"}


def test_a_journal_is_found_from_where_the_command_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits.py").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    side = RUN + '[side]\nstudy = "digits.py"\nstorage = "{}"\n'
    assert load(tmp_path, side.format("mine.journal")).storage(tmp_path) == f"{tmp_path}/elsewhere/mine.journal"
    assert mistakes(tmp_path, side.format("no/mine.journal"))[0].startswith(
        f'side.storage = "no/mine.journal" is not allowed: there is no directory {tmp_path}/elsewhere/no; allowed: '
    )
    with sqlite3.connect("study.db") as database:
        database.execute("CREATE TABLE trials (number INT)")
    assert mistakes(tmp_path, side.format("study.db"))[0].startswith(
        'side.storage = "study.db" is not allowed: it is an SQLite database, whose URL is '
        f"sqlite:///{tmp_path}/elsewhere/study.db; allowed: "
    )


def test_a_storage_may_stand_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits.py").touch()
    monkeypatch.setenv("WHERE", "postgresql://me:pw@host/db")
    side = RUN + '[side]\nstudy = "digits.py"\nstorage = "{}"\n'
    config = load(tmp_path, side.format("env:WHERE"))
    assert config.storage(tmp_path) == "postgresql://me:pw@host/db"
    assert "pw" not in json.dumps(config.as_record())
    assert mistakes(tmp_path, side.format("env:NOWHERE"))[0].startswith(
        'side.storage = "env:NOWHERE" is not allowed: the environment variable NOWHERE is not set; allowed: '
    )


@pytest.mark.parametrize(
    "wrong",
    [
        'storge = "postgresql://me:s3cr3t@host/db"',
        'storage = ["postgresql://me:s3cr3t@host/db"]',
        'storage = "postgresql:/me:s3cr3t@host/db"',
    ],
)
def test_a_mistake_is_told_without_a_password(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "digits.py").touch()
    (mistake,) = mistakes(tmp_path, f'{RUN}[side]\nstudy = "digits.py"\n{wrong}\n')
    assert "me:***@host/db" in mistake and "s3cr3t" not in mistake


def test_it_is_json_ready_and_frozen(tmp_path: Path) -> None:
    (tmp_path / "digits.py").touch()
    config = load(tmp_path, RUN + '[side]\nstudy = "digits.py"\n[squeeze]\nmargin_ms = 1\nkinds = ["RECV_GRAD"]\n')
    dumped = json.loads(json.dumps(config.model_dump(mode="json")))
    assert dumped["squeeze"]["kinds"] == ["RECV_GRAD"]
    assert dumped["squeeze"]["margin_ms"] == 1.0
    assert dumped["side"]["study"] == str(tmp_path / "digits.py")
    with pytest.raises(ValidationError):
        config.squeeze.margin_ms = 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[squeeze]\nmargn_ms = 1", "unknown key squeeze.margn_ms = 1 (did you mean margin_ms?)"),
        ("[squeeze]\nthreads = 2", "unknown key squeeze.threads = 2; it belongs in [side]"),
        ("[sqeeze]", "unknown key sqeeze = {} (did you mean squeeze?)"),
        ("[squeeze]\nmargin_ms = -1", "squeeze.margin_ms = -1 is not allowed; allowed: a number, 0 or more"),
        ("[squeeze]\nmargin_ms = nan", "squeeze.margin_ms = nan is not allowed; allowed: a number, 0 or more"),
        ("[squeeze]\npreemptive = true", 'squeeze.preemptive = true is not allowed; allowed: "idle", "stop" or false'),
        ('[squeeze]\npreemptive = "no"', 'squeeze.preemptive = "no" is not allowed; allowed: "idle", "stop" or false'),
        ('[squeeze]\nmin_bubble_ms = "2"', 'squeeze.min_bubble_ms = "2" is not allowed; allowed: a number above 0'),
        ("[squeeze]\nmin_bubble_ms = 0", "squeeze.min_bubble_ms = 0 is not allowed; allowed: a number above 0"),
        ("[squeeze]\nalone_share = true", "squeeze.alone_share = true is not allowed; allowed: a number from 0 to 0.5"),
        ("[squeeze]\nalone_block_steps = 0", "squeeze.alone_block_steps = 0 is not allowed; allowed: a whole"),
        (
            "[squeeze]\nsqueezed_steps = 45",
            "unknown key squeeze.squeezed_steps = 45; steps are left alone at random now: set alone_share",
        ),
        (
            "[squeeze]\nalone_steps = 5",
            "unknown key squeeze.alone_steps = 5; steps are left alone at random now: set alone_share",
        ),
        ("[squeeze]\nforecast_quantile = 0.6", "squeeze.forecast_quantile = 0.6 is not allowed; allowed: a number f"),
        ('[squeeze]\nkinds = ["RECV_GRADS"]', "squeeze.kinds = ['RECV_GRADS'] is not allowed: 'RECV_GRADS' is not a"),
        ("[squeeze]\nkinds = []", "squeeze.kinds = "),
        ("[squeeze]\nkinds = [[1]]", "squeeze.kinds = [[1]] is not allowed"),
        ('[device]\nkind = "gpu"', 'device.kind = "gpu" is not allowed; allowed: "auto", "cpu" or "cuda"'),
        ("[device]\nmps = 0", 'device.mps = 0 is not allowed; allowed: "auto", true or false'),
        ("[device]\nmemory_fraction = 1.5", "device.memory_fraction = 1.5 is not allowed; allowed: a number above 0"),
        ("[device]\nmps_thread_percent = 0", "device.mps_thread_percent = 0 is not allowed; allowed: a whole number"),
        ('[side]\nstudy = "none.py"', 'side.study = "none.py" is not allowed: there is no file '),
        ("[side]\nthreads = 1", "side.study is missing; allowed: the path of an existing Python file"),
    ],
)
def test_a_mistake_names_key_value_and_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    (mistake,) = mistakes(tmp_path, RUN + text)
    assert mistake.startswith(message)


def test_a_device_that_cannot_halt_work_is_never_preemptive(tmp_path: Path) -> None:
    for preemptive in ('"stop"', '"idle"'):
        config = load(tmp_path, RUN + f"[squeeze]\nmargin_ms = 1\npreemptive = {preemptive}\n").without_stops()
        assert not config.squeeze.policy(config.guard).preemptive
        assert config.squeeze.preemptive is False and config.squeeze.margin_ms == 1.0


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    text = '[squeeze]\nmargin_ms = -1\nfoo = 1\n[side]\npriority = "low"\n[run]\nkeep = 3\n'
    assert len(mistakes(tmp_path, text)) == 5


@pytest.mark.parametrize(
    ("side", "name"),
    [
        ('study = "digits.py"', "digits"),
        ('study = "digits.py"\nstudy_name = "of/mine"', "of%2Fmine"),
        ('study = "digits.py"\nstudy_name = ".."', "%.."),
        ('queue = "all"', "all"),
    ],
)
def test_a_run_without_a_directory_is_named_after_its_study(side: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "digits.py").touch()
    for run in ("", "[run]\nkeep_mb = 9.0\n"):
        assert load(tmp_path, f"{run}[side]\n{side}\n").run.directory == Path.cwd() / "runs" / name
    config = load(tmp_path, '[run]\ndirectory = "out"\n[side]\nstudy = "digits.py"\n')
    assert config.run.directory == Path.cwd() / "out"


def test_a_table_that_is_none_is_a_mistake(tmp_path: Path) -> None:
    assert mistakes(tmp_path, "run = 3\n") == ["run = 3 is not allowed; allowed: a table"]
    (tmp_path / "study.py").touch()
    found = mistakes(tmp_path, "[side]\nstudy = 3\n")
    assert found and all(each.startswith("side.study = 3 is not allowed") for each in found)


@pytest.mark.parametrize("text", ["[run\n", "run = ", '[run]\ndirectory = "a"\ndirectory = "b"'])
def test_what_is_not_toml_is_said(tmp_path: Path, text: str) -> None:
    (mistake,) = mistakes(tmp_path, text)
    assert mistake.startswith("not a TOML file: ")


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot read the configuration: No such file"):
        load_config(tmp_path / "none.toml")
