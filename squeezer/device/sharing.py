"""Whether a side task may run on a CUDA device beside a main job: through its MPS server, or in turns, or not at all.

In turns, the device gives each process a time slice. A squeezed bubble then costs the main job 0.14 to 0.25 ms, and
up to a slice of 2.4 ms (measured on an H200). Under MPS the main job's next kernel starts at once.
"""

import logging
from typing import Literal

from squeezer.calibration.mps import MpsError, NoAnswerError, Server, server_of
from squeezer.calibration.verdict import Verdict
from squeezer.calibration.verdict_store import driver_version, kept, state_file
from squeezer.device.base import CannotShareError

log = logging.getLogger(__name__)

REMEDY = (
    "Without MPS a side task may delay the main job by up to a time slice after each bubble, so bubbles are only "
    "observed. What to do: squeezer doctor --fix-mps; or squeezer doctor --measure, which may find turns sound here"
)

OLD = (
    "this device was measured by an earlier version of this program, which did not find out what waits at a shut gate, "
    "nor what a bubble's words cost; run `squeezer doctor --measure` again while no job runs"
)


def verdict_of(uuid: str, *, mps: bool) -> Verdict | None:
    """What `squeezer doctor --measure` has found on this device with its present driver; None: it was not measured."""
    return kept(uuid, driver_version(), mps=mps, file=state_file())


def why_no_turns(uuid: str) -> str:
    """Why a main job and a side task may not take turns on the device `uuid`, without MPS; empty: they may."""
    verdict = verdict_of(uuid, mps=False)
    if verdict is None:
        return f"turns were not measured on this device with this driver: {state_file()} has no such verdict"
    if not verdict.sound:
        return f"turns were measured not to be sound on this device: {verdict.reason}"
    return OLD if verdict.is_old else ""


def refuse_unsound(uuid: str) -> None:
    """Refuse to share a device by MPS unless a measurement says that it is sound.

    Raises:
        CannotShareError: none says so.
    """
    verdict = verdict_of(uuid, mps=True)
    if verdict is None:
        raise CannotShareError(
            f"this device was not measured with MPS and this driver: {state_file()} has no such verdict, so bubbles "
            "are only observed. What to do, while no job runs: squeezer doctor --measure"
        )
    if not verdict.sound:
        raise CannotShareError(f"by measurement with MPS, bubbles on this device are only observed: {verdict.reason}")
    if verdict.is_old:
        log.warning("%s", OLD)


def way_to_share(mps: Literal["auto"] | bool, main_pid: int, no_turns: str) -> Server | None:
    """The MPS server that a side task has to use beside the rank `main_pid`; None: they take turns.

    Args:
        mps: as configured.
        main_pid: of the rank.
        no_turns: why turns are not sound on this device; empty: they are.

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
    if mps is not True and not may_pass:
        if not no_turns:
            return None
        why = f"{why}; {no_turns}"
    raise CannotShareError(f"{why}. {REMEDY}", may_pass=may_pass)
