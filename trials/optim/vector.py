"""The optimizers of K trials by vectors: a few kernels for all."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trials.fusion.errors import FuseError
from trials.fusion.row_moves import joined, parted, taken
from trials.fusion.rows import Rows, ask_no_gate
from trials.optim.block import Block, Counts, Piece, Tables, change_each, counts_of, first_state, with_row
from trials.optim.duplicate import plain_groups, stand_in
from trials.optim.facts import Names, rule_of
from trials.optim.fused import OTHER_STATE, OTHER_WAYS, FusedOptimizer, other_parameters
from trials.optim.gradients import Gradients
from trials.optim.optimizer_state import OptimizerState, Ordinary
from trials.optim.packed import Unread
from trials.optim.registry import Group, Rule, SinglePass, by_trial, common_of, numbers_of, scaled_numbers
from trials.pinned_memory import copied_to
from trials.shrinking.rules import NONE, Multipliers

UNIT_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 22}
"""How many weights of all trials one unit updates: half a millisecond of a core, within its cache; half of that here,
where less would be launches alone."""

MOST_AHEAD = 64
"""For how many steps at most coefficients are computed at once."""


class VectorOptimizer(FusedOptimizer):
    """A few kernels for all trials, every hyperparameter a vector over trials."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        names_K: Sequence[Names],
        rows: Rows,
        holders: Sequence[torch.optim.Optimizer] | None = None,
        widest: int = 1,
        scales: Mapping[str, Multipliers] | None = None,
    ) -> None:
        """See `FusedOptimizer`; `widest` is the largest K to expect, for the size of units."""
        super().__init__(optimizers, names_K, rows, holders, scales)
        first = optimizers[0]
        made = rule_of(first)
        if made is None:
            raise FuseError(f"optimizer {type(first).__name__} has no rule for vectors")
        self._template = stand_in(first).made
        self._switches = [{flag: group.get(flag) for flag in made.flags} for group in first.param_groups]
        self._counted, self._empty = [len(group) for group in self._members], [0] * len(self._members)
        self._numbers: list[dict[str, NDArray[Any]]] | None = None
        self._foreseen: dict[Hashable, tuple[tuple[str, ...], Tensor, Counts]] = {}
        self._ahead = 1
        self._rules: list[Rule] = [made(group, type(first)) for group in first.param_groups]
        self.computes_in = made.computes_in
        saved_K = [optimizer.state_dict()["state"] for optimizer in optimizers]
        given = {name: [saved.get(i, {}) for saved in saved_K] for i, name in enumerate(self._order)}
        # what is held once never has a gradient, and needs no state
        self._idle = {name for name, states in given.items() if name in rows.once and not any(states)}
        device = next((p.device.type for p in rows.parameters.values()), "cpu")
        self._most = max(UNIT_ELEMENTS.get(device, UNIT_ELEMENTS["cpu"]) // max(widest, self.size), 1)
        self._entries: list[list[Block]] = []
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._plan()
        tables: Tables = {}
        counts: dict[str, Counts] = {}
        for name, states in given.items():
            if name not in self._idle:
                tables[name], counts[name] = first_state(self._rule(name), rows.parameters[name], states)
        self._pack(tables, counts)

    def changed(self) -> None:
        """See `FusedOptimizer`."""
        self._numbers = None

    @torch.no_grad()
    def step(
        self, enter: Callable[[int], None] = ask_no_gate, gradients: Gradients | None = None, skip: Sequence[int] = ()
    ) -> None:
        """See `FusedOptimizer`."""
        if not self._work:
            return
        enter(0)
        self.begin(skip)
        if self._entries[0][0].like.device.type == "cpu":
            enter(0)  # coefficients of many steps at once take as long as a unit
        self.update(enter, gradients)

    def begin(self, skip: Sequence[int] = ()) -> list[Block]:
        """Choose the coefficients of this step, and count it; parameters without a gradient do not count it.

        Returns:
            What `update` changes.
        """
        if self._numbers is None or self._live:
            self._read()
            if self._agree() != self._alike:
                self._pack(self._tables(), self.counts())
        absent = self._rows.absent()
        for blocks in self._entries:
            if any(block.is_torn(absent) for block in blocks):
                blocks[:] = [part for block in blocks for part in block.parts(absent)]
            for block in blocks:
                block.waits = block.like.grad is None
                block.skip = sorted({*skip, *absent.get(block.names[0], ())})
                if not block.waits:
                    self._advance(block)
        return [block for blocks in self._entries for block in blocks if not block.waits]

    @torch.no_grad()
    def update(self, enter: Callable[[int], None] = ask_no_gate, gradients: Gradients | None = None) -> None:
        """Take the step that has begun. The arguments are those of `step`, but unit 0 has been entered."""
        for unit, (entry, piece) in enumerate(self._work):
            if unit:
                enter(unit)
            for block in self._entries[entry]:
                if not block.waits:
                    change = None if gradients is None else gradients.scaled(self._parts[block.part][1])
                    block.step(piece, self._scratch[block.like.dtype], change, partial(enter, unit))

    def moved(self) -> None:
        """See `FusedOptimizer`."""
        devices = {name: p.device for name, p in self._rows.parameters.items()}
        tables = {name: {kind: t.to(devices[name]) for kind, t in own.items()} for name, own in self._tables().items()}
        self._pack(tables, self.counts())

    def check_movable(self) -> None:
        """See `FusedOptimizer`; blocks let go of theirs."""

    def let_go(self) -> None:
        """See `FusedOptimizer`."""
        for blocks in self._entries:
            for block in blocks:
                block.let_go()

    def take(self, rows: Sequence[int]) -> None:
        """See `FusedOptimizer`."""
        super().take(rows)
        index, counts = list(rows), self.counts()
        self._pack(change_each(self._released(), lambda name, kind, t: taken(t, index)), counts_of(counts, index))

    def move(self, rows: Sequence[int], to: FusedOptimizer) -> None:
        """See `FusedOptimizer`."""
        assert isinstance(to, VectorOptimizer)  # of the same structure
        index, counts, most = list(rows), self.counts(), self._rows.row_bytes
        stay = [row for row in range(self.size) if row not in index]
        super().move(rows, to)
        to._idle = set(self._idle)
        to._plan()
        tables = self._released()
        theirs: Tables = {name: {} for name in tables}

        def part(name: str, kind: str, tensor: Tensor) -> Tensor:
            left, theirs[name][kind] = parted(tensor, stay, index, most)
            return left

        self._pack(change_each(tables, part), counts_of(counts, stay))
        to._pack(theirs, counts_of(counts, index))

    def append(self, other: FusedOptimizer) -> None:
        """See `FusedOptimizer`."""
        if not isinstance(other, VectorOptimizer):
            raise FuseError(OTHER_WAYS)
        idle = self._idle & other._idle
        (before, counts_before), (more, counted) = self._of_all_but(idle), other._of_all_but(idle)
        super().append(other)
        if idle != self._idle:
            self._idle = idle
            self._plan()
        tables = change_each(before, lambda name, kind, t: joined(t, more[name].pop(kind).to(t.device)))
        counts = {
            name: {kind: np.concatenate([c, counted[name][kind]]) for kind, c in own.items()}
            for name, own in counts_before.items()
        }
        self._pack(tables, counts)

    def state_dict(self) -> dict[str, Any]:
        """See `FusedOptimizer`."""
        return {
            "groups": [self._groups(row) for row in range(self.size)],
            "state": {name: {kind: t.clone() for kind, t in kinds.items()} for name, kinds in self._tables().items()},
            "counts": {name: {kind: c.tolist() for kind, c in own.items()} for name, own in self.counts().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `FusedOptimizer`."""
        if {n: set(kinds) for n, kinds in state["state"].items()} != {n: set(k) for n, k in self._tables().items()}:
            raise FuseError(OTHER_STATE)
        self._load_groups(state["groups"])
        tables = {
            name: {kind: t.to(self._rows.parameters[name].device, copy=True) for kind, t in kinds.items()}
            for name, kinds in state["state"].items()
        }
        counts = {name: {kind: np.array(c) for kind, c in own.items()} for name, own in state["counts"].items()}
        self._pack(tables, counts)

    def extract(self, row: int) -> dict[str, Any]:
        """See `FusedOptimizer`."""
        return {"state": self._state(row), "param_groups": self._groups(row)}

    def state(self, row: int) -> OptimizerState:
        """See `FusedOptimizer`."""
        return Ordinary(type(self._template).__name__, self.extract(row))

    def _groups(self, row: int) -> list[Group]:
        """One trial's `param_groups` as in a `state_dict`, with parameters as indices."""
        groups = plain_groups(self.groups_K[row])
        index = {name: position for position, name in enumerate(self._order)}
        for group, names in zip(groups, self._members, strict=True):
            group["params"] = [index[name] for name in names]
        return groups

    def _load_groups(self, groups_K: Sequence[Sequence[Group]]) -> None:
        """Give each trial a fresh holder with these `param_groups`."""
        self.holders = [stand_in(self._template).made for _ in groups_K]
        for holder, groups in zip(self.holders, groups_K, strict=True):
            holder.param_groups = plain_groups(groups)

    def _state(self, row: int) -> dict[int, dict[str, Any]]:
        tables, counts = self._tables(), self.counts()
        made = {}
        for position, name in enumerate(self._order):
            if name in self._idle:
                continue
            group = self.groups_K[row][self._group_of[name]]
            own = {kind: t[row].clone() for kind, t in tables[name].items()}
            numbers = {kind: float(values[row]) for kind, values in counts[name].items()}
            saved = self._rule(name).saved(group, numbers, own)
            if saved:
                made[position] = saved
        return made

    def _rule(self, name: str) -> Rule:
        return self._rules[self._group_of[name]]

    def _released(self) -> Tables:
        """The state of all parameters, which nothing else holds then; `_pack` comes next."""
        tables = self._tables()
        self._entries, self._scratch = [], {}
        return tables

    def _of_all_but(self, idle: set[str]) -> tuple[Tables, dict[str, Counts]]:
        """The state of all parameters but those in `idle`, as `_released` gives it. What has had none begins."""
        counts = self.counts()
        tables = self._released()
        for name in self._idle - idle:
            like = self._rows.parameters[name]
            tables[name], counts[name] = first_state(self._rule(name), like, [{} for _ in range(self.size)])
        return tables, counts

    def _plan(self) -> None:
        """Divide the parameters into entries of a limited number of weights per trial, and the step into units."""
        most = self._most
        self._group_of = {name: index for index, group in enumerate(self._members) for name in group}
        keys = {name: (self._group_of[name], self.scales.get(name, NONE)) for name in self._order}
        self._parts = list(dict.fromkeys(keys.values()))
        self._part_of = {name: self._parts.index(key) for name, key in keys.items()}
        self._plans: list[list[str]] = []
        self._work: list[tuple[int, Piece]] = []
        last: tuple[int, torch.dtype] | None = None
        filled = 0
        for name in self._order:
            if name in self._idle:
                continue
            p = self._rows.parameters[name]
            size, block = prod(p.shape[1:]), (self._part_of[name], p.dtype)
            if block != last or filled + size > most or not self._rule(name).elementwise:
                self._plans.append([])
                last, filled = block, 0
            self._plans[-1].append(name)
            filled += size
        for entry, names in enumerate(self._plans):
            size = prod(self._rows.parameters[names[0]].shape[1:])
            whole = len(names) > 1 or not self._rule(names[0]).elementwise
            pieces = 1 if whole else max(-(-size // most), 1)
            self._work += [(entry, (number, pieces)) for number in range(pieces)]
        self.units = [f"optimizer step#{i + 1}" if i else "optimizer step" for i in range(len(self._work))]

    def _pack(self, tables: Tables, counts: Mapping[str, Counts]) -> None:
        """Make the blocks: in an entry, parameters whose counts are equal go together. `tables` are used up."""
        parameters = self._rows.parameters
        self._read()
        self._alike = self._agree()
        self._entries = []
        widths: dict[torch.dtype, int] = {}
        for names in self._plans:
            alike: dict[bytes, list[str]] = {}
            for name in names:
                alike.setdefault(b"".join(c.tobytes() for c in counts[name].values()), []).append(name)
            blocks = []
            rule = self._rule(names[0])
            for own in alike.values():
                part = self._part_of[own[0]]
                state = {name: tables.pop(name) for name in own}
                blocks.append(Block(rule, part, own, parameters, state, counts[own[0]], self._alike[part]))
            self._entries.append(blocks)
        for entry, (_, pieces) in self._work:
            for block in self._entries[entry]:
                width = -(-block.columns // pieces)
                widths[block.like.dtype] = max(widths.get(block.like.dtype, 0), width)
        device = next((p.device for p in parameters.values()), None)
        self._scratch = {
            dtype: torch.empty(4, self.size * width, dtype=dtype, device=device) for dtype, width in widths.items()
        }

    def _read(self) -> None:
        """Take the hyperparameters as they are now."""
        for holder in self.holders:
            self._check(holder)
        numbers = {i: numbers_of([g[i] for g in self.groups_K]) for i in {i for i, _ in self._parts}}
        self._numbers = [scaled_numbers(numbers[i], own) for i, own in self._parts]
        self._numbers_K = [by_trial(numbers) for numbers in self._numbers]
        self._common = [common_of(one) for one in self._numbers_K]
        self._foreseen.clear()
        self._ahead = 1

    def _check(self, holder: torch.optim.Optimizer) -> None:
        """Refuse what a scheduler or the user has changed and the rules have read for good."""
        name, groups = type(holder).__name__, holder.param_groups
        given = (group["params"] for group in groups)
        if [0 if isinstance(each, Unread) else len(each) for each in given] not in (self._counted, self._empty):
            raise other_parameters(holder)
        for index, (group, known) in enumerate(zip(groups, self._switches, strict=True)):
            for flag, value in known.items():
                if group.get(flag) != value:
                    raise FuseError(
                        f"optimizer group {index} of {name}: {flag} has changed to {group.get(flag)!r}; allowed: "
                        "changes of numbers alone"
                    )

    def _agree(self) -> list[bool]:
        """Per part, whether the trials agree in everything that a single-pass kernel takes only once."""
        return [
            isinstance(rule := self._rules[group], SinglePass) and common.keys() >= rule.shared
            for (group, _), common in zip(self._parts, self._common, strict=True)
        ]

    def _advance(self, block: Block) -> None:
        if block.by_row:
            block.numbers_K = self._numbers_K[block.part]
            after = block.rule.count(self._numbers[block.part] if self._numbers else {}, block.counts)
        else:
            key = block.key
            if key not in self._foreseen:
                self._foresee(block)
            names, table, after = self._foreseen[key]
            block.use(names, table)
            block.common = self._common[block.part]
        if block.skip:
            after = {name: values.copy() for name, values in after.items()}
            for name, values in after.items():
                values[block.skip] = block.counts[name][block.skip]
        block.counts = after

    def _foresee(self, block: Block) -> None:
        """Make the coefficients of several steps at once: the longer no hyperparameter has changed, the more."""
        rule, like = block.rule, block.like
        numbers = self._numbers[block.part] if self._numbers else {}
        path = [block.counts]
        for _ in range(self._ahead):
            path.append(rule.count(numbers, path[-1]))
        after = {name: np.stack([counts[name] for counts in path[1:]]) for name in rule.counts}
        made = rule.coefficients(numbers, after)
        shape = after["step"].shape
        table = np.ascontiguousarray(np.stack([np.broadcast_to(values, shape) for values in made.values()], 1))
        axes = [1] * (1 if rule.elementwise else like.ndim - 1)
        tables = copied_to(like.device, torch.from_numpy(table).to(like.dtype)).view(*table.shape, *axes)
        if len(self._foreseen) > 16 * MOST_AHEAD:
            self._foreseen.clear()
        for before, then, vectors in zip(path, path[1:], tables, strict=False):
            self._foreseen[block.key_at(before)] = tuple(made), vectors, then
        self._ahead = min(2 * self._ahead, MOST_AHEAD)

    def _tables(self) -> Tables:
        """The state by parameter and kind, each ``[K, *shape]``."""
        return {name: kinds for blocks in self._entries for b in blocks for name, kinds in b.tables().items()}

    def counts(self) -> dict[str, Counts]:
        """The numbers of each parameter's state. Nothing changes them in place."""
        return {name: block.counts for blocks in self._entries for block in blocks for name in block.names}

    def put_back(self, row: int, counts: Mapping[str, Counts]) -> None:
        """Let the trial in `row`, whose tensors have stayed as they were, have the numbers in `counts` again."""
        now = {name: with_row(own, row, counts[name]) for name, own in self.counts().items()}
        for block in [block for blocks in self._entries for block in blocks]:
            if len({block.key_at(now[name]) for name in block.names}) > 1:  # they came together since
                self._pack(self._tables(), now)
                return
            block.counts = now[block.names[0]]
