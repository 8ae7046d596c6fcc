"""The numbers in which trials differ, as attributes of the one module whose code runs for all of them."""

from collections.abc import Callable, Mapping

from torch import nn

from trials.fusion.compared.peft_configs import CONFIG, common
from trials.fusion.rows import Vectors


class Varying:
    """The varying attributes of a module and of those inside it."""

    def __init__(self, inside: Mapping[str, nn.Module], vectors: Vectors, renew: Callable[[nn.Module], None]) -> None:
        """Take the `vectors` of the modules `inside`, by path. `renew` is called with each module that has changed."""
        self._tables = [(inside[path], table) for path, table in vectors.items() if path in inside]
        self._renew = renew

    def set_row(self, row: int) -> None:
        """Set those of one trial."""
        for module, table in self._tables:
            for name, values in table.items():
                setattr(module, name, values[row])
            self._renew(module)

    def set_common(self) -> None:
        """Set the numbers on which all trials agree. The others are unset, so reading one fails."""
        for module, table in self._tables:
            for name, values in table.items():
                if values.count(values[0]) == len(values):
                    setattr(module, name, values[0])
                elif name == CONFIG:
                    setattr(module, name, common(values))
                else:
                    module.__dict__.pop(name, None)
            self._renew(module)
