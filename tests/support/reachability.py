"""Which files of a tree no test, command or document leads to.

Tests are what pytest collects; commands are the Makefile, the CI script and the entry points; documents are README and
CONTRIBUTING, and what they link. From there the search follows imports, `-m` and dotted names of modules, and names of
files. A changelog names what once was, a contract what must not be imported: neither keeps a file alive. Nor does the
name of a folder.
"""

import ast
import configparser
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

COMMANDS = ("Makefile", ".ci/run", "setup.cfg", "pyproject.toml", ".gitignore")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
NAMES_NOTHING = ("CHANGELOG.md", "pyproject.toml", ".gitignore")
NAMING_SECTIONS = ("metadata", "options.entry_points")
"""Of setup.cfg; its other sections list packages, or forbid imports."""
WORD = re.compile(r"[\w./@*-]*\w")
RUN_AS_MODULE = re.compile(r"-m\s+([\w.]+)")


@dataclass
class Names:
    """What one file names: modules that it imports, modules that it runs, files, and all its words."""

    imports: set[str] = field(default_factory=set)
    runs: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)


class Tree:
    """The files of a repository, and which of them names which.

    Args:
        root: the repository's.
        files: paths in it, with `/` between folders.
    """

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self._root = root
        self._files = {file for file in files if (root / file).exists()}
        self._modules = {module_name(file): file for file in self._files if file.endswith(".py")}
        self._names: dict[str, Names] = {}
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for file in self._files:
            self._by_name[PurePosixPath(file).name].append(file)

    def orphans(self) -> list[str]:
        """The files that are not reached from any test, command or document."""
        reached: set[str] = set()
        ahead = [file for file in self._files if is_root(file)]
        while ahead:
            file = ahead.pop()
            if file not in reached:
                reached.add(file)
                ahead.extend(self._named_by(file))
        return sorted(self._files - reached)

    def _named_by(self, file: str) -> Iterator[str]:
        names = self._names_in(file)
        for module in names.imports:
            yield from self._imported(module)
            beside = str(PurePosixPath(file).with_name(f"{module}.py"))
            if beside in self._files:  # a study's folder is on its path
                yield beside
        for module in names.runs:
            yield from self._imported(module)
            yield from self._imported(f"{module}.__main__")
        yield from self._named_files(names, file)

    def _named_files(self, names: Names, file: str) -> Iterator[str]:
        """Files by their path, or by their name where the name of their folder stands in `file` or in its imports."""
        used = [self._modules[module] for module in names.imports if module in self._modules]
        known = names.words.union(*(self._names_in(module).words for module in used))
        for word in names.words:
            if word in self._modules:
                yield from self._imported(word)
            for other in self._candidates(word.rpartition("/")[2]):
                path = PurePosixPath(other)
                is_beside = path.parent == PurePosixPath(file).parent and "*" not in word
                if word in (other, link(other, file)) or (
                    path.match(word) and (is_beside or path.parent.name in known)
                ):
                    yield other

    def _candidates(self, pattern: str) -> Iterable[str]:
        """Files with such a name. A pattern leads to no Python file: a linter reads them all and uses none."""
        if "*" not in pattern:
            return self._by_name.get(pattern, ())
        names = (name for name in self._by_name if fnmatch(name, pattern) and not name.endswith(".py"))
        return [file for name in names for file in self._by_name[name]]

    def _imported(self, module: str) -> Iterator[str]:
        """The module's file, and those of the packages that it lies in."""
        if module not in self._modules:
            return
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            package = self._modules.get(".".join(parts[:end]))
            if package is not None:
                yield package

    def _names_in(self, file: str) -> Names:
        if file not in self._names:
            self._names[file] = read_names(self._root / file, file)
        return self._names[file]


def is_root(file: str) -> bool:
    """Whether a tool or a reader finds `file` without being led to it."""
    name = PurePosixPath(file).name
    is_collected = file.startswith("tests/") and (fnmatch(name, "test_*.py") or name == "conftest.py")
    return is_collected or file in COMMANDS or file in DOCUMENTS


def module_name(file: str) -> str:
    """The dotted name of a Python file: `a/b.py` is `a.b`, and `a/__init__.py` is `a`."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def link(other: str, file: str) -> str:
    """How `file` writes the path of `other`."""
    return os.path.relpath(other, PurePosixPath(file).parent)


def read_names(path: Path, file: str) -> Names:
    """What `path`, which is `file` in its tree, names."""
    if file in NAMES_NOTHING:
        return Names()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return Names()
    if file == "setup.cfg":
        return configured_names(text)
    if path.suffix == ".py":
        return python_names(text, file)
    return Names(runs=set(RUN_AS_MODULE.findall(text)), words=set(WORD.findall(text)))


def configured_names(text: str) -> Names:
    """Entry points, and the files that the metadata names."""
    config = configparser.ConfigParser(interpolation=None)
    config.read_string(text)
    values = [value for name in NAMING_SECTIONS if name in config for value in config[name].values()]
    return Names(words={word for value in values for word in re.findall(r"[\w./-]+", value)})


def python_names(text: str, file: str) -> Names:
    """Imports, wherever they stand, and the words of all strings but docstrings."""
    nodes = list(ast.walk(ast.parse(text)))
    names = Names()
    package = module_name(file) if file.endswith("__init__.py") else module_name(file).rpartition(".")[0]
    descriptions = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Import):
            names.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            names.imports.add(origin)
            names.imports.update(f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in descriptions:
            names.words.update(WORD.findall(node.value))
            names.runs.update(RUN_AS_MODULE.findall(node.value))
    if "-m" in {node.value for node in nodes if isinstance(node, ast.Constant)}:
        names.runs.update(names.words)
    return names
