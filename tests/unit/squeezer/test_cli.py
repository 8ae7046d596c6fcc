"""The `squeezer` command: what each sub-command is given, and how mistakes end. Starts no process."""

from pathlib import Path

import pytest

from ds_hooks.shared.renamed_commands import MOVED
from squeezer import observe
from squeezer.cli import COMMANDS, main
from squeezer.config import load_config
from squeezer.records.layout import RECORD_VERSION
from squeezer.replay import read_golden
from tests.support.paths import GOLDEN, ROOT
from trials.cli import COMMANDS as TRIALS_COMMANDS
from trials.cli import main as trials_main

TRACE = GOLDEN / "cooperative_small_budget.jsonl.gz"
MAINS = {"squeezer": main, "trials": trials_main}
COMMAND_NAMES = [("squeezer", command.name) for command in COMMANDS]
COMMAND_NAMES += [("trials", command.name) for command in TRIALS_COMMANDS]


def ended(arguments: list[str], program: str = "squeezer") -> int:
    """The exit status of a command line that ends the process."""
    with pytest.raises(SystemExit) as stop:
        MAINS[program](arguments)
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.parametrize(("program", "command"), COMMAND_NAMES)
def test_every_help_ends_with_one_example(program: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended([command, "--help"], program) == 0
    _, _, example = capsys.readouterr().out.partition("example:\n")
    assert example.strip().startswith(f"{program} {command}") and example.count("\n") == 1


@pytest.mark.parametrize(("program", "command"), COMMAND_NAMES)
def test_a_mistake_begins_with_the_name_of_the_command(
    program: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = {"daemon": ["--config=x"], "submit": ["x", "--queue=x"], "close": ["--storage=x", "--study-name=x"]}
    words = ["--run"] if command == "observe" else [*needed.get(command, ["x"]), "--nonsense"]
    assert ended([command, *words], program) == 2
    assert capsys.readouterr().err.startswith(f"{program} {command}: ")


@pytest.mark.parametrize("program", MAINS)
def test_the_version_is_the_packages(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--version"], program) == 0
    name, number = capsys.readouterr().out.split()
    assert (name, number[0].isdecimal()) == (program, True)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "squeezer: the following arguments are required: COMMAND; see squeezer --help"),
        ("repot runs/x", "squeezer: no command 'repot'; did you mean: squeezer report"),
        ("explian study.py", "squeezer: no command 'explian'; did you mean: trials explain"),
        (
            "frobnicate",
            "squeezer: no command 'frobnicate'; allowed: observe, report, why, doctor, daemon, submit, queue, replay",
        ),
        ("report", "squeezer report: the following arguments are required: RUN; see squeezer report --help"),
        ("why x --rank one", "squeezer why: argument --rank: invalid int value: 'one'; see squeezer why --help"),
        ("report x --jso", "squeezer report: unrecognized arguments: --jso; see squeezer report --help"),
        (
            "report gone",
            "squeezer report: gone: no records of a run here; allowed: a directory with rank0.events.jsonl",
        ),
        (
            "daemon --config gone.toml",
            "squeezer daemon: gone.toml: cannot read the configuration: No such file or directory",
        ),
        ("why gone", "squeezer why: gone: no records of a run here; allowed: a directory with rank0.events.jsonl"),
        ("replay gone", "squeezer replay: gone: not a recorded trace (.jsonl.gz) nor a run's directory: No such file"),
        ("observe", "squeezer observe: no training script is named; see squeezer observe --help"),
        ("observe --run", "squeezer observe: argument --run: expected one argument; see squeezer observe --help"),
    ],
)
def test_a_mistake_is_said_in_one_line(
    line: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the tests' process may have children, beside which a daemon is forked
    monkeypatch.setattr("squeezer.daemon.daemon_keeper.shield", lambda serve: serve(None))
    assert ended(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(says) and printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("submit ~/gone.py --queue=q", "squeezer submit: there is no file {home}/gone.py"),
        ("queue ~/q", "squeezer queue: there is no directory {home}/q"),
        ("report ~/run", "squeezer report: {home}/run: no records"),
        ("daemon --config=~/gone.toml", "squeezer daemon: {home}/gone.toml: cannot read"),
        (
            "submit x.py --queue=~nobody-of-this-name/q",
            "squeezer submit: argument --queue: ~nobody-of-this-name/q: there",
        ),
        ("submit x.py --queue=$HOME/q", "squeezer submit: argument --queue: $HOME/q: $HOME is not replaced in a path"),
        (
            "daemon --config=x --run=$HOME/x",
            "squeezer daemon: argument --run: $HOME/x: $HOME is not replaced",
        ),
    ],
)
def test_a_path_that_no_shell_has_read_means_what_it_does_everywhere(
    line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("squeezer.daemon.daemon_keeper.shield", lambda serve: serve(None))
    assert ended(line.split()) == 2
    assert capsys.readouterr().err.startswith(says.format(home=tmp_path))


def test_a_study_without_a_name_is_not_submitted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert ended(["submit", str(ROOT / "examples" / "digits.py"), "--study-name=", f"--queue={tmp_path}/q"]) == 2
    assert capsys.readouterr().err.startswith("squeezer submit: the study's name is empty; allowed: --study-name NAME")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("old", [old for old in MOVED if old.split()[0] in MAINS])
def test_a_command_that_moved_says_where(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, word = old.split()
    assert ended([word, "argument"], program) == 2
    assert capsys.readouterr().err == f"{program}: no command {word!r}; use: {MOVED[old]}\n"


@pytest.mark.parametrize(("program", "word"), COMMAND_NAMES)
def test_the_other_program_says_where_a_command_is(program: str, word: str) -> None:
    (other,) = MAINS.keys() - {program}
    assert (other, word) in COMMAND_NAMES or f"{other} {word}" in MOVED


@pytest.mark.parametrize("new", sorted(set(MOVED.values())))
def test_what_a_moved_command_names_exists(new: str) -> None:
    program, *words = new.split()
    if program in MAINS:
        assert (program, words[0]) in COMMAND_NAMES
    else:
        assert program in ("ds_squeeze", "python")


# replay


def test_replay_prints_no_difference_of_a_golden_trace_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    trace.write_bytes(TRACE.read_bytes())
    before = trace.stat().st_mtime_ns
    assert main(["replay", str(trace)]) == 0
    assert capsys.readouterr().out == "trace.jsonl.gz: 1412 events, 0 answered differently\n"
    assert trace.stat().st_mtime_ns == before and trace.read_bytes() == TRACE.read_bytes()
    assert list(tmp_path.iterdir()) == [trace]


def test_replay_prints_what_is_answered_differently_and_writes_when_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gzip
    import json

    records = read_golden(TRACE)
    changed = next(r for r in records if r["r"] == "event" and r["actions"])
    good = list(changed["actions"])
    changed["actions"] = []
    trace = tmp_path / "trace.jsonl.gz"
    trace.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
    content = trace.read_bytes()
    assert main(["replay", str(trace)]) == 1
    out = capsys.readouterr().out
    assert "1412 events, 1 answered differently" in out
    assert "recorded: []\n" in out and f"now:      {json.dumps(good)[:60]}" in out
    assert trace.read_bytes() == content
    assert main(["replay", str(trace), "--write"]) == 1
    assert main(["replay", str(trace)]) == 0
    assert read_golden(trace) == read_golden(TRACE)


def test_replay_takes_a_runs_directory_and_leaves_its_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    records = read_golden(TRACE)
    records[0]["version"] = RECORD_VERSION
    events = tmp_path / "rank0.events.jsonl"
    events.write_text("".join(json.dumps(record) + "\n" for record in [*records, {"r": "end", "t_ns": 1}]))
    assert main(["replay", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "rank 0: 1412 events, 0 answered differently\n"
    assert list(tmp_path.iterdir()) == [events]
    assert main(["replay", str(tmp_path), "--write"]) == 0
    assert read_golden(tmp_path / "rank0.replay.jsonl.gz") == read_golden(TRACE)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"r": "event", "event": ["StepStarted", 1], "actions": []}\n', "the records do not begin with a run"),
        ('{"r": "run", "version": 99, "config": {}}\n', f"record version 99; allowed: version {RECORD_VERSION}"),
        (
            f'{{"r": "run", "version": {RECORD_VERSION}, "config": {{}}}}\n',
            "no events are recorded here; set record_events = true",
        ),
        (
            f'{{"r": "run", "version": {RECORD_VERSION}, "config": {{"squeeze": {{}}, "guard": {{}}}}}}\n'
            '{"r": "event", "event": ["NoSuchEvent", 1], "actions": []}\n',
            "not recorded by this version: KeyError: 'NoSuchEvent'",
        ),
    ],
)
def test_a_run_that_cannot_be_replayed_says_why(
    content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.events.jsonl").write_text(content)
    assert ended(["replay", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err


# observe


@pytest.mark.parametrize(
    ("line", "own", "launched"),
    [
        ("train.py --run theirs", [], ["train.py", "--run", "theirs"]),
        ("--run mine --num_gpus 2 train.py", ["--run", "mine"], ["--num_gpus", "2", "train.py"]),
        ("--run=mine train.py -h", ["--run=mine"], ["train.py", "-h"]),
        ("--help", ["--help"], []),
    ],
)
def test_observe_leaves_the_launcher_and_the_script_their_options(
    line: str, own: list[str], launched: list[str]
) -> None:
    assert observe.split_arguments(line.split()) == (own, launched)


def test_observe_becomes_the_launcher_with_a_configuration_that_squeezes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, command: became.append(command))
    run = tmp_path / 'a "run"'
    main(["observe", "--run", str(run), "--num_accelerators", "2", "train.py", "--run", "theirs"])
    (command,) = became
    at = command.index("--squeezer")
    assert command[1:at] == ["-P", "-m", "launch.ds_squeeze"]
    assert command[at + 2 :] == ["--num_accelerators", "2", "train.py", "--run", "theirs"]
    config = load_config(command[at + 1])
    assert config.side is None and config.run.directory == run


def test_observe_has_a_new_directory_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, command: became.append(command))
    monkeypatch.chdir(tmp_path)
    main(["observe", "train.py"])
    (directory,) = (tmp_path / "runs").iterdir()
    assert directory.name.startswith("observe-20")
    assert load_config(became[0][5]).run.directory == directory


def test_observe_cannot_write_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").touch()
    assert ended(["observe", "--run", str(tmp_path / "run"), "train.py"]) == 2
    assert f"observe: cannot write to {tmp_path / 'run'}: " in capsys.readouterr().err
