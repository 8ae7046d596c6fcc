"""Tables in the documents that come from the code.

    python -m tests.support.document_tables     # rewrites them; a test compares

A document holds `<!-- table: NAME -->`, the table, and `<!-- end -->`. The meaning of a row is the string under the
constant, field or key in the code.
"""

import ast
import inspect
import json
import re
import struct
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from torch import Tensor
from torch.nn import functional

from ds_hooks import message_sender
from ds_hooks.shared import statuses, unit_record, wire
from ds_hooks.shared.command_line import Command
from ds_hooks.shared.page import file as page_file
from ds_hooks.shared.page import layout as page
from squeezer import cli as squeezer_cli
from squeezer import config
from squeezer.daemon import receiver
from squeezer.policy import state
from squeezer.records import layout
from tests.matrix import tables as matrix
from tests.support.paths import ROOT
from trials import cli as trials_cli
from trials.fusion import registry
from trials.fusion.own_code.drawing import draws_numbers
from trials.optim import registry as optim_registry

_BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_TYPES = {"B": "u8", "H": "u16", "I": "u32", "i": "i32", "q": "i64", "Q": "u64", "4s": "4 bytes"}
_FORMAT = re.compile(r"\d*s|[a-zA-Z]")
_FROM_WHERE_STARTED = ", relative to where the command is started"
"""What the document says once, of all paths."""
_DEFAULTS_IN_WORDS = {
    "kinds": f"all but {wire.NOT_IDLE.name}",
    "study": "required without `queue`",
    "queue": "none",
    "study_name": "the file's name without `.py`",
    "directory": "`runs/` and the study's name",
    "storage": "`study.journal` in `study_directory`",
    "study_directory": "`study` in the run's directory",
    "mps_thread_percent": "all",
    "memory_mb": "none",
}


def documents() -> list[Path]:
    """Every Markdown file that a reader is sent to."""
    return sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])


def rewritten(text: str) -> str:
    """`text` with every table made anew.

    Raises:
        KeyError: it names a table that there is not.
    """
    return _BLOCK.sub(lambda block: f"{block[1]}\n{TABLES[block[2]]()}\n\n{block[3]}", text)


def _meanings(source: type | Any) -> dict[str, str]:
    """The strings under the names that a class assigns or annotates."""
    body = ast.parse(inspect.getsource(source).strip()).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[target.id] = " ".join(str(after.value.value).split())
    return found


def _table(head: str, rows: Iterable[Iterable[object]]) -> str:
    columns = head.split(" | ")
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    assert all(len(row) == len(columns) for row in cells)
    rule = "|" + "---|" * len(columns)
    return "\n".join([f"| {head} |", rule, *(f"| {' | '.join(row)} |" for row in cells)])


def _first_sentence(kind: type) -> str:
    return (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ").rstrip(".")


def _offsets(formats: str, start: int = 0) -> list[tuple[int, str]]:
    """(offset, type) of each value of a little-endian struct; padding is left out."""
    found, offset = [], start
    for each in _FORMAT.findall(formats):
        if each != "x":
            found.append((offset, _TYPES[each]))
        offset += struct.calcsize("<" + each)
    return found


def _header() -> str:
    places = _offsets(wire.HEADER_LAYOUT)
    return _table("offset | type | field | value", _named(places, wire.Header))


def _named(places: Iterable[tuple[int, str]], kind: Any) -> list[tuple[object, ...]]:
    meanings = _meanings(kind)
    return [(*place, f"`{name}`", meanings[name]) for place, name in zip(places, kind._fields, strict=True)]


def _messages() -> str:
    rows = ((kind, f"`{m.__name__}`", form.size, _first_sentence(m)) for kind, (m, form) in wire.KINDS.items())
    return _table("kind | message | bytes | it says", rows)


def _fields() -> str:
    found: dict[tuple[object, ...], list[str]] = {}
    meanings: dict[tuple[object, ...], object] = {}
    for message, form in wire.KINDS.values():
        places = _offsets(form.format)[len(wire.Header._fields) :]
        named = _instructions(places) if message is wire.Instructions else _named(places, message)
        for *place, meaning in named:
            found.setdefault(tuple(place), []).append(f"`{message.__name__}`")
            meanings.setdefault(tuple(place), meaning)
    rows = ((", ".join(messages), *place, meanings[place]) for place, messages in found.items())
    return _table("message | offset | type | field | meaning", rows)


def _instructions(places: list[tuple[int, str]]) -> list[tuple[object, ...]]:
    """Its items are not fields of their own, and their number is a field on the wire only."""
    most, meanings = wire.INSTRUCTIONS_PER_MESSAGE, _meanings(wire.Instructions)
    step, base, count, *items = places
    size = items[4][0] - items[0][0]
    assert items[-4][0] == items[0][0] + (most - 1) * size
    inner = ", ".join(f"+{offset - items[0][0]} {kind}" for offset, kind in items[:4])
    return [
        (*step, "`step`", meanings["step"]),
        (*base, "`base_ns`", meanings["base_ns"]),
        (*count, "`count`", f"items in use, 0 to {most}"),
        (items[0][0], f"{most} × {size} bytes", "`items`", f"{meanings['items']} ({inner})"),
    ]


def _kinds() -> str:
    waits = {kind.value for kind in wire.WaitKind}
    rows = ((kind.value, f"`{kind.name}`", "yes" if kind in waits else "") for kind in wire.InstructionKind)
    assert waits <= {kind.value for kind in wire.InstructionKind}
    return _table("number | instruction | also a wait", rows)


def _page() -> str:
    rows = []
    for name, meaning in _meanings(page.Field).items():
        writer, _, says = meaning.partition(": ")
        rows.append((getattr(page.Field, name), f"`{name}`", writer, says))
    missing = {name for name in vars(page.Field) if name.isupper()} - set(_meanings(page.Field))
    assert not missing, f"words without a meaning: {missing}"
    return _table("index | word | writer | meaning", sorted(rows))


def _page_values() -> str:
    words = {page.ClockKind: "CLOCK_KIND", page.SideActivity: "SIDE_ACTIVITY", page.DeviceGate: "DEVICE_GATE"}
    rows = []
    for kind, word in words.items():
        meanings = _meanings(kind)
        values = {name: value for name, value in vars(kind).items() if name.isupper()}
        rows += [(f"`{word}`", value, f"`{name}`", meanings.get(name, "")) for name, value in values.items()]
    return _table("word | value | name | meaning", rows)


def _unit_record() -> str:
    places = _offsets("".join(unit_record.UNIT_FORMATS))
    return _table("offset | type | field | meaning", _named(places, unit_record.Unit))


def _limits() -> str:
    rows: list[tuple[object, object]] = [
        ("version of the messages", wire.VERSION),
        ("version of the page", page.PAGE_VERSION),
        ("version of the records", layout.RECORD_VERSION),
        ("size of the page", f"{page.PAGE_BYTES} bytes"),
        ("slots that can be planned", page.PLANNED_SLOTS),
        ("renewals of a permit", page.RENEWALS_PER_SLOT),
        ("steps planned ahead", state.AHEAD_STEPS),
        ("instructions in a message", wire.INSTRUCTIONS_PER_MESSAGE),
        ("messages that wait for the chosen slot", message_sender.WAITING_AT_MOST),
        ("multipart messages queued for the daemon", message_sender.SEND_HIGH_WATER_MARK),
        ("size of one part that the daemon accepts", f"{receiver.MAXIMUM_MESSAGE_BYTES} bytes"),
        ("length of a socket's path", f"{page_file.SOCKET_PATH_MAX_BYTES} bytes"),
        ("length of a status line", f"{statuses.MAXIMUM_LINE_BYTES} bytes"),
        ("length of an error's text in one", f"{statuses.MAXIMUM_MESSAGE_CHARACTERS} characters"),
    ]
    return _table("limit | value", rows)


def _states() -> str:
    table = _table("state | meaning", ((f"`{each.name}`", each.value) for each in state.State))
    return f"{table}\n\n```mermaid\n{state.diagram()}\n```"


def _keys(table: type[BaseModel]) -> str:
    meanings = _meanings(table)
    rows = []
    for name, field in table.model_fields.items():
        allowed = (field.description or "").removesuffix(_FROM_WHERE_STARTED)
        rows.append((f"`{name}`", _default(name, field), allowed, meanings[name]))
    return _table("key | default | allowed | meaning", rows)


def _default(name: str, field: FieldInfo) -> str:
    if name in _DEFAULTS_IN_WORDS:
        return _DEFAULTS_IN_WORDS[name]
    assert field.default is not None and field.default is not PydanticUndefined, f"say what {name} is by default"
    return f"`{json.dumps(field.default)}`"


def _layers() -> str:
    names = {kind.__name__ for kind in (*registry.RULES, *registry.FORWARDS) if kind.__module__.startswith("torch.")}
    names |= {f"{name.rpartition('.')[2]} of {name.partition('.')[0]}" for name in registry.NAMED}
    return textwrap.fill(_joined(names), 120)


def _draws() -> str:
    homes: Any = {"functional": functional, "Tensor": Tensor, "torch": torch}
    names = set()
    for each in (each for each in registry.CALLS if draws_numbers(each) and each.__name__[0] != "_"):
        home = next(name for name, where in homes.items() if getattr(where, each.__name__, None) is each)
        names.add(f"{home}.{each.__name__}")
    return textwrap.fill(_joined(names), 120)


def _optimizers() -> str:
    return ", ".join(sorted(kind.__name__ for kind in optim_registry.RULES))


def _joined(names: Iterable[str]) -> str:
    """In one list, and by one name those that differ in their number of axes only: Conv1d/2d/3d."""
    axes: dict[str, list[str]] = {}
    for name in sorted(names):
        stem = re.sub(r"[123]d$", "", name)
        axes.setdefault(stem, []).append(name.removeprefix(stem))
    plain = [stem for stem, found in axes.items() if "" in found]
    numbered = [stem + "/".join(filter(None, found)) for stem, found in axes.items() if any(found)]
    return ", ".join(sorted(plain + numbered))


def _statuses() -> str:
    rows = []
    for event, kind in statuses._KINDS.items():
        says, _, attributes = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
        meanings = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE))
        keys = [(each.name, " ".join(meanings.get(each.name, "").split()).rstrip(".")) for each in fields(kind)]
        named = ", ".join(f"`{name}` ({meaning})" if meaning else f"`{name}`" for name, meaning in keys)
        rows.append((f"`{event}`", " ".join(says.split()), named))
    return _table("event | it says | other keys", rows)


def _commands(program: str, commands: Iterable[Command]) -> str:
    rows = ((f"`{program} {each.name}`", each.summary) for each in commands)
    return _table("command | what it does", rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "header": _header,
    "messages": _messages,
    "fields": _fields,
    "kinds": _kinds,
    "page": _page,
    "page-values": _page_values,
    "unit-record": _unit_record,
    "limits": _limits,
    "states": _states,
    "statuses": _statuses,
    "commands-squeezer": lambda: _commands("squeezer", squeezer_cli.COMMANDS),
    "commands-trials": lambda: _commands("trials", trials_cli.COMMANDS),
    "layers": _layers,
    "draws": _draws,
    "optimizers": _optimizers,
    "matrix": lambda: matrix.matrix_table(matrix.read()),
    "matrix-run": lambda: matrix.run_table(matrix.read()),
    **{f"keys-{name}": (lambda table=table: _keys(table)) for name, table in config._TABLES.items()},
}


def main() -> None:
    """Rewrite the documents."""
    for path in documents():
        before = path.read_text(encoding="utf-8")
        after = rewritten(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"rewrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
