"""How much memory a step needs on one rank's device, and what holds it, from the bytes of each unit.

The schedule is the engine's own (``engine/step/root``, ``engine/unit/hooks``), walked through allocation by allocation:

    forward    a unit is gathered while the one before it may still compute: two are in memory
    backward   while a unit computes, it and the next one are gathered, and its gradients are made; when it is done,
               these are packed into rows, which take the place of its full parameters, and freed. Its rows go before
               the next unit's gradients come

Rows that are wider than the full parameters do not fit there. They have memory of their own, until the next unit has
been freed, so one unit's gradients and the rows of the unit before are in memory at the same time.

So the most that lives at once, while unit k of equal units is computed in backward, is

    shards + full(k) + full(k - 1) + gradients(k) + gradients of shards so far        rows in the full parameters
    shards + full(k) + full(k - 1) + gradients(k) + rows(k + 1) + ...                 rows of their own
    shards + full(1) + ... + full(k) + gradients(k) + ...                             kept after forward

Activations, the optimizer's state and the workspaces of kernels and of the process group come on top. This is the
schedule of a device, whose host runs ahead; on a CPU memory is freed earlier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

SHARDS = "shards"
GATHERED = "gathered parameters"
GATHERING = "gathers in progress"
GRADIENTS = "gradients"
ROWS = "rows of reduces"
SHARD_GRADIENTS = "gradients of shards"
STASHED = "gradients kept back"


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
    # Whether the full parameters stay between forward and backward; or how large the part is that does, and what the
    # gather in backward needs beside that part.
    is_kept: bool = False
    part: int = 0
    gathering_from_part: int = 0
    # What a reduce that sums exactly needs beside the rows until it is done, and to add to gradients that are there.
    summing: int = 0
    summing_to_existing: int = 0
    # Gradients that are kept back without sync; in the reduce dtype, if that is wider.
    stash: int = 0
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

    def gather(self, unit: UnitBytes) -> None:
        self.add(GATHERED, unit.full, unit)
        self.add(GATHERING, unit.gathering, unit)
        self.add(GATHERED, unit.part, unit)
        self.held[GATHERING] -= unit.gathering

    def gather_in_backward(self, unit: UnitBytes) -> None:
        if unit.is_kept:
            return
        self.add(GATHERED, unit.full, unit)
        gathering = unit.gathering_from_part if unit.part else unit.gathering
        self.add(GATHERING, gathering, unit)
        self.held[GATHERED] -= unit.part
        self.held[GATHERING] -= gathering


def step_memory(
    root: UnitBytes,
    units: Sequence[UnitBytes],
    holds_gradients: bool = False,
    syncs: bool = True,
    holds_stash: bool = False,
) -> StepMemory:
    """Walks through a step of ``units``, in the order of forward, inside a ``root`` with parameters of its own, if any.

    ``holds_gradients``: the shards have gradients already, which this backward adds to. ``syncs``: whether it reduces.
    ``holds_stash``: it adds to gradients that an earlier one without sync has kept back.

    The root is gathered throughout, and its gradients count from the start of backward: an output layer's are made
    first, and reduced together with those of the first layer.
    """
    everyone = (root, *units)
    account = _Account()
    for unit in everyone:
        account.add(SHARDS, unit.shards, unit)
        if holds_gradients:
            account.add(SHARD_GRADIENTS, unit.shard_gradients, unit)
        if holds_stash:
            account.add(STASHED, unit.stash, unit)
    idle = account.held.total()

    # The root is kept.
    root = replace(root, part=0)
    account.gather(root)
    before: UnitBytes | None = None
    for unit in units:
        account.gather(unit)
        if before is not None and not before.is_kept:
            account.held[GATHERED] -= before.full
        before = unit
    if before is not None and not before.is_kept:
        account.held[GATHERED] -= before.full
    forward, account.most = account.most, Peak(0, "", {})

    account.add(GRADIENTS, root.gradients, root)
    backwards = list(reversed(units))
    reduces = _Reduces(account, holds_gradients) if syncs else _Stashes(account, holds_stash)
    for number, unit in enumerate(backwards):
        if number == 0:
            account.gather_in_backward(unit)
        reduces.free_full()
        if number + 1 < len(backwards):
            account.gather_in_backward(backwards[number + 1])
        account.add(GRADIENTS, unit.gradients, unit)
        reduces.issue(unit, unit.stash if holds_stash else 0)
    reduces.free_full()
    reduces.issue(root, root.stash if holds_stash else 0)
    reduces.free_full()
    reduces.finish()
    return StepMemory(idle, forward, account.most, account.held.total())


class _Stashes:
    """A backward without sync: each unit's gradients become its stash, or are added to it."""

    def __init__(self, account: _Account, holds_stash: bool) -> None:
        self._account = account
        self._holds_stash = holds_stash

    def issue(self, unit: UnitBytes, stash: int) -> None:
        account = self._account
        account.held[GATHERED] -= unit.full
        if not self._holds_stash:
            if unit.stash == unit.gradients:
                account.held[GRADIENTS] -= unit.gradients
                account.add(STASHED, unit.stash, unit)
                return
            account.add(STASHED, unit.stash, unit)
        account.held[GRADIENTS] -= unit.gradients

    def free_full(self) -> None:
        pass

    def finish(self) -> None:
        pass


class _Reduces:
    """The reduces of a backward, of which one is in flight."""

    def __init__(self, account: _Account, holds_gradients: bool) -> None:
        self._account = account
        self._holds_gradients = holds_gradients
        # What goes with the memory that rows have borrowed, and when the reduce finishes.
        self._lent = 0
        self._until_finished: Counter[str] = Counter()
        self._issued: UnitBytes | None = None

    def issue(self, unit: UnitBytes, stash: int) -> None:
        account = self._account
        if unit.rows_in_full:
            self._lent = unit.full
        else:
            account.held[GATHERED] -= unit.full
        self.finish()
        account.add(ROWS, unit.rows, unit)
        account.held[STASHED] -= stash
        self._until_finished[ROWS] = unit.rows
        if unit.is_sliced:
            self._until_finished[GRADIENTS] = unit.gradients
        else:
            account.held[GRADIENTS] -= unit.gradients
        account.add(SHARD_GRADIENTS, unit.own_row, unit)
        account.add(SHARD_GRADIENTS, unit.summing, unit)
        account.held[SHARD_GRADIENTS] -= unit.summing
        if unit.needs_cast:
            account.add(SHARD_GRADIENTS, unit.shard_gradients, unit)
            account.held[SHARD_GRADIENTS] -= unit.own_row
        if self._holds_gradients:
            # It is added to the gradients that are there when the reduce finishes.
            self._until_finished[SHARD_GRADIENTS] = unit.shard_gradients
        self._issued = unit

    def free_full(self) -> None:
        self._account.held[GATHERED] -= self._lent
        self._lent = 0

    def finish(self) -> None:
        issued = self._issued
        if issued is not None and self._holds_gradients:
            self._account.add(SHARD_GRADIENTS, issued.summing_to_existing, issued)
            self._account.held[SHARD_GRADIENTS] -= issued.summing_to_existing
        self._account.held -= self._until_finished
        self._until_finished.clear()
        self._issued = None
