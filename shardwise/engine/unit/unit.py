"""A unit: parameters that are gathered, freed and reduced together.

The unit owns its memory and its gather, and moves through the states of ``planning/lifecycle``. Its gradients are in
``unit_gradients``; what users do to parameters that stay gathered is in ``gathered_parameters``, and to sharded ones in
``replaced``. *When* the unit is gathered or freed is not decided here: forward and backward reach it through ``hooks``,
order and prefetch through ``engine/step/root``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise import trace
from shardwise.comm.collectives.group import GroupCollectives
from shardwise.comm.dry_run import is_dry
from shardwise.comm.mesh import DataMesh
from shardwise.engine.reduce.reduce_plan import Summation
from shardwise.engine.unit.binding import Place, Shown, ShownForms, Slot, unsharded_shown
from shardwise.engine.unit.collective_names import CollectiveNames
from shardwise.engine.unit.dtensor_form import ShardedForm
from shardwise.engine.unit.gathered_parameters import GatheredParameters
from shardwise.engine.unit.interfaces import HooksInterface, Position, RootInterface
from shardwise.engine.unit.membership import sharded_shown, tag
from shardwise.engine.unit.replaced import catch_up, ties_while_gathered
from shardwise.engine.unit.settings import ShardHome, UnitSettings, shard_home
from shardwise.engine.unit.unit_buffers import UnitBuffers
from shardwise.engine.unit.unit_gradients import UnitGradients
from shardwise.planning.lifecycle import (
    ABANDON,
    ARRIVE,
    GATHER,
    GATHERING,
    KEEP,
    KEEP_PART,
    RESHARD,
    SHARDED,
    SHARDED_AFTER_FORWARD,
    TRANSITIONS,
    UNSHARDED,
)


class Unit:
    """Parameters that are gathered, freed and reduced together."""

    # Set by ``adopt``.
    root: RootInterface
    position: Position

    def __init__(
        self,
        name: str,
        modules: tuple[nn.Module, ...],
        slots: list[Slot],
        form: ShardedForm,
        mesh: DataMesh,
        settings: UnitSettings,
        sums: Summation,
        make_hooks: Callable[[Unit], HooksInterface],
        make_root: Callable[[Unit, str], RootInterface],
    ) -> None:
        self.modules = modules
        self.slots = slots
        self.form = form
        self.mesh = mesh
        self.settings = settings
        # Units whose parameters this unit's modules show: itself, and the owners of tied parameters.
        self.needs: tuple[Unit, ...] = (self,) if slots else ()
        self.needed_by: weakref.WeakSet[Unit] = weakref.WeakSet()
        self.state = SHARDED
        self.shown = ShownForms(Shown(), Shown(), None)
        self.gathered = GatheredParameters(self)
        self.gradients = UnitGradients(self, sums)
        self.build()
        self.hooks = make_hooks(self)
        # A unit is its own root until the first forward of an outer unit.
        make_root(self, name)

    def adopt(self, root: RootInterface, position: Position) -> None:
        """Makes the unit part of ``root``."""
        self.root = root
        self.position = position
        if self.has_memory and self.state is SHARDED and not self.buffers.are_for(self.slots):
            self.build()
            self.show_in_all_places()

    def configure(self, **changes: Any) -> None:
        """Changes settings; takes the fields of ``UnitSettings``."""
        if all(getattr(self.settings, name) == value for name, value in changes.items()):
            return
        self.settings = replace(self.settings, **changes)
        if "gather_calls" in changes and self.has_memory:
            self.buffers.gather.calls = self.settings.gather_calls

    def rebuild(self, **changes: Any) -> None:
        """Changes settings that the buffers depend on, between steps; shards keep their values."""
        self.reshard(trace.IDLE)
        self.configure(**changes)
        self.build()
        self.show_in_all_places()
        self.hooks.read_settings()

    def name_collectives(self, names: CollectiveNames) -> None:
        self.position = replace(self.position, collective_names=names)

    def need(self, owner: Unit) -> None:
        """Gathers ``owner`` together with this unit, because this unit's modules show a parameter of it."""
        if owner not in self.needs:
            self.needs = (*self.needs, owner)
            owner.needed_by.add(self)

    def drop_nameless_slots(self) -> None:
        """Drops slots whose names were all tied to other parameters, unless a tie to them is still to be noticed."""
        if not all(slot.places for slot in self.slots):
            others = (slot for unit in self.root.units if unit is not self for slot in unit.slots)
            shown = {id(place.params.get(place.name)) for slot in others for place in slot.places}
            self.slots = self.form.named(self.slots, shown)

    def take_back(self, slot: Slot) -> None:
        """Takes back a dropped slot: a name was tied to its parameter by a unit that was not in this root yet."""
        self.reshard(trace.IDLE)
        self.slots.append(slot)
        self.build()
        self.show_in_all_places()

    @property
    def name(self) -> str:
        return self.position.name

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def home(self) -> ShardHome:
        return shard_home(self.mesh, self.settings.offload)

    # --- memory ---------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Allocates the unit's buffers; sharded parameters keep their values and identity."""
        # Whether the parameters have left the meta device.
        self.has_memory = is_dry(self.mesh.device) or all(
            slot.local.device.type != "meta" for slot in self.slots
        )
        if not self.has_memory:
            return
        settings = self.settings
        part_world = settings.after_forward.part_world
        with torch.inference_mode(False), torch.no_grad():
            self.buffers = UnitBuffers(
                self.slots,
                self.form,
                self.mesh,
                settings.precision,
                self.home,
                settings.gather_calls,
                self.mesh.part(part_world) if part_world else None,
            )
            for slot in self.slots:
                tag(slot.unsharded, self, slot)
            self.gradients.forget_parameters()
            self.note_trainable()

    def _list_shown(self) -> None:
        """Lists what modules show in each form, once, so that a step only walks the lists."""
        self.shown = ShownForms(
            sharded_shown(self.slots, self),
            unsharded_shown(self.slots, self.form.flat_entries()),
            self.form.snapshot(self.slots) if self.has_memory else None,
        )

    def show_in_all_places(self) -> None:
        """Lists the places of the parameters again, which may have changed, and shows the shards there."""
        self._list_shown()
        self.shown.sharded.show()

    def show_in(self, places: list[Place]) -> None:
        """Shows the current form in places that are new; others may show what users put there since."""
        self._list_shown()
        is_gathered = self.state is UNSHARDED and not self.gathered.is_hidden
        shown = self.shown.unsharded if is_gathered else self.shown.sharded
        new = {(id(names), place.name) for place in places for names in (place.params, place.module.__dict__)}
        Shown([entry for entry in shown.entries if (id(entry[0]), entry[1]) in new]).show()

    def descriptions(self) -> list[str]:
        """A line for each parameter; ranks hold the same model if all their lines are equal."""
        prefix = f"{self.name}." if self.name else ""
        reduced = self.settings.precision.reduce_dtype
        reduced_in = f"reduced in {reduced}, " if reduced is not None else ""
        reduced_in += "summed exactly, " if self.gradients.sums.is_exact else ""
        return [
            f"'{prefix}{slot.name}' {slot.description}, {reduced_in}"
            f"{'no memory yet' if slot.local.device.type == 'meta' else 'with memory'}"
            for slot in self.slots
        ]

    def note_trainable(self) -> None:
        """Copies ``requires_grad``, which users may flip between steps, to the unsharded parameters."""
        trainable = [slot.sharded.requires_grad for slot in self.slots]
        if trainable == self.gradients.trainable:
            return
        self._list_shown()
        for slot, requires_grad in zip(self.slots, trainable, strict=True):
            slot.unsharded.requires_grad_(requires_grad)
        self.gradients.train(trainable)

    def is_unchanged(self) -> bool:
        """Whether modules show the same parameters as after the last gather, none frozen or thawed since."""
        return self.has_memory and self.form.all_show(self.shown.snapshot)

    def all_calls(self) -> list[GroupCollectives]:
        """The groups that this unit communicates on."""
        mesh, settings = self.mesh, self.settings
        part = [mesh.part(settings.after_forward.part_world)] if settings.after_forward.part_world else []
        replicate = [mesh.replicate] if mesh.replicate is not None else []
        return [settings.gather_calls, self.gradients.settings.calls, *replicate, *part]

    # --- sharded and unsharded ------------------------------------------------------------------------------------

    def issue_gather(self, phase: str, in_forward: bool = False, prefetch: bool = False) -> None:
        """Starts to gather the parameters, unless they are gathered already or on their way."""
        state = self.state
        if state is GATHERING or not self.slots:
            return
        if state is UNSHARDED:
            self.gathered.pass_on_writes()
            return
        root, settings = self.root, self.settings
        # Between a forward and its backward nobody may replace, freeze or thaw parameters.
        if not root.in_backward and (not self.has_memory or not self.form.all_show(self.shown.snapshot)):
            catch_up(self)
            if not self.slots:
                # All of them have been tied to other units'.
                return
        self.gathered.pass_on_writes()
        root.make_room(self, prefetch)
        stream = root.streams.gather
        from_part = state is SHARDED_AFTER_FORWARD and not in_forward
        keeps_part = (
            in_forward
            and settings.after_forward.part_world > 0
            and root.expects_backward
            and not self.keeps_after_forward()
        )
        gather = self.buffers.gather
        with stream:
            gather.issue(self.position.collective_names.gather[phase], from_part, keeps_part, prefetch)
            if settings.gather_calls.ordered_by_stream:
                gather.finish(stream)
        self.state = TRANSITIONS[state, GATHER]
        self.gathered.kept_version = None
        if settings.recorder is not None:
            settings.recorder.add(trace.UNSHARD, self.name, phase, self.rank)

    def wait_gather(self) -> None:
        """Makes what follows on the compute stream wait for the parameters, and shows them."""
        if self.state is not GATHERING:
            return
        streams, gather = self.root.streams, self.buffers.gather
        if not self.settings.gather_calls.ordered_by_stream:
            with streams.gather:
                gather.finish(streams.gather)
        # order: copy-out before compute, because forward and backward read the full parameters
        streams.compute_waits_for(gather.arrival)
        self.shown.unsharded.show()
        self.state = TRANSITIONS[GATHERING, ARRIVE]
        if self.gathered.kept_version is not None:
            self.gathered.note_contents()

    def reshard(self, phase: str, keep_part: bool = False) -> None:
        """Frees the unsharded parameters, or cancels a gather that nobody waits for."""
        state = self.state
        if state is SHARDED:
            return
        if state is GATHERING:
            self._cancel_gather(phase)
            return
        gathered = self.gathered
        if state is SHARDED_AFTER_FORWARD:
            self.buffers.gather.drop_part()
        else:
            if not gathered.is_hidden:
                self.show_shards()
            gathered.awaits_unseen_backward = gathered.is_hidden = False
            self.root.free_after_compute(self)
            if gathered.has_moved:
                gathered.has_moved = False
                self.build()
                self.show_in_all_places()
        step = RESHARD
        gathered.kept_version = None
        if self.buffers.gather.keeps_part:
            if keep_part:
                step = KEEP_PART
                gathered.kept_version = gathered.shard_version()
            else:
                self.buffers.gather.drop_part()
        self.state = TRANSITIONS[state, step]
        if self.settings.recorder is not None:
            self.settings.recorder.add(trace.RESHARD, self.name, phase, self.rank)

    def show_shards(self) -> None:
        """Shows the shards, with what users did to kept parameters: writes, freezing and ties."""
        if self.gathered.kept_version is None:
            self.shown.sharded.show()
            return
        self.gathered.copy_writes_to_shards()
        self.gathered.move_freezing_to_shards()
        self.gradients.stash()
        tied = ties_while_gathered(self)
        self.shown.sharded.show()
        for place, other in tied.items():
            place.params[place.name] = other.sharded

    def end_step(self) -> None:
        """Frees the parameters at the end of the last backward, unless somebody holds them or they are to stay."""
        if (
            not self.gathered.holders
            and self.settings.frees_after_backward
            and not self.gathered.awaits_unseen_backward
        ):
            self.reshard(trace.IN_POST_BACKWARD)

    def abandon_step(self, drops_stash: bool) -> None:
        """Drops what a step that raised has in flight, and shards the parameters again."""
        self.gathered.holders = 0
        self.hooks.forget()
        self.abandon_gather()
        self.gradients.abandon_step(drops_stash)

    def abandon_gather(self) -> None:
        """Shards the parameters again, without waiting for a gather in flight, which may have failed."""
        if self.state is GATHERING and not self.settings.gather_calls.ordered_by_stream:
            self.state = TRANSITIONS[GATHERING, ABANDON]
            self.gathered.kept_version = None
            if self.buffers.gather.abandon():
                self.root.free_after_compute(self)
            else:
                # A late peer may still write to the old buffers, which are freed once it has.
                self.build()
        self.reshard(trace.IDLE)

    def _cancel_gather(self, phase: str) -> None:
        """Drops a gather before anyone saw it; it is in flight on all ranks, so it must land first."""
        if not self.settings.gather_calls.ordered_by_stream:
            stream = self.root.streams.gather
            with stream:
                self.buffers.gather.finish(stream)
        self.buffers.gather.drop_part()
        self.root.free_after_compute(self)
        self.gathered.kept_version = None
        self.state = TRANSITIONS[GATHERING, ABANDON]
        if self.settings.recorder is not None:
            self.settings.recorder.add(trace.RESHARD, self.name, phase, self.rank)

    def was_stepped(self) -> None:
        """Frees parameters that were kept from before an optimizer's step: they are stale."""
        if self.state is SHARDED:
            return
        self.gathered.count_optimizer_step()
        if not self.gathered.holders and not self.root.is_busy:
            self.reshard(trace.IDLE)

    @property
    def stays_in_view(self) -> bool:
        """Whether modules show the full parameters from this backward to the next one.

        Schedules of pipelines look for them, and for their gradients, between backwards of the same step.
        """
        return not self.settings.frees_after_backward and not self.root.is_last_backward

    def keeps_after_forward(self) -> bool:
        """Whether the parameters stay gathered from forward to backward.

        The root's do unless a user said otherwise, because backward needs them at once; without grad no backward comes.
        """
        settings = self.settings
        if (
            self.position.is_outermost
            and not settings.after_forward_is_explicit
            and self.root.expects_backward
        ):
            return True
        return settings.after_forward is KEEP
