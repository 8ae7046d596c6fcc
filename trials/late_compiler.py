"""Leaves PyTorch's compiler unloaded in a process that never compiles.

Each optimizer of PyTorch imports `torch._dynamo` when it is made and in each step, only to have the compiler leave it
alone. That import takes more than a second of CPU time, and in the bubbles of a main job many steps. So a stand-in
answers, and becomes the real module once anything else is asked of it.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


def load_compiler_late() -> None:
    """Put a stand-in for the compiler, unless it is loaded already. PyTorch itself may be loaded or not."""
    package = PathFinder.find_spec("torch")
    spec = package and PathFinder.find_spec(NAME, package.submodule_search_locations)
    if spec is not None and NAME not in sys.modules:
        sys.modules[NAME] = _StandIn(spec)
        sys.meta_path.insert(0, _FinderOfLoaded())


def is_compiler_loaded() -> bool:
    """Whether it is; a stand-in does not count."""
    return type(sys.modules.get(NAME, None)) is ModuleType


class _StandIn(ModuleType):
    """The module until it is loaded, for as much as optimizers ask of it."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(NAME)
        own = {"_changing": threading.Lock(), "_left_alone": []}
        vars(self).update(own, __spec__=spec, __loader__=spec.loader, __file__=spec.origin, __package__=NAME)

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Do nothing: nothing compiles."""

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """Return a function of PyTorch's as it is, since nothing would compile it. All else is for the real module."""
        with self._changing:
            if fn is not None and options == {"wrapping": False} and sys.modules.get(NAME) is self:
                self._left_alone.append(fn)
                return fn
        return self._loaded().disable(fn, recursive, **options)

    def __getattr__(self, name: str) -> Any:
        """Load the module for anything else."""
        return getattr(self._loaded(), name)

    def __setattr__(self, name: str, value: object) -> None:
        """Change the module itself: what is changed here would be lost once that is loaded."""
        setattr(self._loaded(), name, value)

    def __delattr__(self, name: str) -> None:
        """See `__setattr__`."""
        delattr(self._loaded(), name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as a module is, by those who can."""
        return importlib.import_module, (NAME,)

    def _loaded(self) -> ModuleType:
        with self._changing:  # not while it is imported: a thread that imports a part of it would wait for ever
            if sys.modules.get(NAME) is self:
                del sys.modules[NAME]
                if "torch" in sys.modules:
                    vars(sys.modules["torch"]).pop("_dynamo", None)
                for function in self._left_alone:  # PyTorch has kept the answer there, and asks again
                    vars(function).pop("__dynamo_disable", None)
        import torch._dynamo as loaded

        return loaded


class _FinderOfLoaded(MetaPathFinder):
    """Finds submodules that were loaded by the search for their parent's path: else there would be two of them."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        if target is not None or not fullname.startswith(f"{NAME}.") or fullname not in sys.modules:
            return None
        module = sys.modules[fullname]
        return ModuleSpec(fullname, _LoaderOfLoaded(module), origin=getattr(module, "__file__", None))


class _LoaderOfLoaded(Loader):
    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        with suppress(AttributeError):  # a module of settings has kept its own
            module.__spec__ = self._spec
