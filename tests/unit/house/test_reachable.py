"""No file of the repository is unreachable from a test, a command or a document."""

import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.reachability import Tree

TREE = {
    "Makefile": "bench:\n\tpython -m bench\n",
    "README.md": "Read [the guide](docs/guide.md). `app --help`. A [licence](LICENSE).",
    "CHANGELOG.md": "Dropped: [raw](bench/results/orphan.json), old.py, python -m app.orphan",
    "LICENSE": "",
    "setup.cfg": (
        "[options]\npackages =\n    app\n    app.orphan\n"
        "[options.entry_points]\nconsole_scripts =\n    app = app.cli:main\n"
        "[importlinter:contract:a]\nforbidden_modules =\n    app.orphan\n"
    ),
    "docs/guide.md": "![A step](picture.svg) Raw runs: `../bench/results/pace.json`; all are in `bench/results/`.",
    "docs/picture.svg": "<svg/>",
    "bench/results/pace.json": "",
    "app/__init__.py": "",
    "app/__main__.py": "",
    "app/cli.py": "def main() -> None:\n    from . import late\n    from app.rooms import used",
    "app/late.py": "import subprocess\n\nsubprocess.run(['python', '-m', 'app'])",
    "app/rooms/__init__.py": "",
    "app/rooms/used.py": "",
    "bench/__init__.py": '"""See `bench/orphan.py`."""',
    "bench/__main__.py": "from bench import pace",
    "bench/pace.py": "NAME = 'bench.by_name'",
    "bench/by_name.py": "",
    "tests/support/paths.py": "GOLDEN = 'golden'",
    "tests/test_replay.py": (
        "from tests.support.paths import GOLDEN\nRUNS = GOLDEN.glob('*.gz')\n"
        "STUDY = __file__ + 'study.py'\nLINTED = 'app/*.py', 'rooms', '*.py'"
    ),
    "tests/golden/run.gz": "",
    "tests/study.py": "",
}
"""Of a made-up repository, in which everything is reached."""


def orphans(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(root, files).orphans()


def test_every_file_of_ours_is_reached() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    unreached = Tree(ROOT, listed.stdout.rstrip("\0").split("\0")).orphans()
    assert unreached == [], "name them in a document, use them in a test or a command, or delete them"


def test_imports_commands_links_and_globs_reach(tmp_path: Path) -> None:
    assert orphans(tmp_path, TREE) == []


@pytest.mark.parametrize(
    "orphan",
    [
        "app/orphan.py",  # though packaged, and named in a contract
        "app/rooms/orphan.py",
        "bench/orphan.py",  # though a docstring names it
        "bench/results/orphan.json",  # though a document names its folder, and the changelog names it
        "docs/orphan.md",
        "tests/support/orphan.py",
        "tests/golden/orphan.json",
        "app/late/orphan.sh",
        "orphan.toml",
    ],
)
def test_an_orphan_is_found(tmp_path: Path, orphan: str) -> None:
    assert orphans(tmp_path, {**TREE, orphan: ""}) == [orphan]


def test_what_only_an_orphan_names_is_an_orphan_too(tmp_path: Path) -> None:
    more = {"app/orphan.py": "import app.friend", "app/friend.py": "import app.orphan"}
    assert orphans(tmp_path, TREE | more) == sorted(more)


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ("Makefile", ["bench/__init__.py", "bench/__main__.py", "bench/by_name.py", "bench/pace.py"]),
        ("docs/guide.md", ["bench/results/pace.json", "docs/picture.svg"]),
        ("tests/test_replay.py", ["tests/golden/run.gz", "tests/study.py", "tests/support/paths.py"]),
    ],
)
def test_what_led_to_files_is_missed(tmp_path: Path, gone: str, left: list[str]) -> None:
    assert orphans(tmp_path, {name: text for name, text in TREE.items() if name != gone}) == left
