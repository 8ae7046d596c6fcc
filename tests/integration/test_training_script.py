"""A training script finds under our launcher what it finds under DeepSpeed's: arguments, files, modules, children."""

import os
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

from launch import rank
from launch.rank import split_arguments, training_command
from tests.support.paths import ROOT, STUDIES
from tests.support.sandbox import Job, Sandbox, is_alive, wait_for

pytestmark = pytest.mark.integration

PROBE = """
import atexit, json, multiprocessing, os, pickle, sys, threading, time
from pathlib import Path

class Own:
    pass

def child(says):
    says.put([__name__, sys.argv[1:], Path(__file__).is_file()])

if __name__ == "__main__":
    try:
        import beside
        has_beside = True
    except ImportError:
        has_beside = False
    import given, random
    found = {"arguments": sys.argv, "path": sys.path, "file": __file__, "beside": has_beside, "given": given.__file__}
    found |= {"random": random.random() < 1, "package": __package__ or "", "flags": list(sys.flags)}
    found["names"] = sorted(name for name in globals() if name.startswith("__"))
    spawned = multiprocessing.get_context("spawn")
    says = spawned.Queue()
    process = spawned.Process(target=child, args=(says,))
    process.start()
    found["child"] = says.get(timeout=60)
    process.join()
    os.chdir("/")
    found["itself"] = Path(__file__).read_text()[:20]
    print(json.dumps(found))
    atexit.register(lambda: print(pickle.loads(pickle.dumps(Own())).__class__, threading.active_count()))
    threading.Thread(target=lambda: (time.sleep(0.5), print(len(pickle.dumps(Own()))))).start()
    sys.exit(7)
"""
ARGUMENTS = ["finetune", "--lr", "1", "--", "--local_rank=9"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A script with a module beside it, a folder that PYTHONPATH names, and one to start from."""
    for name in ("src", "libs", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "src" / "train.py").write_text(PROBE)
    (tmp_path / "src" / "beside.py").touch()
    (tmp_path / "libs" / "given.py").touch()
    (tmp_path / "libs" / "as_module.py").write_text(PROBE)
    return tmp_path


def run(project: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    named = {"PYTHONPATH": f"{project / 'libs'}{os.pathsep}{ROOT}", "SQUEEZER_DIR": str(project / "pages")}
    return subprocess.run(
        [sys.executable, "-u", *command],
        cwd=project / "here",
        env={**os.environ, **named, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def ours(*script: str) -> list[str]:
    """What `launch/rank.py`, given what DeepSpeed's launcher gives it, becomes; without the interpreter."""
    option, rest = split_arguments(["--local_rank=1", *script])
    return training_command("python", rest, option)[2:]


@pytest.mark.parametrize("safe_path", ["", "1"])
@pytest.mark.parametrize("script", ["../src/train.py", "as_module"])
def test_it_finds_all_as_without_us(project: Path, script: str, safe_path: str) -> None:
    module = ["-m"] if script == "as_module" else []
    alone = run(project, *module, script, "--local_rank=1", *ARGUMENTS, PYTHONSAFEPATH=safe_path)
    assert alone.returncode == 7, alone.stderr
    hooked = run(project, *ours(*(["--module"] if module else []), script, *ARGUMENTS), PYTHONSAFEPATH=safe_path)
    assert (hooked.returncode, hooked.stdout) == (7, alone.stdout), hooked.stderr


@pytest.mark.parametrize("script", ["../app.pyz", "../app", "../src/packed"])
def test_what_is_no_source_runs_too(project: Path, script: str) -> None:
    (project / "app").mkdir()
    (project / "app" / "__main__.py").write_text("import sys, own; print(__name__, sys.argv, __file__, own.__file__)")
    (project / "app" / "own.py").touch()
    for archive in ("app.pyz", "src/packed"):
        zipapp.create_archive(project / "app", project / archive)
    alone, hooked = (run(project, *command, script, "1") for command in ([], ["-m", "ds_hooks"]))
    assert (hooked.returncode, hooked.stdout) == (0, alone.stdout), hooked.stderr
    assert f"['{script}', '1']" in alone.stdout


def test_a_thread_that_wants_the_gil_at_the_end_gets_it_before_python_is_on_its_way_out(project: Path) -> None:
    """As one of gloo's that frees the last collective's tensors: too late, it would abort the process."""
    (project / "src" / "train.py").write_text(
        "import atexit, os, threading, time\n"
        "last = threading.Event()\n"
        "late = lambda: (last.wait(), time.sleep(0.001), os.write(1, b'freed'))\n"
        "threading.Thread(target=late, daemon=True).start()\n"
        "atexit.register(last.set)\n"
    )
    ended = run(project, "-m", "ds_hooks", "../src/train.py")
    assert ended.returncode == 0 and ended.stdout == "freed"


def test_nothing_is_imported_from_where_it_starts(project: Path) -> None:
    for name in ("random", "uuid", "token", "select", "zmq", "notice"):
        (project / "here" / f"{name}.py").write_text("raise SystemExit('this is no part of the training')")
    (project / "src" / "train.py").write_text("import random, zmq; print(random.random() < 1)")
    done = run(project, *ours("../src/train.py"))
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_it_trains_where_the_directory_it_starts_in_is_gone(project: Path) -> None:
    (project / "src" / "train.py").write_text("import beside, given, json; print('trained')")
    starts = "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); os.execv(sys.executable, %r)"
    command = [sys.executable, rank.__file__, "--local_rank=0", str(project / "src" / "train.py")]
    done = run(project, "-c", starts % command, SQUEEZER_CONFIG="none", SQUEEZER_RUN="none")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "no daemon, so nothing is squeezed; training continues" in done.stderr


@pytest.mark.parametrize(
    "end",
    [
        "raise KeyboardInterrupt",
        "import os; os._exit(5)",
        "import os; os.kill(os.getpid(), 15)",
        "raise SystemExit('no')",
        "import atexit, os; atexit.register(os._exit, 4)",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.5), print('late'))).start()",
        "import faulthandler; faulthandler._sigabrt()",
    ],
)
def test_it_ends_as_without_us(project: Path, end: str) -> None:
    (project / "src" / "train.py").write_text(end)
    alone = run(project, "../src/train.py", "--local_rank=1")
    hooked = run(project, *ours("../src/train.py"))
    assert (hooked.returncode, hooked.stdout) == (alone.returncode, alone.stdout), hooked.stderr


DEEPSPEED = """
from pathlib import Path
from tests.support.hooked_engine import Engine

__version__ = "0.19.8"

def initialize(model=None, *, config=None):
    "DeepSpeed's."
    return Engine(Path("none")), None, None, None
"""
"""A stand-in: what matters is how it is found and wrapped."""

BARE = """
class Engine:
    _INSTRUCTION_MAP = {}

    def __init__(self, _):
        pass

    def train_batch(self):
        return 0.5
"""

ASKS_FIRST = """
import importlib.util, inspect, pkgutil
assert importlib.util.find_spec("deepspeed").loader.get_source("deepspeed")
import deepspeed
engine = deepspeed.initialize()[0]
print("train_batch" in vars(engine), pkgutil.get_data("deepspeed", "data.txt"), inspect.signature(deepspeed.initialize))
print(engine.train_batch())
"""


@pytest.fixture
def uses_deepspeed(project: Path) -> Path:
    (project / "src" / "deepspeed").mkdir()
    (project / "src" / "deepspeed" / "__init__.py").write_text(DEEPSPEED)
    (project / "src" / "deepspeed" / "data.txt").write_text("data")
    (project / "src" / "train.py").write_text(ASKS_FIRST)
    return project


def test_a_library_that_asks_for_deepspeed_before_it_is_imported_does_not_lose_the_hooks(uses_deepspeed: Path) -> None:
    done = run(uses_deepspeed, *ours("../src/train.py"))
    assert done.stdout.splitlines() == ["True b'data' (model=None, *, config=None)", "0.5"], done.stderr
    assert "[ds_hooks]" not in done.stderr


HIDES_PYZMQ = {
    "libs/zmq.py": "raise ImportError('libzmq.so.5: no such file')",
    "src/zmq.py": "import sys; sys.exit('this is no part of the training')",
    "src/zmq/__init__.py": "while True: ...",
}


@pytest.mark.parametrize("attaches", ["", "import ds_hooks; ds_hooks.attach(engine)"])
@pytest.mark.parametrize("name", HIDES_PYZMQ)
def test_a_module_that_hides_pyzmq_is_never_run_and_leaves_the_training_alone(
    uses_deepspeed: Path, name: str, attaches: str
) -> None:
    (uses_deepspeed / name).parent.mkdir(exist_ok=True)
    (uses_deepspeed / name).write_text(HIDES_PYZMQ[name])
    package = uses_deepspeed / "src" / "deepspeed" / "__init__.py"
    package.write_text(DEEPSPEED.replace("from tests.support.hooked_engine import Engine", BARE))
    script = uses_deepspeed / "src" / "train.py"
    script.write_text(f"{ASKS_FIRST}{attaches}\n")
    done = run(uses_deepspeed, *(["../src/train.py"] if attaches else ours("../src/train.py")))
    assert done.stdout.splitlines()[1] == "0.5", done.stderr
    assert done.stderr.count("switched off; training continues without squeezing: ") == 1
    assert "hides the package pyzmq, which is imported as zmq. Rename it" in done.stderr
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_hooks_that_do_not_load_leave_the_training_alone(uses_deepspeed: Path) -> None:
    (uses_deepspeed / "libs" / "zmq" / "backend").mkdir(parents=True)
    (uses_deepspeed / "libs" / "zmq" / "__init__.py").write_text("raise ImportError('libzmq.so.5: no such file')")
    package = uses_deepspeed / "src" / "deepspeed" / "__init__.py"
    package.write_text(DEEPSPEED.replace("from tests.support.hooked_engine import Engine", BARE))
    done = run(uses_deepspeed, *ours("../src/train.py"))
    assert done.stdout.splitlines() == ["False b'data' (model=None, *, config=None)", "0.5"], done.stderr
    assert done.stderr.count("switched off; training continues without squeezing: pyzmq does not load: libzmq") == 1
    assert done.returncode == 0 and "Traceback" not in done.stderr


WAITS = """
import os
try:
    while True:
        os.wait()
except ChildProcessError:
    print("none is left")
"""


STARTED_WITH = """
import os, signal, sys
import zipapp
signal.signal(signal.SIGCHLD, signal.SIG_DFL if sys.argv[1] == "default" else signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.mark.parametrize("sigchld", ["default", "ignored"])
def test_it_has_no_children_that_it_did_not_start(sandbox: Sandbox, tmp_path: Path, sigchld: str) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    names = {"SQUEEZER_CONFIG": str(sandbox.config()), "SQUEEZER_RUN": str(sandbox.run)}
    command = ("-c", STARTED_WITH, sigchld, rank.__file__, "--local_rank=0", str(tmp_path / "train.py"))
    status, output = sandbox.run_to_end(*command, **names)
    assert status == 0 and "none is left" in output and "no daemon" not in output, output
    wait_for(lambda: not sandbox.living(), "the daemon's end")
    assert sandbox.events("end")


@pytest.mark.parametrize("name", ["launch.py", "trials/__init__.py"])
@pytest.mark.parametrize("command", ["ds_squeeze", "squeezer daemon", "squeezer observe", "rank"])
def test_a_module_in_pythonpath_that_hides_one_of_ours_is_named_and_never_run(
    sandbox: Sandbox, name: str, command: str
) -> None:
    hides = sandbox.files / "users" / name
    hides.parent.mkdir(parents=True)
    hides.write_text("raise SystemExit('this is no part of the training')")
    script = sandbox.files / "train.py"
    script.write_text("print('trained')")
    config = str(sandbox.config())
    entry = "from squeezer.cli import ds_squeeze; ds_squeeze()"
    words = {
        "ds_squeeze": ("-c", entry, "--squeezer", config, str(script)),
        "squeezer daemon": ("-m", "squeezer", "daemon", "--config", config),
        "squeezer observe": ("-m", "squeezer", "observe", str(script)),
        "rank": (rank.__file__, "--local_rank=0", str(script)),
    }[command]
    paths = os.pathsep.join([str(sandbox.files / "users"), str(ROOT)])
    names = {"PYTHONPATH": paths, "SQUEEZER_CONFIG": config, "SQUEEZER_RUN": str(sandbox.run)}
    status, output = sandbox.run_to_end(*words, **names)
    hidden = f"in place of our package {name.partition('/')[0].removesuffix('.py')} in {ROOT}"
    assert output.count(hidden) == 1 and "no part of the training" not in output, output
    assert "Traceback" not in output and (status, "trained" in output) == (
        (0, True) if command == "rank" else (2, False)
    )


@pytest.mark.parametrize("named", ["where the job starts", "in PYTHONPATH"])
@pytest.mark.parametrize("hides", ["ds_hooks.py", "ds_hooks/__init__.py"])
@pytest.mark.parametrize("words", [["train.py", "7"], ["--module", "train", "7"]])
def test_a_training_whose_own_module_hides_the_hooks_trains_without_them(
    sandbox: Sandbox, named: str, hides: str, words: list[str]
) -> None:
    folder = sandbox.files if named == "where the job starts" else sandbox.files / "users"
    (folder / hides).parent.mkdir(parents=True, exist_ok=True)
    (folder / hides).write_text("own = 5")
    (sandbox.files / "train.py").write_text("import ds_hooks, sys\nprint('trained', sys.argv[1:], ds_hooks.own)")
    paths = os.pathsep.join([str(folder), str(ROOT)] if named == "in PYTHONPATH" else [str(ROOT)])
    names = {"PYTHONPATH": paths, "SQUEEZER_CONFIG": str(sandbox.config()), "SQUEEZER_RUN": str(sandbox.run)}
    status, output = sandbox.run_to_end(rank.__file__, "--local_rank=0", *words, **names)
    assert status == 0 and "trained ['--local_rank=0', '7'] 5" in output, output
    assert output.count("hides our package ds_hooks, so nothing is squeezed") == 1


@pytest.mark.slow
def test_a_file_called_as_a_module_of_ours_where_the_job_starts_hides_none(sandbox: Sandbox) -> None:
    for name in ("trials", "squeezer", "launch"):
        (sandbox.files / f"{name}.py").write_text("open('imported', 'w')")
    (sandbox.files / "of_the_project.py").touch()
    study = sandbox.files / "studies" / "uses_project.py"
    study.parent.mkdir()
    beside = f"sys.path.append({str(STUDIES)!r})"
    study.write_text(f"import of_the_project, sys\n{beside}\nfrom tiny import Tiny\nclass Own(Tiny): ...")
    config = sandbox.config("tiny.py")
    config.write_text(config.read_text().replace(str(STUDIES / "tiny.py"), str(study)))
    names = {"SQUEEZER_CONFIG": str(config), "SQUEEZER_RUN": str(sandbox.run)}
    job: Job = sandbox.start(Job, rank.__file__, str(ROOT / "tests/support/metronome.py"), **names)
    wait_for(lambda: sandbox.side("exited") or not is_alive(job.pid), "the end of the study")
    assert job.finish() == 0, job.said()
    assert sandbox.side("finished") and not (sandbox.files / "imported").exists(), job.said()
    wait_for(lambda: not sandbox.living(), "the daemon's end")
