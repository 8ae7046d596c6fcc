"""The study's loss and score, computed for all trials of a group."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from trials.fusion.layers.conv import draws
from trials.fusion.own_code.drawing import DRAWING
from trials.fusion.scores.scalar import Scalar
from trials.fusion.ways import Way
from trials.own_logger import own_logger
from trials.study import Study
from trials.training.inputs.study_code import code_run
from trials.training.inputs.study_state import StudyState
from trials.training.scores.objectives import score_functions

log = own_logger(__name__)

_said: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Study -> what was logged about it. There is a new group of its trials again and again."""


def scalars_of(study: Study, way: Way) -> dict[str, Scalar]:
    """Return the loss of `study`, and the score or scores, for trials that are trained in `way`."""
    say = partial(_say_once, study)
    return {
        name: Scalar(f"Study.{name}", function, way, say, StudyState(study, name, _functions).prove)
        for name, function in _functions(study).items()
    }


def draw_for_outputs(study: Study) -> bool:
    """Whether the loss or a score may draw a number for each element of a tensor."""
    code = code_run(study, ("loss", "score"))
    return not DRAWING.isdisjoint(code.names | code.called) or any(map(draws, code.modules))


def _functions(study: Study) -> dict[str, Callable[..., Tensor]]:
    return {"loss": study.loss, **score_functions(study)}


def _say_once(study: Study, reason: str) -> None:
    said = _said.setdefault(study, set())
    name = reason.partition(" ")[0]
    if name not in said:
        said.add(name)
        log.warning("%s", reason)
