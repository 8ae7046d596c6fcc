"""No two files of ours import each other, directly or through others. Imports inside functions count too."""

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

PACKAGES = ("benchmarks", "ds_hooks", "launch", "squeezer", "trials")


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


def test_an_import_inside_a_function_is_seen() -> None:
    imports = imports_of("trials")
    assert "trials.side_task.scheduler" in imports["trials.side_task.main"]
