"""The models of all libraries, and what becomes of trials of each."""

import importlib
import os
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version

import torch

from tests.support.fused_and_alone import Verdict, fused_and_alone, study_of
from tests.zoo.cases import Case
from trials import FuseError

os.environ["HF_HUB_OFFLINE"] = "1"  # all models are made from their configuration

LIBRARIES = {
    "torchvision": "tests.zoo.torchvision_models",
    "timm": "tests.zoo.timm_models",
    "transformers": "tests.zoo.transformers_models",
}

BLIND = 1e-3
"""Where rounding alone moves a loss by this share, a comparison says nothing."""


class MissingError(Exception):
    """A library is not installed, or cannot be imported."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of trials of one model.

    Attributes:
        verdict: how far apart they are, fused and alone; None: they were refused.
        refused: why.
    """

    verdict: Verdict | None
    refused: str = ""

    @property
    def way(self) -> str:
        """How the forward was computed."""
        if self.verdict is None:
            return "refused"
        whole = next((how for name, how in self.verdict.ways if name.endswith(" as a whole")), "rules")
        return whole.partition(":")[0].partition(" ")[0]

    @property
    def reason(self) -> str:
        """Why not by rules."""
        if self.verdict is None:
            return self.refused
        whole = next((how for name, how in self.verdict.ways if name.endswith(" as a whole")), "")
        return whole.partition(": ")[2].partition(" cannot be traced: ")[2] or whole.partition(": ")[2]

    @property
    def layers(self) -> Counter[str]:
        """How many layers, and calls between them, were computed in each way."""
        found = self.verdict.ways if self.verdict is not None else []
        return Counter(how.partition(":")[0].partition(" ")[0] for name, how in found if not name.endswith(" whole"))


def cases(library: str) -> dict[str, Case]:
    """Return the models of a library, by name.

    Raises:
        MissingError: it says why there are none.
    """
    try:
        found: dict[str, Case] = importlib.import_module(LIBRARIES[library]).CASES
    except Exception as error:  # a library that does not suit the others fails in its own way
        raise MissingError(f"{library} cannot be imported: {error}; `make test-zoo` installs it") from error
    return found


def outcome(case: Case) -> Outcome:
    """Train trials of a model fused and alone."""
    try:
        return Outcome(fused_and_alone(study_of(case.make, case.inputs())))
    except FuseError as error:
        return Outcome(None, str(error))


def versions() -> str:
    """Return the versions of the libraries and of torch."""
    return ", ".join([*(f"{library} {version(library)}" for library in LIBRARIES), f"torch {torch.__version__}"])
