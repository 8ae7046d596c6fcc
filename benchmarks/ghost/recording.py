"""What the stages of a real job did in each step, read from the records of its run, for ghosts to do the same.

Stages meet: gloo hands no message over before both ends are there, and the shorter of two waits is the transfer
itself. So a step of a stage is a chain of *segments*, its own work up to a message, and of the *transfers* after them,
from when the last party has come until this stage goes on.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from benchmarks.ghost.program import Op, meeting
from squeezer.records.reader import RankRun, load_run

_NORM = -1
"""In place of a slot: the all-reduce inside the optimizer's instruction, which lies in the same slot."""


class RecordedStep(NamedTuple):
    """One step of a stage, in ns; one entry per message or collective of its program, in order."""

    segments_ns: Sequence[int]
    transfers_ns: Sequence[int]


@dataclass(frozen=True, slots=True)
class Recording:
    """One stage's steps. Those of the same index took place at the same time in all stages.

    Attributes:
        steps: at least two.
        shortest_ns: of each message of the program, the shortest transfers (first decile): with nobody late to wake.
    """

    steps: Sequence[RecordedStep]
    shortest_ns: Sequence[int]

    @classmethod
    def of(cls, steps: Sequence[RecordedStep]) -> "Recording":
        """With the deciles of these steps."""
        by_message = zip(*(step.transfers_ns for step in steps), strict=True)
        return cls(steps, [round(quantiles(of, n=10, method="inclusive")[0]) for of in by_message])

    def of_step(self, step: int) -> RecordedStep:
        """The step to repeat in `step`, counted from 0: all in their order, over and over."""
        return self.steps[step % len(self.steps)]

    @property
    def compute_ns(self) -> float:
        """The median of a step's own work."""
        return median(sum(step.segments_ns) for step in self.steps)


def read_recordings(run: Path, programs: Sequence[Sequence[Op]]) -> list[Recording]:
    """One recording per stage, of the steps that all stages have squeezed and recorded in full.

    What passes between two steps counts as usual, for it may hold an evaluation.

    Args:
        run: the directory of a run with one rank per stage.
        programs: one program for each stage.

    Raises:
        ValueError: fewer than two such steps, or ranks that are not one per stage.
    """
    runs = load_run(run)
    if len(runs) != len(programs):
        raise ValueError(f"{run}: {len(runs)} ranks for {len(programs)} stages; allowed: one rank per stage")
    ranks = [_Rank(stage, program, runs[stage]) for stage, program in enumerate(programs)]
    whole = sorted(set.intersection(*(rank.whole_steps() for rank in ranks)))
    if len(whole) < 2:
        raise ValueError(f"{run}: {len(whole)} steps that all ranks have squeezed and recorded; allowed: two or more")
    steps: list[list[RecordedStep]] = [[] for _ in ranks]
    for number in whole:
        together_ns: dict[Hashable, int] = {}
        for rank in ranks:
            for met, begin_ns, _ in rank.messages(number):
                together_ns[met] = max(begin_ns, together_ns.get(met, 0))
        for rank, found in zip(ranks, steps, strict=True):
            found.append(rank.recorded(number, together_ns))
    return [Recording.of(found) for found in steps]


def out_of_step(recordings: Sequence[Recording], stage: int) -> list[Recording]:
    """The same, but all stages other than `stage` do what they did half of the recording away.

    Replayed, this shows what is lost to a ghost because what slows it does not slow the true stage at the same time.
    """
    half = len(recordings[0].steps) // 2
    return [
        one if at == stage else Recording.of([*one.steps[half:], *one.steps[:half]])
        for at, one in enumerate(recordings)
    ]


class _Rank:
    """One rank's records, seen as the messages of a program."""

    def __init__(self, stage: int, program: Sequence[Op], run: RankRun) -> None:
        ops = [op for op in program if op.verb != "compute"]
        self._keys = {meeting(op, stage): _NORM if op.what == "norm" else op.slot for op in ops}
        self._begin_ns = {step["step"]: step["start_ns"] for step in run.records["step"] if step["squeezed"]}
        self._times = _times(run)
        loss_ends_ns = {step: times[ops[-1].slot][1] for step, times in self._times.items() if ops[-1].slot in times}
        gaps_ns = [at_ns - loss_ends_ns[step - 1] for step, at_ns in self._begin_ns.items() if step - 1 in loss_ends_ns]
        self._between_ns = round(median(gaps_ns)) if gaps_ns else 0

    def whole_steps(self) -> set[int]:
        """The squeezed steps of which every message is recorded."""
        wanted = set(self._keys.values())
        return {step for step in self._begin_ns if wanted <= self._times.get(step, {}).keys()}

    def messages(self, step: int) -> Iterator[tuple[Hashable, int, int]]:
        """Of each message its meeting, begin and end, in the program's order."""
        for met, key in self._keys.items():
            yield met, *self._times[step][key]

    def recorded(self, step: int, together_ns: Mapping[Hashable, int]) -> RecordedStep:
        """That step, given when the last party had come to each meeting."""
        free_ns = self._begin_ns[step] - self._between_ns
        segments_ns, transfers_ns = [], []
        for met, begin_ns, end_ns in self.messages(step):
            segments_ns.append(begin_ns - free_ns)
            transfers_ns.append(max(0, end_ns - together_ns[met]))
            free_ns = end_ns
        return RecordedStep(segments_ns, transfers_ns)


def _times(run: RankRun) -> dict[int, dict[int, tuple[int, int]]]:
    """Of each step: begin and end of its instructions by slot, of the norm and of the loss."""
    times: dict[int, dict[int, tuple[int, int]]] = {}
    for record in run.records["instructions"]:
        of_step = times.setdefault(record["step"], {})
        of_step.update({slot: (begin_ns, end_ns) for _, slot, begin_ns, end_ns in record["items"]})
    for bubble in run.records["bubble"]:
        if bubble["wait"] == "OPTIMIZER_STEP" and bubble["step"] in times:
            times[bubble["step"]].setdefault(_NORM, (bubble["start_ns"], bubble["end_ns"]))
    return times


class Pace:
    """How many times as long as recorded the true stage computes: the median of its last steps.

    The machine's speed changes within seconds, so ghosts that kept to the recorded times would be faster or slower than
    the true stage, which differs from the real job.

    Args:
        recorded: the true stage's recording.
    """

    STEPS = 8

    def __init__(self, recorded: Recording) -> None:
        self._recorded_ns = recorded.compute_ns
        self._last: list[float] = []

    def after(self, compute_ns: int) -> float:
        """A step has ended whose own work took `compute_ns`."""
        self._last = [*self._last, compute_ns / self._recorded_ns][-self.STEPS :]
        return median(self._last)
