"""The hooks without a code change: ``python -m ds_hooks [--module] train.py …`` runs a script with hooks attached.

Also ``deepspeed --module ds_hooks train.py …``. `deepspeed.initialize` is wrapped when the script imports deepspeed,
not earlier, so environment variables that the script sets before still count.
"""

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ds_hooks.handle import Handle, attach
from ds_hooks.notice import notice

USAGE = "usage: python -m ds_hooks [--module] SCRIPT [ARGUMENT …]"


class _AttachWhenImported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `deepspeed` as usual, and wraps its `initialize` once it is loaded."""

    def __init__(self) -> None:
        self.handles: weakref.WeakSet[Handle] = weakref.WeakSet()  # each goes with its engine
        self.found_engine = False
        self._loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "deepspeed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("deepspeed")
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        initialize = module.initialize

        def initialize_and_attach(*args: Any, **kwargs: Any) -> Any:
            result = initialize(*args, **kwargs)
            engine = result[0]
            if hasattr(engine, "_INSTRUCTION_MAP"):
                self.found_engine = True
                self.handles.add(attach(engine))
            return result

        module.initialize = initialize_and_attach


def _split(arguments: list[str]) -> tuple[bool, str, list[str]]:
    """(is a module, script, its arguments). Launchers put `--local_rank=N` before the script; it moves behind."""
    own: list[str] = []
    moved: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        (moved if rest[0].startswith("--local_rank") else own).append(rest.pop(0))
    unknown = [option for option in own if option != "--module"]
    if unknown:
        raise SystemExit(f"ds_hooks: unknown option {unknown[0]!r}; allowed before the script is --module\n{USAGE}")
    if not rest:
        raise SystemExit(f"ds_hooks: no training script named\n{USAGE}")
    return "--module" in own, rest[0], [*rest[1:], *moved]


def main(arguments: list[str] | None = None) -> None:
    """Run the script as `__main__`, and report at the end if it never built a pipeline engine.

    Args:
        arguments: options, the script and its arguments; None: those of the command line.

    Raises:
        SystemExit: an unknown option, or no such script.
    """
    is_module, script, script_arguments = _split(sys.argv[1:] if arguments is None else arguments)
    if not is_module and not Path(script).is_file():
        raise SystemExit(f"ds_hooks: no such training script: {script}")
    finder = _AttachWhenImported()
    sys.meta_path.insert(0, finder)
    main_pid = os.getpid()

    def finish() -> None:
        if os.getpid() != main_pid:
            return  # a forked data-loading worker
        for handle in [*finder.handles]:
            handle.detach()
        if not finder.found_engine:
            notice(
                f"{script} ended without a pipeline engine, so no bubble was seen; call "
                f"deepspeed.initialize(model=...) with a PipelineModule or a DualPipeVModule"
            )

    atexit.register(finish)
    sys.argv = [script, *script_arguments]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
