"""Whether a side task may run on a CUDA device beside a main job: through its MPS server, or in turns, or not at all.

In turns, the device gives each process a time slice. A squeezed bubble then costs the main job 0.14 to 0.25 ms, and
up to a slice of 2.4 ms (measured on an H200). Under MPS the main job's next kernel starts at once.
"""

import logging
from typing import Literal

from squeezer.calibration.verdict import Verdict
from squeezer.calibration.verdict_store import driver_version, kept, state_file
from squeezer.device.base import CannotShareError
from squeezer.device.mps import MpsError, NoAnswerError, Server, server_of

log = logging.getLogger(__name__)

REMEDY = (
    "Without MPS a side task may delay the main job by up to a time slice after each bubble, so bubbles are only "
    "observed. What to do: squeezer doctor --fix-mps; or squeezer doctor --measure, which may find turns sound here"
)


def verdict_of(uuid: str, *, mps: bool) -> Verdict | None:
    """What `squeezer doctor --measure` has found on this device with its present driver; None: it was not measured."""
    return kept(uuid, driver_version(), mps=mps, file=state_file())


def sharing_is_sound(uuid: str) -> bool:
    """Whether a main job and a side task may take turns on the device `uuid`, without MPS: if it was measured so."""
    verdict = verdict_of(uuid, mps=False)
    return verdict is not None and verdict.sound


def refuse_unsound(uuid: str) -> None:
    """Refuse to share a device by MPS of which a measurement says that it is not sound.

    Raises:
        CannotShareError: a measurement says so.
    """
    verdict = verdict_of(uuid, mps=True)
    if verdict is None:
        log.warning("this device was not measured with MPS; run `squeezer doctor --measure` while no job runs")
    elif not verdict.sound:
        raise CannotShareError(f"by measurement with MPS, bubbles on this device are only observed: {verdict.reason}")


def way_to_share(mps: Literal["auto"] | bool, main_pid: int, in_turns: bool) -> Server | None:
    """The MPS server that a side task has to use beside the rank `main_pid`; None: they take turns.

    Args:
        mps: as configured.
        main_pid: of the rank.
        in_turns: whether turns are sound on this device.

    Raises:
        CannotShareError: neither will do.
    """
    why, may_pass = "[device] mps is false", False
    if mps:
        try:
            server = server_of(main_pid)
        except MpsError as error:
            why, may_pass = str(error), isinstance(error, NoAnswerError)
        else:
            if server.is_visible or mps is True:
                return server
            why = (
                f"it cannot be known whether process {main_pid} is a client of the MPS server at {server.directory}, "
                "which counts processes in another namespace; if it is, set [device] mps = true"
            )
    if in_turns and mps is not True and not may_pass:
        return None
    raise CannotShareError(f"{why}. {REMEDY}", may_pass=may_pass)
