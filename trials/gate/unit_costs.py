"""What every gate knows of its units: their names, their costs, and which were too long for every bubble."""

from collections import deque
from collections.abc import Sequence

from ds_hooks.shared.page.file import Page
from ds_hooks.shared.page.layout import Field
from trials.gate.base import HOST_UNIT, Starved
from trials.gate.unit_records import UnitRecords

UNKNOWN_COST_NEEDS_NS = 1_000_000
"""A unit of unknown cost starts only if at least this much of the permit is left."""

HOST_WORK_NEEDS_NS = 200_000
"""Host work starts only if at least this much of the permit is left."""

LEAST_COST_NS = 1_000.0
"""No unit is forecast to take less, because 0 means unknown."""

DECLINED_BEFORE_DOUBT = 32
"""This many bubbles are more than one step has, so a unit that fits the longest bubble has met it by then."""

NEARLY_LONGEST = 0.9
"""A unit that was declined that often is tried in a bubble of at least this share of the longest of them."""

LOOK_AGAIN_S = 0.5

MOST = 0.5
"""So much of the bubbles' time must be usable by work that is done in pieces of one length."""


class UnitCosts:
    """Numbers units and forecasts their costs: the part of a gate that does not depend on the device.

    A unit's forecast follows the device time that it took. It rises fast and falls slowly, so it settles near the 0.9
    expectile.

    Args:
        page: the device's page; the caller has claimed the side task's role.
        records: receives a record of each unit; None: no record is kept.
    """

    def __init__(self, page: Page, records: UnitRecords | None = None) -> None:
        self._words = page.words
        self._records = records or UnitRecords()
        self._declared: list[tuple[int, tuple[str, ...]]] = []
        self._group = -1
        self._costs_ns: list[float] = [HOST_WORK_NEEDS_NS]
        self._known_costs_ns: dict[str, float] = {}
        self._starved: list[Starved] = []
        self._permits_ns: deque[int] = deque(maxlen=DECLINED_BEFORE_DOUBT)

    finishes = False

    def is_alone(self) -> bool:
        """Return False: what the device is asked to do could not be called back. See `Gate.is_alone`."""
        return False

    def use(self, units: Sequence[str], trials: int) -> None:
        """See `Gate.use`. Costs are kept by name and number of trials, so a group that comes back knows its own."""
        self._remember_costs()
        declared = (trials, tuple(units))
        if declared in self._declared:
            self._group = self._declared.index(declared)
        else:
            self._declared.append(declared)
            self._group = self._records.add_group(trials, units)
        self._costs_ns = [self._known_costs_ns.get(_key(trials, name), 0.0) for name in units]
        self._costs_ns.append(HOST_WORK_NEEDS_NS)
        self._starved.clear()

    def take_starved(self) -> list[Starved]:
        """See `Gate.take_starved`."""
        found, self._starved = self._starved, []
        return found

    def expect(self, unit: int, cost_ns: float) -> None:
        """See `Gate.expect`."""
        self._costs_ns[unit] = max(LEAST_COST_NS, cost_ns)

    def fits(self, needs_ns: float) -> bool:
        """See `Gate.fits`. A bubble's time is its permit's; before any was seen, nothing fits."""
        used_ns = sum(permit_ns // max(1.0, needs_ns) * needs_ns for permit_ns in self._permits_ns)
        return used_ns > 0 and used_ns >= MOST * sum(self._permits_ns)

    def add_work(self, trial_samples: int) -> None:
        """See `Gate.add_work`. The count is on the page, where the daemon reads it."""
        self._words[Field.WORK] += trial_samples

    def _account(
        self, unit: int, start_ns: int, wall_ns: int, busy_ns: int, longest_ns: int, group: int, *, learn: bool = True
    ) -> None:
        """Note that `unit` ran, and how much device time it took.

        Args:
            unit: its number.
            start_ns: when it began.
            wall_ns: the time from its begin to its end.
            busy_ns: the device time that it took.
            longest_ns: the longest of the bubbles in which it had been declined, if it ran to find out; else 0.
            group: the index of the units in use when it was asked for.
            learn: whether its time predicts the next run.
        """
        if learn:
            self._learn(unit, busy_ns, longest_ns, group)
        self._count(1, busy_ns)
        self._records.add(start_ns, wall_ns, busy_ns, unit, group)

    def _is_known(self, group: int, unit: int) -> bool:
        """Whether there is a forecast for `unit` of `group`."""
        if group == self._group or unit == HOST_UNIT:
            return bool(self._costs_ns[unit])
        trials, names = self._declared[group]
        return bool(self._known_costs_ns.get(_key(trials, names[unit])))

    def _learn(self, unit: int, busy_ns: int, longest_ns: int, group: int) -> None:
        """Update the forecast of `unit` by what it took; for the arguments see `_account`."""
        if unit == HOST_UNIT:
            self._costs_ns[unit] = HOST_WORK_NEEDS_NS  # even if it was in doubt
            return
        if group != self._group:
            trials, names = self._declared[group]
            key = _key(trials, names[unit])
            self._known_costs_ns[key] = _learned_ns(self._known_costs_ns.get(key, 0.0), busy_ns, longest_ns)
            return
        self._costs_ns[unit] = _learned_ns(self._costs_ns[unit], busy_ns, longest_ns)
        if busy_ns > longest_ns > 0:
            trials, names = self._declared[group]
            self._starved.append(Starved(unit=names[unit], trials=trials, needs_ns=busy_ns, longest_ns=longest_ns))

    def _count(self, units: int, busy_ns: int) -> None:
        words = self._words
        words[Field.UNITS_RUN] += units
        words[Field.BUSY_NS] += busy_ns

    def _doubt(self, unit: int, left_ns: "deque[int]") -> int:
        """Drop the forecast of `unit` if it has waited for many bubbles in vain.

        Args:
            unit: its number.
            left_ns: how much time the last bubbles left it.

        Returns:
            The longest of those times; the unit is to be tried when it has nearly as much. 0: not yet.
        """
        if len(left_ns) < DECLINED_BEFORE_DOUBT:
            return 0
        longest_ns = max(left_ns)
        self._costs_ns[unit] = NEARLY_LONGEST * longest_ns
        return longest_ns

    def _remember_costs(self) -> None:
        if self._group >= 0:
            trials, names = self._declared[self._group]
            for name, cost_ns in zip(names, self._costs_ns, strict=False):
                self._known_costs_ns[_key(trials, name)] = cost_ns


def _learned_ns(cost_ns: float, busy_ns: int, longest_ns: int) -> float:
    """Return the forecast of a unit that took `busy_ns`; `cost_ns` is the forecast before, 0 if there was none."""
    if not cost_ns or longest_ns:
        return max(LEAST_COST_NS, float(busy_ns))
    return max(LEAST_COST_NS, cost_ns + (busy_ns - cost_ns) * (0.5 if busy_ns > cost_ns else 0.05))


def _key(trials: int, name: str) -> str:
    return f"{trials} {name}"
