"""The configurations of adapters that `peft` keeps in a model's modules, and in which trials may differ.

They hold numbers that only the making of the layers has read. Code that reads one while a forward runs for all trials
fails, and then runs once per trial.
"""

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from trials.fusion.errors import FuseError

CONFIG = "peft_config"
"""The attribute: a table of configurations by name."""

_FIELDS = {"peft.tuners.lora.config.LoraConfig": frozenset(("lora_alpha", "lora_dropout", "alpha_pattern"))}
"""By the class of a configuration: what the layers have as their own attributes, which are compared."""


class Differs:
    """Stands for a value in which trials differ."""

    def __eq__(self, other: object) -> bool:
        """Refuse to answer."""
        raise FuseError("the code reads a number of an adapter's configuration in which trials differ")

    def __bool__(self) -> bool:
        """Refuse to answer."""
        return self == None  # noqa: E711 - which raises

    __hash__ = None  # type: ignore[assignment]


def fields_of(value: object) -> frozenset[str]:
    """Return the names of the attributes in which a configuration of trials may differ; other objects have none."""
    kind = type(value)
    return _FIELDS.get(f"{kind.__module__}.{kind.__qualname__}", frozenset())


def configs(models: Sequence[nn.Module]) -> dict[str, dict[str, list[Any]]]:
    """Return each trial's configurations of the modules that have some, by path."""
    found = {}
    for path, module in models[0].named_modules():
        table = vars(module).get(CONFIG)
        if isinstance(table, dict) and any(fields_of(each) for each in table.values()):
            found[path] = {CONFIG: [vars(model.get_submodule(path))[CONFIG] for model in models]}
    return found


def common(tables_K: Sequence[Any]) -> dict[str, Any]:
    """Return the trials' configurations as one, in which every value that differs is a `Differs`."""
    made = dict(tables_K[0])
    for name, config in made.items():
        made[name] = copy.copy(config)
        for field in fields_of(config):
            values = [vars(table[name])[field] for table in tables_K]
            if values.count(values[0]) < len(values):
                setattr(made[name], field, Differs())
    return made
