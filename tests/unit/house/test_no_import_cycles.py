"""No two files of ours import each other, nor do two rooms. Imports inside functions count too."""

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

from tests.support.paths import PACKAGES, ROOT


def imports_of(*packages: str) -> dict[str, set[str]]:
    """Each module, and the modules of `packages` that it imports."""
    graph = grimp.build_graph(*packages, cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def test_no_circle_of_imports() -> None:
    imports = imports_of(*PACKAGES)
    assert {module.partition(".")[0] for module in imports} == set(PACKAGES)
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1][::-1]))


def rooms_of(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Each sub-package, and those sub-packages beside it that its modules import."""
    rooms: dict[str, set[str]] = {}
    for module, imported in imports.items():
        package, room = ([*module.split("."), ""])[:2]
        if (ROOT / package / room / "__init__.py").exists() and room:
            beside = {other.split(".")[1] for other in imported if other.startswith(f"{package}.")} - {room}
            rooms.setdefault(f"{package}.{room}", set()).update(f"{package}.{each}" for each in beside)
    return rooms


def test_no_circle_of_rooms() -> None:
    rooms = rooms_of(imports_of(*PACKAGES))
    assert "squeezer.device" in rooms["squeezer.daemon"]
    try:
        TopologicalSorter(rooms).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1][::-1]))


def test_a_circle_of_rooms_through_different_files_is_seen() -> None:
    imports = {"squeezer.daemon.loop": {"squeezer.device.cpu"}, "squeezer.device.base": {"squeezer.daemon.silence"}}
    with pytest.raises(CycleError):
        TopologicalSorter(rooms_of(imports)).prepare()


def test_an_import_inside_a_function_is_seen() -> None:
    imports = imports_of("trials")
    assert "trials.side_task.scheduler" in imports["trials.side_task.main"]
