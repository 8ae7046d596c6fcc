"""The hooks without a code change: ``python -m ds_hooks [--module] train.py …`` runs a script with hooks attached.

Also ``deepspeed --module ds_hooks train.py …``. `deepspeed.initialize` is wrapped when the script imports deepspeed,
not earlier, so environment variables that the script sets before still count. Else the script finds all as without us.
"""
# What is imported must not come from the working directory.

import os
import sys

try:
    if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] == os.getcwd():
        del sys.path[0]  # put there by `-m`, and its files may be called as what is imported here
except FileNotFoundError:  # that directory is gone, so nothing was put there
    pass

import atexit
import builtins
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import io
import pkgutil
import runpy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ds_hooks.notice import notice
from ds_hooks.shared.renamed_commands import refuse
from ds_hooks.whose_error import is_of_the_script

USAGE = "usage: python -m ds_hooks [--module] SCRIPT [ARGUMENT …]"
THREADS_END_S = 0.02
"""How long threads have at the end. One of gloo's frees the tensors of the last collective a moment later, and takes
the GIL for that; one that comes when Python is on its way out aborts the process. On one core it comes late."""


class _AttachWhenImported(importlib.abc.MetaPathFinder):
    """Finds `deepspeed` as usual, and has its `initialize` wrapped once it is loaded.

    Libraries ask whether it can be found long before it is imported, so it stays in `sys.meta_path`.
    """

    def __init__(self) -> None:
        self.found_engine = False
        self._is_looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "deepspeed" or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _WrappingLoader(spec.loader, self._wrapped)
        return spec

    def _wrapped(self, initialize: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(initialize)
        def initialize_and_attach(*args: Any, **kwargs: Any) -> Any:
            result = initialize(*args, **kwargs)
            engine = result[0]
            if hasattr(engine, "_INSTRUCTION_MAP"):
                self.found_engine = True
                self._attach(engine)
            return result

        return initialize_and_attach

    def _attach(self, engine: Any) -> None:
        try:
            from ds_hooks.handle import attach
        except Exception as error:  # the script needs none of them
            if is_of_the_script(error):
                raise
            notice(f"the hooks do not load; training continues without squeezing: {type(error).__name__}: {error}")
        else:
            attach(engine)


class _WrappingLoader(importlib.abc.Loader):
    """Loads a module as another loader does, and wraps its `initialize`."""

    def __init__(self, loader: Any, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._loader = loader
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # for whoever asks it for the package's files
        self._loader.exec_module(module)
        module.initialize = self._wrapped(module.initialize)


def _split(arguments: list[str]) -> tuple[bool, str, list[str]]:
    """(is a module, script, its arguments). Launchers put `--local_rank=N` before the script; it moves just behind."""
    own: list[str] = []
    moved: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        (moved if rest[0].startswith("--local_rank") else own).append(rest.pop(0))
    unknown = [option for option in own if option != "--module"]
    if unknown:
        refuse("ds_hooks", f"unknown option {unknown[0]!r}; allowed before the script is --module\n{USAGE}")
    if not rest:
        refuse("ds_hooks", f"no training script named\n{USAGE}")
    return "--module" in own, rest[0], [*moved, *rest[1:]]


def main(arguments: list[str] | None = None) -> None:
    """Run the script as `__main__`, and report at the end if it never built a pipeline engine.

    Args:
        arguments: options, the script and its arguments; None: those of the command line.

    Raises:
        SystemExit: an unknown option, or no such script.
    """
    is_module, script, script_arguments = _split(sys.argv[1:] if arguments is None else arguments)
    if not is_module and not Path(script).exists():
        refuse("ds_hooks", f"no such training script: {script}")
    finder = _AttachWhenImported()
    sys.meta_path.insert(0, finder)
    main_pid = os.getpid()

    def finish() -> None:
        if os.getpid() != main_pid:
            return  # a forked data-loading worker
        if not finder.found_engine and "ds_hooks.handle" not in sys.modules:  # the script may attach hooks by itself
            notice(
                f"{script} built no pipeline engine in this process, so no bubble was seen here; call "
                f"deepspeed.initialize(model=...) with a PipelineModule or a DualPipeVModule, and, in processes that "
                f"the script starts itself, ds_hooks.attach(engine)"
            )
        time.sleep(THREADS_END_S)

    atexit.register(finish)  # the first, so it runs last
    sys.argv = [script, *script_arguments]
    path = str(Path(script).absolute())  # as Python does: a script may change its directory
    if is_module:
        _search_first(os.getcwd())
        found = runpy._get_module_details(script)  # type: ignore[attr-defined]
        sys.argv[0] = found[1].origin
        _run_found(*found)
    elif pkgutil.get_importer(script) is not None:  # a folder, or an archive
        sys.path.insert(0, path)
        _run_found(*runpy._get_main_module_details())  # type: ignore[attr-defined]
    elif script.endswith(".pyc"):
        runpy.run_path(script, run_name="__main__")
    else:
        _search_first(os.path.dirname(os.path.realpath(path)))
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        _run(code, __file__=path, __loader__=importlib.machinery.SourceFileLoader("__main__", path))


def _search_first(folder: str) -> None:
    """Look for modules there first, as Python does for a script or module that it runs."""
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _run_found(_name: str, spec: importlib.machinery.ModuleSpec, code: CodeType) -> None:
    _run(code, __file__=spec.origin, __loader__=spec.loader, __spec__=spec, __package__=spec.parent)


def _run(code: CodeType, **names: Any) -> None:
    """Make it `__main__` for good, not just meanwhile: threads and `atexit` may save objects of its classes later."""
    module = ModuleType("__main__")
    vars(module).update(names, __builtins__=builtins, __cached__=None, __annotations__={})
    sys.modules["__main__"] = module
    exec(code, vars(module))


if __name__ == "__main__":
    main()
