"""One job by two launchers, as on two machines without SSH: one report, and one study."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial

from ds_hooks.shared.trial_attributes import WORKER
from squeezer.daemon.deepspeed_buffers import remove_buffers
from squeezer.records.layout import events_path
from tests.support.jobs import PATIENT, environment, free_port, pretrain, short_directory
from tests.support.paths import ROOT
from tests.support.sandbox import wait_for
from trials.search.storage.optuna_storage import open_storage

pytestmark = [pytest.mark.integration, pytest.mark.slow]

STEPS = 40
STUDY = "endless_digits"
CONFIG = """
[squeeze]
min_bubble_ms = 0.1
alone_share = 0.0
[guard]
enabled = false
[side]
study = "{root}/benchmarks/studies/{study}.py"
study_directory = "{base}/studies"
{storage}
[run]
directory = "{run}"
calibrate_s = 1.0
"""


@dataclass
class Node:
    """A machine, or what stands for one: a runtime directory and a core of its own, and maybe a network.

    Attributes:
        rank: its number.
        directory: for pages and sockets.
        interface: by which it reaches the other one.
        enter: the command that enters its network.
    """

    rank: int
    directory: Path
    interface: str = "lo"
    enter: list[str] = field(default_factory=list)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """What both nodes see."""
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=1\n")
    return tmp_path


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Two on one network."""
    with short_directory() as one, short_directory() as other:
        yield [Node(0, one), Node(1, other)]


@pytest.fixture
def apart(nodes: list[Node]) -> Iterator[list[Node]]:
    """Two that see each other by a cable alone: each has a network namespace."""
    names = [f"bsq{os.getpid()}n{node.rank}" for node in nodes]
    cable = [f"bsq{node.rank}" for node in nodes]
    with ExitStack() as stack:
        for node, name in zip(nodes, names, strict=True):
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"no network namespaces here, so two hosts are NOT shown: {made.stderr.strip()}")
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
            node.enter = ["ip", "netns", "exec", name]
            node.interface = cable[node.rank]
        ends = (cable[0], "netns", names[0]), (cable[1], "netns", names[1])
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1]], check=True)
        for node in nodes:
            for line in (
                "link set lo up",
                f"address add 10.77.0.{1 + node.rank}/24 dev {node.interface}",
                f"link set {node.interface} up",
            ):
                subprocess.run([*node.enter, "ip", *line.split()], check=True)
        yield nodes


class Launched:
    """The launcher of one node, while it runs."""

    def __init__(self, node: Node, nodes: list[Node], base: Path, run: Path, storage: str | None, port: int) -> None:
        config = base / f"node{node.rank}.toml"
        named = "" if storage is None else f'storage = "{storage}"'
        config.write_text(CONFIG.format(root=ROOT, study=STUDY, base=base, run=run, storage=named))
        address = "10.77.0.1" if node.enter else "127.0.0.1"
        core = sorted(os.sched_getaffinity(0))[node.rank % len(os.sched_getaffinity(0))]
        command = [*node.enter, "taskset", "-c", str(core), sys.executable, "-m", "launch.ds_squeeze"]
        command += ["--squeezer", str(config), "--hostfile", str(base / "hosts"), "--no_ssh"]
        command += ["--node_rank", str(node.rank), "--master_addr", address, "--master_port", str(port)]
        command += [PATIENT, *pretrain(base / "losses", STEPS)]
        directories = os.pathsep.join(str(each.directory) for each in nodes)
        variables = {"PATIENT_DIRECTORIES": directories, "GLOO_SOCKET_IFNAME": node.interface}
        self._log = base / f"node{node.rank}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=environment(node.directory) | variables,
                cwd=base,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()  # if it still runs; it ends all that it has started
        self._process.wait(60.0)

    def is_running(self) -> bool:
        """Whether it has not ended. That it ends early is an error."""
        assert self._process.poll() is None, self._log.read_text()
        return True

    def ended(self) -> str:
        """What it has printed, once it ends well."""
        status = self._process.wait(300.0)
        output = self._log.read_text()
        assert status == 0, output
        return output


def launch(nodes: list[Node], base: Path, runs: list[Path], storage: str | None = None) -> list[str]:
    """Run a job on both nodes, of which the second begins first. Returns what they printed."""
    port = free_port()
    with ExitStack() as stack:
        stack.callback(remove_buffers, port)
        second = stack.enter_context(Launched(nodes[1], nodes, base, runs[1], storage, port))
        # so its records are there when the first node's launcher looks at what an earlier run has left
        wait_for(lambda: second.is_running() and '"r":"run"' in read(events_path(runs[1], 1)), "its first record")
        first = stack.enter_context(Launched(nodes[0], nodes, base, runs[0], storage, port))
        return [first.ended(), second.ended()]


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def earlier_run(run: Path, ranks: int) -> None:
    """Leave what a run of so many ranks might."""
    run.mkdir(mode=0o700)
    for rank in range(ranks):
        events_path(run, rank).write_text("of an earlier run\n")


def trials(storage: str) -> list[FrozenTrial]:
    """Those of the only study."""
    (name,) = optuna.get_all_study_names(storage=open_storage(storage))
    return optuna.load_study(study_name=name, storage=open_storage(storage)).get_trials()


def assert_squeezed(run: Path, ranks: set[int]) -> None:
    """The report is of these ranks, each of which has been squeezed to the end."""
    report = json.loads((run / "report.json").read_text())
    assert set(report["ranks"]) == {str(rank) for rank in ranks}
    for of in report["ranks"].values():
        assert of["ended"] and of["main"]["steps"] == STEPS and of["side"]["harvest"] > 0, of


@pytest.mark.parametrize("network", ["nodes", "apart"])
def test_a_run_directory_that_both_see_has_one_report(network: str, base: Path, request: pytest.FixtureRequest) -> None:
    run = base / "run"
    earlier_run(run, ranks=3)
    outputs = launch(request.getfixturevalue(network), base, [run, run])
    assert_squeezed(run, {0, 1})
    assert sorted(path.name for path in (run / "previous").glob("*.events.jsonl")) == [
        f"rank{rank}.events.jsonl" for rank in range(3)
    ]
    assert "Gained" in outputs[0] and "Gained" not in outputs[1]
    assert not any("Faults" in output for output in outputs)
    workers = {trial.user_attrs[WORKER].rpartition(":")[2] for trial in trials(f"{base}/studies/study.journal")}
    assert workers == {"rank0", "rank1"}


def test_nodes_that_share_only_a_database_have_reports_of_their_own(
    nodes: list[Node], base: Path, database: str
) -> None:
    runs = [base / "run0", base / "run1"]
    for run in runs:
        earlier_run(run, ranks=2)
    outputs = launch(nodes, base, runs, database)
    for rank, run in enumerate(runs):
        assert_squeezed(run, {rank})
        assert "no records of rank" in outputs[rank]
    workers = {trial.user_attrs[WORKER].rpartition(":")[2] for trial in trials(database)}
    assert workers == {"rank0", "rank1"}
    together = base / "together"
    together.mkdir(mode=0o700)
    for run in runs:
        for path in run.glob("rank*.*"):
            shutil.copy(path, together)
    shown = subprocess.run(
        [sys.executable, "-m", "squeezer", "report", "--json", str(together)],
        env=environment(together) | {"SQUEEZER_STORAGE": database},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(json.loads(shown.stdout)["ranks"]) == {"0", "1"}
