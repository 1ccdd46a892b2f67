"""Gathered parameters: who holds them, whether they are still current, and what users did to them.

Visits hold the parameters while they need them (``hold``, ``release``). After that a unit may keep them gathered, from
forward to backward or from one step to the next. In that time a user may write to shards, step an optimizer, or write
to, freeze, replace and tie the gathered parameters themselves. Here the unit notices: stale parameters are gathered
again, and writes to gathered parameters are copied to the shards.

``keep`` begins that and ``unit.reshard`` ends it. Where no backward will follow, kept parameters are *hidden*: modules
show the shards, because those are what a user reads and writes between steps.
"""

from __future__ import annotations

from operator import and_, ne, or_
from typing import Protocol

import torch
from torch.autograd.graph import increment_version

from shardwise import trace
from shardwise.comm.mesh import DataMesh
from shardwise.engine.gather.tensor_extensions import is_tensor_extension
from shardwise.engine.unit.binding import ShownForms, Slot
from shardwise.engine.unit.dtensor_form import ShardedForm
from shardwise.engine.unit.interfaces import NamedUnit, RootInterface
from shardwise.engine.unit.unit_buffers import UnitBuffers
from shardwise.errors import StateError
from shardwise.planning.lifecycle import SHARDED, UNSHARDED, State
from shardwise.torch_internals import without_torch_function


class _Trained(Protocol):
    trainable: list[bool]


class _Kept(Protocol):
    @property
    def frees_after_backward(self) -> bool: ...


class GatheredUnit(NamedUnit, Protocol):
    """What is read of the unit here."""

    root: RootInterface
    slots: list[Slot]
    form: ShardedForm
    mesh: DataMesh
    state: State
    shown: ShownForms
    buffers: UnitBuffers

    @property
    def gradients(self) -> _Trained: ...
    @property
    def settings(self) -> _Kept: ...

    def show_shards(self) -> None: ...
    def reshard(self, phase: str) -> None: ...


class GatheredParameters:
    """The gathered parameters of one unit, as users can see and change them."""

    def __init__(self, unit: GatheredUnit) -> None:
        self._unit = unit
        # How often they are held.
        self.holders = 0
        # The version of the shards that the kept parameters were gathered from; None while a step uses them.
        self.kept_version: int | None = None
        # The forward of the model that they were kept in; None if they were told to stay for others.
        self._kept_in: object | None = None
        self._num_optimizer_steps = 0
        # The versions of the shards when autograd was last told of writes to them.
        self._versions: list[int] = []
        # A version and an address for each slot.
        self._last_seen: list[tuple[int, int]] = []
        # A user gave a gathered parameter other memory, which gathers do not fill.
        self.has_moved = False
        # Kept only because no signal will tell when a backward reaches the unit.
        self.awaits_unseen_backward = False
        # Gathered, while modules show the shards.
        self.is_hidden = False

    def shard_version(self) -> int:
        """A number that rises whenever somebody writes to the shards."""
        return self._num_optimizer_steps + sum(slot.version() for slot in self._unit.slots)

    def count_optimizer_step(self) -> None:
        """torch's foreach and fused kernels write to the shards without raising their versions."""
        self._num_optimizer_steps += 1

    def pass_on_writes(self) -> None:
        """Tells autograd, when they are to be gathered, which parameters were written to as shards since the last time.

        A backward that needs the values of before then raises, as it does where a plain parameter was written to.
        """
        unit, before = self._unit, self._versions
        try:
            with without_torch_function():
                self._versions = now = [slot.sharded._version + slot.local._version for slot in unit.slots]
        except RuntimeError:
            # Tensors made in inference mode have no versions, and no backward needs them.
            return
        if now == before or len(now) != len(before):
            return
        is_kept = unit.state is UNSHARDED and self.kept_version is not None
        written = list(map(ne, now, before))
        if unit.form.are_written_together:
            trained = [slot.sharded.requires_grad for slot in unit.slots]
            if any(map(and_, written, trained)):
                written = list(map(or_, written, trained))
        for index, slot in enumerate(unit.slots):
            if written[index]:
                is_as_seen = is_kept and _contents(slot) == self._last_seen[index]
                increment_version(slot.unsharded)
                if is_as_seen:
                    self._last_seen[index] = _contents(slot)

    def hold(self) -> None:
        """Keeps the parameters gathered until ``release`` was called as often as ``hold``."""
        self.holders += 1
        if self.is_hidden:
            self.reveal()

    def hold_for_forward(self) -> None:
        """Holds the parameters for a visit; frees what is kept and stale, so that it is gathered again."""
        unit = self._unit
        if (
            unit.state is not SHARDED
            and self.holders == 0
            and (self.awaits_unseen_backward or self.is_stale() or self._have_old_part())
        ):
            unit.reshard(trace.IN_FORWARD)
        self.hold()

    def _have_old_part(self) -> bool:
        """Whether parameters stay gathered with the part that was to be kept: users may have written to them since."""
        unit = self._unit
        return unit.state is UNSHARDED and unit.buffers.gather.keeps_part

    def release(self) -> bool:
        """Ends one ``hold``; returns whether it was the last."""
        self.holders -= 1
        return self.holders == 0

    def keep(self, is_hidden: bool = False) -> None:
        """Notes the shards' version, to find out later whether the kept parameters are stale.

        ``is_hidden``: no backward will follow, so modules show the shards meanwhile.
        """
        unit = self._unit
        if self.kept_version is None:
            self.kept_version = self.shard_version()
            self._kept_in = unit.root.window if unit.settings.frees_after_backward else None
            if unit.state is UNSHARDED:
                self.note_contents()
            if is_hidden and unit.state is UNSHARDED:
                unit.shown.sharded.show()
                self.is_hidden = True
        elif is_hidden and unit.state is UNSHARDED and not self.is_hidden:
            # Users may have written to them before the step that ends now.
            unit.show_shards()
            self.is_hidden = True
            if not self.has_moved:
                self.kept_version = self.shard_version()

    def reveal(self) -> None:
        """Shows parameters that were hidden."""
        if self.is_hidden:
            self.is_hidden = False
            self._unit.shown.unsharded.show()
            self.note_contents()

    def note_contents(self) -> None:
        """Notes what the gathered parameters hold, to find out later whether somebody wrote to them."""
        self._last_seen = list(map(_contents, self._unit.slots))

    def is_stale(self) -> bool:
        """Whether shards were written to or replaced, or parameters frozen or thawed, since ``keep``."""
        unit = self._unit
        return self.kept_version is not None and (
            self.shard_version() != self.kept_version
            or (not unit.form.sees_all_writes and self._are_of_earlier_forward())
            or (self.is_hidden and not unit.form.all_show(unit.shown.snapshot))
            or (unit.state is UNSHARDED and not self.is_hidden and self._are_replaced())
            or (
                unit.state is UNSHARDED
                and any(
                    not slot.sharded.requires_grad == slot.unsharded.requires_grad == trainable
                    for slot, trainable in zip(unit.slots, unit.gradients.trainable, strict=True)
                )
            )
        )

    def _are_of_earlier_forward(self) -> bool:
        root = self._unit.root
        return self._kept_in is not None and not (root.in_forward and root.window is self._kept_in)

    def _are_replaced(self) -> bool:
        """Whether modules show other parameters than the gathered ones, or those have other memory."""
        return not self._unit.shown.unsharded.is_shown() or any(
            _contents(slot)[1] != seen[1]
            for slot, seen in zip(self._unit.slots, self._last_seen, strict=True)
        )

    def copy_writes_to_shards(self) -> None:
        """Copies what users wrote to kept parameters, while modules showed them, to the shards."""
        unit = self._unit
        if self.kept_version is None or self.is_hidden or unit.state is not UNSHARDED:
            return
        for index, (slot, seen) in enumerate(zip(unit.slots, self._last_seen, strict=True)):
            if _contents(slot) != seen:
                before = slot.local._version
                self._copy_to_shard(slot)
                if index < len(self._versions):
                    # autograd knows of this write: it was one to the gathered parameter.
                    self._versions[index] += slot.local._version - before
                self.has_moved |= slot.unsharded.data_ptr() != seen[1]

    def _copy_to_shard(self, slot: Slot) -> None:
        unit = self._unit
        own_part = unit.form.own_part(slot, slot.unsharded, unit.mesh)
        if own_part is None or not slot.unsharded.dtype == slot.compute_dtype == slot.stored_dtype:
            raise StateError(
                f"parameter '{slot.name}' was written to while it was gathered, which its shard of "
                f"{slot.stored_dtype} cannot take over",
                where=f"unit '{unit.name}', rank {unit.rank}",
                fix="write to the sharded parameter: call reshard() first",
            )
        with torch.no_grad():
            slot.local.copy_(own_part)

    def move_freezing_to_shards(self) -> None:
        """Freezes or thaws the shards of gathered parameters that a user froze or thawed."""
        for slot, trainable in zip(self._unit.slots, self._unit.gradients.trainable, strict=True):
            if slot.unsharded.requires_grad != trainable:
                slot.sharded.requires_grad_(not trainable)
                slot.unsharded.requires_grad_(trainable)


def _contents(slot: Slot) -> tuple[int, int]:
    """Version and address of a gathered parameter: they change when somebody writes to it, or assigns its ``data``."""
    if slot.tensor_parallel is not None or is_tensor_extension(slot.local):
        # These have no memory of their own to compare, or are rebuilt in each gather.
        return 0, 0
    return slot.unsharded._version, slot.unsharded.data_ptr()
