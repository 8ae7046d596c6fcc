"""Which faults a run of the soak meets: drawn from its seed and number alone, so that each run can be repeated."""

import random
import signal
from dataclasses import asdict, dataclass
from typing import Any

STEPS = 300
"""Of each run of the main job, unless fewer are asked for."""

OURS = ("daemon", "keeper", "side task", "search worker", "loader")
"""A fault that hits one of these must not harm the main job."""
_VICTIMS = (*OURS, "launcher", "deepspeed", "rank")
_WEIGHTS = (4, 2, 4, 3, 2, 2, 2, 3)
_OTHERS = ("full disk", "file limit", "hang-up", "Ctrl-C")
_OTHERS_SHARE = 0.25
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGSTOP)
_STOPPED_S = (0.1, 1.0, 5.0, None)
_MOST_FAULTS = 3

FORMS = ("detached", "foreground", "background")
"""How a job is started: in a session of its own, or on a terminal, as its foreground job or in the background."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        what: a signal's name, or one of `_OTHERS`.
        victim: whom it hits; "": the machine.
        rank: which of the victims.
        after_step: not before the main job has done this step. 0: as soon as the victim is there.
        delay_s: how long after that.
        lasts_s: until a stopped process is continued, or a disk is free again; None: for ever.
    """

    what: str
    victim: str = ""
    rank: int = 0
    after_step: int = 0
    delay_s: float = 0.0
    lasts_s: float | None = None

    @property
    def ends_job(self) -> bool:
        """Whether it ends the main job, or may, as it would without us."""
        if self.what in ("hang-up", "Ctrl-C"):
            return self.victim == "foreground"
        if self.hides_status and self.after_step == 0:
            return True  # a launcher may be killed before it has started a rank
        return self.what in _ENDS_JOB.get(self.victim, ())

    @property
    def hides_status(self) -> bool:
        """Whether the job's exit status is lost though the ranks continue: its launchers are gone."""
        return self.victim in ("launcher", "deepspeed") and self.what in ("SIGKILL", "SIGHUP")

    def as_record(self) -> dict[str, Any]:
        """For the results."""
        return asdict(self)


_ENDS_JOB = {
    "launcher": ("SIGTERM", "SIGHUP", "SIGINT"),
    "deepspeed": ("SIGTERM", "SIGINT"),
    "rank": ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One run.

    Attributes:
        form: one of `FORMS`.
        faults: in the order of their steps.
        steps: of the main job.
    """

    form: str
    faults: tuple[Fault, ...]
    steps: int = STEPS

    @property
    def may_end_early(self) -> bool:
        """Whether one of the faults ends the main job by design."""
        return any(fault.ends_job for fault in self.faults)

    @property
    def has_status(self) -> bool:
        """Whether the job's exit status must be 0."""
        hidden = self.may_end_early or any(fault.hides_status for fault in self.faults)
        return self.form == "detached" and not hidden

    @property
    def fills_disk(self) -> bool:
        """Whether the run's directory needs a disk of its own."""
        return any(fault.what == "full disk" for fault in self.faults)


def draw(seed: int, number: int, steps: int = STEPS) -> Plan:
    """The faults of run `number`."""
    chance = random.Random(f"{seed}:{number}")
    count = chance.choices(range(1, _MOST_FAULTS + 1), (5, 3, 2))[0]
    faults: list[Fault] = []
    form = "detached"
    while len(faults) < count:
        if chance.random() < _OTHERS_SHARE:
            fault = _draw_other(chance, steps)
            if fault.victim in FORMS:
                if form != "detached":
                    continue  # one terminal
                form = fault.victim
        else:
            fault = _draw_signal(chance, steps)
        faults.append(fault)
    if any(fault.victim == "launcher" and fault.what == "SIGKILL" for fault in faults):
        # nobody is left who could end what somebody has stopped for ever
        faults = [_continued(fault) for fault in faults]
    return Plan(form=form, faults=tuple(sorted(faults, key=lambda fault: fault.after_step)), steps=steps)


def _draw_signal(chance: random.Random, steps: int) -> Fault:
    victim = chance.choices(_VICTIMS, _WEIGHTS)[0]
    number = chance.choice(_SIGNALS)
    lasts_s = None
    if number == signal.SIGSTOP:
        lasts_s = chance.choice(_STOPPED_S if victim in OURS else _STOPPED_S[:-1])
    rank = 0 if victim in ("launcher", "deepspeed") else chance.randrange(2)
    return Fault(what=number.name, victim=victim, rank=rank, lasts_s=lasts_s, **_draw_time(chance, steps))


def _draw_other(chance: random.Random, steps: int) -> Fault:
    what = chance.choice(_OTHERS)
    time = _draw_time(chance, steps)
    if what == "full disk":
        return Fault(what=what, lasts_s=chance.choice(_STOPPED_S[1:]), **time)
    if what == "file limit":
        return Fault(what=what, victim=chance.choice(("daemon", "side task", "search worker")), **time)
    form = "foreground" if what == "Ctrl-C" else chance.choice(FORMS[1:])
    return Fault(what=what, victim=form, **time)


def _draw_time(chance: random.Random, steps: int) -> dict[str, Any]:
    """A quarter while the job starts, some when it ends, the rest while it trains."""
    where = chance.random()
    if where < 0.25:
        return {"after_step": 0, "delay_s": round(chance.uniform(0.0, 4.0), 2)}
    if where < 0.33:
        return {"after_step": steps, "delay_s": round(chance.uniform(0.0, 2.0), 2)}
    return {"after_step": chance.randrange(1, steps), "delay_s": round(chance.uniform(0.0, 0.1), 3)}


def _continued(fault: Fault) -> Fault:
    if fault.what != "SIGSTOP" or fault.lasts_s is not None:
        return fault
    return Fault(**{**fault.as_record(), "lasts_s": 5.0})
