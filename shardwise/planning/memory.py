"""How much memory a step needs on one rank's device, and what holds it, from the bytes of each unit.

The schedule is the engine's own (``engine/step/root``, ``engine/unit/hooks``), walked through allocation by allocation:

    forward    a unit is gathered while the one before it may still compute: two are in memory
    backward   while a unit computes, it and the next one are gathered, and its gradients are made; when it is done,
               these are packed into rows, which take the place of its full parameters, and freed. Its rows go before
               the next unit's gradients come

Rows that are wider than the full parameters do not fit there. They have memory of their own, until the next unit has
been freed, so one unit's gradients and the rows of the unit before are in memory at the same time.

Activations, the optimizer's state and the workspaces of kernels and of the process group come on top. This is the
schedule of a device, whose host runs ahead; on a CPU memory is freed earlier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

SHARDS = "shards"
GATHERED = "gathered parameters"
GATHERING = "gathers in progress"
GRADIENTS = "gradients"
ROWS = "rows of reduces"
SHARD_GRADIENTS = "gradients of shards"


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """The bytes of one unit on one rank's device."""

    name: str
    shards: int
    # Full parameters in the compute dtype; and what a gather needs beside them until it is done.
    full: int
    gathering: int
    # Full gradients in the compute dtype, and what is allocated for the rows they are packed into, or one slice of
    # these: nothing, if they lie in the memory of the full parameters (``rows_in_full``).
    gradients: int
    rows: int
    # The row that this rank receives: it becomes the gradients of shards, or is cast to them.
    own_row: int
    shard_gradients: int
    # How much of ``full`` stays between forward and backward.
    kept: int = 0
    # Whether the rows are packed slice by slice: the gradients then stay until the last slice is packed.
    is_sliced: bool = False
    rows_in_full: bool = False

    @property
    def needs_cast(self) -> bool:
        return self.own_row != self.shard_gradients


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory in a phase of the step: how much, what holds it, and in which unit."""

    total: int
    unit: str
    by_kind: dict[str, int]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes between steps, at the peaks of forward and backward, and after backward."""

    idle: int
    forward: Peak
    backward: Peak
    after_backward: int


@dataclass
class _Account:
    """What is allocated now, by kind, and the most that ever was."""

    held: Counter[str] = field(default_factory=Counter)
    most: Peak = Peak(0, "", {})

    def add(self, kind: str, num_bytes: int, unit: UnitBytes) -> None:
        self.held[kind] += num_bytes
        total = self.held.total()
        if total > self.most.total:
            by_kind = {kind: held for kind, held in self.held.items() if held}
            self.most = Peak(total, unit.name, by_kind)

    def gather(self, unit: UnitBytes, already: int = 0) -> None:
        self.add(GATHERED, unit.full - already, unit)
        self.add(GATHERING, unit.gathering, unit)
        self.held[GATHERING] -= unit.gathering


def step_memory(root: UnitBytes, units: Sequence[UnitBytes], holds_gradients: bool = False) -> StepMemory:
    """Walks through a step of ``units``, in the order of forward, inside a ``root`` with parameters of its own, if any.

    ``holds_gradients``: the shards have gradients already, which this backward adds to.

    The root is gathered throughout, and its gradients count from the start of backward: an output layer's are made
    first, and reduced together with those of the first layer.
    """
    everyone = (root, *units)
    account = _Account()
    for unit in everyone:
        account.add(SHARDS, unit.shards, unit)
        if holds_gradients:
            account.add(SHARD_GRADIENTS, unit.shard_gradients, unit)
    idle = account.held.total()

    account.gather(root)
    before: UnitBytes | None = None
    for unit in units:
        account.gather(unit)
        if before is not None:
            account.held[GATHERED] -= before.full - before.kept
        before = unit
    if before is not None:
        account.held[GATHERED] -= before.full - before.kept
    forward, account.most = account.most, Peak(0, "", {})

    account.add(GRADIENTS, root.gradients, root)
    backwards = list(reversed(units))
    reduced: UnitBytes | None = None
    for number, unit in enumerate(backwards):
        if number == 0 and unit.kept != unit.full:
            account.gather(unit, unit.kept)
        if reduced is not None and reduced.rows_in_full:
            account.held[GATHERED] -= reduced.full
        ahead = backwards[number + 1] if number + 1 < len(backwards) else None
        if ahead is not None and ahead.kept != ahead.full:
            account.gather(ahead, ahead.kept)
        account.add(GRADIENTS, unit.gradients, unit)
        _reduce(account, unit, reduced, holds_gradients)
        reduced = unit
    if reduced is not None and reduced.rows_in_full:
        account.held[GATHERED] -= reduced.full
    _reduce(account, root, reduced, holds_gradients)
    if root.rows_in_full:
        account.held[GATHERED] -= root.full
    _release(account, root)
    return StepMemory(idle, forward, account.most, account.held.total())


def _reduce(account: _Account, unit: UnitBytes, before: UnitBytes | None, holds_gradients: bool) -> None:
    if not unit.rows_in_full:
        account.held[GATHERED] -= unit.full
    if before is not None:
        _release(account, before)
    account.add(ROWS, unit.rows, unit)
    if not unit.is_sliced:
        account.held[GRADIENTS] -= unit.gradients
    is_temporary = unit.needs_cast or holds_gradients
    account.add(SHARD_GRADIENTS, unit.own_row, unit)
    if is_temporary:
        if not holds_gradients:
            account.add(SHARD_GRADIENTS, unit.shard_gradients, unit)
        account.held[SHARD_GRADIENTS] -= unit.own_row


def _release(account: _Account, unit: UnitBytes) -> None:
    account.held[ROWS] -= unit.rows
    if unit.is_sliced:
        account.held[GRADIENTS] -= unit.gradients
