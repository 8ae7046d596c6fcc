"""Documents stay true: tables come from the code, and what a document points at exists."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import squeezer.cli
import trials.cli
from squeezer.records.facts import KINDS as FACTS
from squeezer.records.reader import KINDS
from tests.support.document_tables import documents, rewritten
from tests.support.paths import PACKAGES, ROOT
from trials.search import worker_process
from trials.search.measures import Measures
from trials.search.worker import SearchWorker
from trials.study import Study

DOCUMENTS = pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
CURRENT = pytest.mark.parametrize(
    "path", [path for path in documents() if path.name != "CHANGELOG.md"], ids=lambda path: path.name
)
"""All but the changelog, which names what once was."""
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
RETIRED = re.compile(r"\b(clerk|ledger|lodger|bookkeeper|intake|rival|runner|row of units)", re.IGNORECASE)
"""Words that had a synonym in the glossary of docs/architecture.md, which everything uses now."""
RETIRED_IN_CODE = re.compile(r"(?<![a-z])(clerk|ledger|lodger|bookkeep|rival|sudden)", re.IGNORECASE)
"""Such words as names in the code; "runner" is a module of DeepSpeed's there."""
OLD_NAMES = ROOT / "ds_hooks" / "shared" / "renamed_commands.py"
TOP_LEVEL = ["ds_hooks", "squeezer", "trials", "launch", "benchmarks", "tests", "docs", "examples"]


def prose(path: Path) -> str:
    """The document without its blocks of code, whose paths are the reader's own."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def named_files(text: str) -> Iterator[str]:
    """Paths of this repository in backticks; the part before `::` or a space."""
    for span in CODE.findall(text):
        word = re.split(r"::|[ ,:]", span)[0]
        if "/" in word and word.split("/")[0] in TOP_LEVEL:
            yield word


def named_modules(text: str) -> Iterator[str]:
    """Modules that `python -m` starts, and dotted names of this repository."""
    for span in CODE.findall(text) + re.findall(r"^    (.*)$", text, flags=re.MULTILINE):
        yield from re.findall(r"python3? -m ((?:" + "|".join(TOP_LEVEL) + r")[\w.]*)", span)


def named_commands(text: str) -> Iterator[tuple[str, str]]:
    """The commands of ours that begin a span or a line of code, and the targets of `make`."""
    lines = CODE.findall(text) + re.findall(r"^    (?=\S)(.*)$", text, flags=re.MULTILINE)
    for line in lines:
        if found := re.match(r"(squeezer|trials|make) ([a-z][\w-]*)\b(?!\.)", line):
            yield found[1], found[2]


@DOCUMENTS
def test_its_tables_are_those_of_the_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert rewritten(text) == text, "run `python -m tests.support.document_tables`"


@DOCUMENTS
def test_files_that_it_names_exist(path: Path) -> None:
    missing = [name for name in named_files(prose(path)) if not any(ROOT.glob(name.rstrip("/")))]
    assert not missing


@CURRENT
def test_modules_that_it_starts_exist(path: Path) -> None:
    names = [name.replace(".", "/") for name in named_modules(prose(path))]
    missing = [name for name in names if not any((ROOT / p).is_file() for p in (f"{name}.py", f"{name}/__main__.py"))]
    assert not missing


@CURRENT
def test_commands_that_it_names_exist(path: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    known = {"make": set(targets)}
    known |= {cli.PROGRAM: {command.name for command in cli.COMMANDS} for cli in (squeezer.cli, trials.cli)}
    assert [each for each in named_commands(prose(path)) if each[1] not in known[each[0]]] == []


def test_commands_are_found_where_documents_name_them() -> None:
    text = (
        "Run `squeezer wy RUN`, `trials check` and `make`.\n\n    make tests\n    squeezer --version  # squeezer no\n"
    )
    assert list(named_commands(text)) == [("squeezer", "wy"), ("trials", "check"), ("make", "tests")]


def test_the_defaults_of_a_study_are_those_of_the_code() -> None:
    text = prose(ROOT / "docs" / "studies.md")
    table = {name: default for name, default in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE)}
    code = {name: repr(vars(Study)[name]) if name in vars(Study) else "required" for name in Study.__annotations__}
    assert {name: table[name].strip("`").replace('"', "'") for name in code} == code


@DOCUMENTS
def test_tests_that_it_names_exist(path: Path) -> None:
    tests = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", prose(path)))
    assert not {name for name in named if f"def {name}(" not in tests}


@DOCUMENTS
def test_its_links_lead_somewhere(path: Path) -> None:
    for link in LINK.findall(prose(path)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@CURRENT
def test_it_uses_the_words_of_the_glossary(path: Path) -> None:
    assert not RETIRED.findall(prose(path))


@pytest.mark.parametrize("package", PACKAGES)
def test_the_code_uses_them_too(package: str) -> None:
    paths = [path for path in (ROOT / package).rglob("*.py") if path != OLD_NAMES]
    assert paths
    named = {path: f"{path.relative_to(ROOT)} {path.read_text(encoding='utf-8')}" for path in paths}
    assert {str(path): found for path, text in named.items() if (found := RETIRED_IN_CODE.findall(text))} == {}


def test_the_names_in_contributing_stand_in_the_files_beside_them() -> None:
    rows = [line for line in prose(ROOT / "CONTRIBUTING.md").split("\n") if line.startswith("|")]
    checked, missing = 0, []
    for row in rows:
        paths = [path for name in named_files(row) for path in ROOT.glob(name.rstrip("/"))]
        files = [file for path in paths for file in ([path] if path.is_file() else path.glob("*.py"))]
        texts = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for span in CODE.findall(row):
            if found := re.fullmatch(r"@?([A-Za-z_]\w+)(\(.*\))?", span):
                checked += bool(files)
                missing += [found[1]] if files and not re.search(rf"\b{found[1]}\b", texts) else []
    assert checked > 10 and missing == []


def test_the_map_shows_every_room() -> None:
    packages = {str(init.parent.relative_to(ROOT)) for top in TOP_LEVEL for init in ROOT.glob(f"{top}/**/__init__.py")}
    shown = {name.rstrip("/") for name in named_files(prose(ROOT / "docs" / "architecture.md"))}
    assert not packages - shown


def test_the_protocol_describes_every_kind_of_record() -> None:
    _, _, records = prose(ROOT / "docs" / "protocol.md").partition("## Records")
    named = {
        kind
        for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| [^|]*`", records, re.MULTILINE)
        for kind in CODE.findall(row)
    }
    assert named == {*KINDS, "event"}  # which only `squeezer.replay` reads


def test_the_protocol_names_every_request_to_the_search_worker() -> None:
    nodes = ast.walk(ast.parse(inspect.getsource(worker_process)))
    (body,) = [node for node in nodes if getattr(node, "name", "") == "_answer_to"]
    known = {"stop": {"stop"}}
    for case in (node for node in ast.walk(body) if isinstance(node, ast.match_case)):
        if isinstance(case.pattern, ast.MatchMapping):
            keys = [key.value for key in case.pattern.keys if isinstance(key, ast.Constant)]
            known[str(keys[0])] = {*map(str, keys), *(_further(case) if case.pattern.rest else ())}
    _, _, section = prose(ROOT / "docs" / "protocol.md").partition("### Side task and search worker")
    rows = re.findall(r"^\| `\{([^`]*)\}` \|", section.partition("\nTwo answers")[0], re.MULTILINE)
    named = {keys[0]: set(keys) for row in rows if (keys := re.findall(r'"(\w+)":', row))}
    assert named == known


def _further(case: ast.match_case) -> set[str]:
    """The arguments that a request may have beyond its pattern: those of the method that it is passed to."""
    (call,) = [
        node
        for node in ast.walk(case)
        if isinstance(node, ast.Call) and any(keyword.arg is None for keyword in node.keywords)
    ]
    assert isinstance(call.func, ast.Attribute)
    method = getattr(SearchWorker, call.func.attr, None) or getattr(Measures, call.func.attr)
    return {*list(inspect.signature(method).parameters)[1 + len(call.args) :]}


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
def test_the_protocol_names_every_field_of_a_record(fact: type) -> None:
    row = re.search(rf"^\| `{FACTS[fact]}` \|.*$", prose(ROOT / "docs" / "protocol.md"), re.MULTILINE)
    assert row is not None
    assert {field.name for field in fields(fact)} <= set(CODE.findall(row[0]))
