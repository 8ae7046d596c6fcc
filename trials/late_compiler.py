"""Leaves PyTorch's compiler unloaded in a process that never compiles.

Each optimizer of PyTorch imports `torch._dynamo` when it is made and in each step, only to have the compiler leave it
alone. That import takes more than a second of CPU time, and in the bubbles of a main job many steps. So a stand-in
answers, and becomes the real module once anything else is asked of it.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


def load_compiler_late() -> None:
    """Put a stand-in for the compiler, unless it is loaded already. PyTorch itself may be loaded or not."""
    if NAME not in sys.modules:
        sys.modules[NAME] = _StandIn()
        sys.meta_path.insert(0, _FinderOfLoaded())


def is_compiler_loaded() -> bool:
    """Whether it is; a stand-in does not count."""
    return type(sys.modules.get(NAME, None)) is ModuleType


class _StandIn(ModuleType):
    """The module until it is loaded, for as much as optimizers ask of it."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__spec__ = ModuleSpec(NAME, None)
        self._loading = threading.RLock()
        self._left_alone: list[Callable[..., Any]] = []

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Do nothing: nothing compiles."""

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """Return a function of PyTorch's as it is, since nothing would compile it. All else is for the real module."""
        with self._loading:
            if fn is None or options != {"wrapping": False} or is_compiler_loaded():
                return self._loaded().disable(fn, recursive, **options)
            self._left_alone.append(fn)
            return fn

    def __getattr__(self, name: str) -> Any:
        """Load the module for anything else, but not for code that only looks for the files of all modules."""
        if name == "__file__" and sys.modules.get(NAME) is self:
            raise AttributeError(f"{NAME} is not loaded yet")
        return getattr(self._loaded(), name)

    def _loaded(self) -> Any:
        with self._loading:
            if sys.modules.get(NAME) is self:
                import torch

                del sys.modules[NAME]
                vars(torch).pop("_dynamo", None)
                for function in self._left_alone:  # PyTorch has kept the answer there, and asks again
                    vars(function).pop("__dynamo_disable", None)
                import torch._dynamo
            return sys.modules[NAME]


class _FinderOfLoaded(MetaPathFinder):
    """Finds submodules that were loaded by the search for their parent's path: else there would be two of them."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        if target is not None or not fullname.startswith(f"{NAME}.") or fullname not in sys.modules:
            return None
        return ModuleSpec(fullname, _LoaderOfLoaded(sys.modules[fullname]))


class _LoaderOfLoaded(Loader):
    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        with suppress(AttributeError):  # a module of settings has kept its own
            module.__spec__ = self._spec
