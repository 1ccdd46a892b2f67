"""A unit: parameters that travel together, and their way through a training step.

The unit knows its memory and its gather, and moves through the states of ``plan/lifecycle``; what becomes of its
gradients is told in ``unit_gradients``. *When* it moves is not decided here: forward and backward reach it through
``hooks``, order and prefetch through ``root``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise import trace
from shardwise.comm.collectives.group import GroupCollectives
from shardwise.comm.mesh import DataMesh
from shardwise.engine.gather.tensor_extensions import is_tensor_extension
from shardwise.engine.reduce.reduce_plan import DEFAULT_SUMMATION, Summation
from shardwise.engine.unit.binding import Place, Shown, Slot, is_showing, show, unsharded_shown
from shardwise.engine.unit.collective_names import CollectiveNames
from shardwise.engine.unit.dtensor_form import ShardedForm
from shardwise.engine.unit.interfaces import HooksInterface, RootInterface
from shardwise.engine.unit.membership import (
    adopt_found,
    check_are_home,
    follow_ties,
    sharded_shown,
    tag,
    take_written,
    ties_while_gathered,
)
from shardwise.engine.unit.unit_buffers import UnitBuffers
from shardwise.engine.unit.unit_gradients import UnitGradients
from shardwise.plan.lifecycle import (
    ABANDON,
    ARRIVE,
    GATHER,
    GATHERING,
    KEEP_PART,
    RESHARD,
    SHARDED,
    SHARDED_AFTER_FORWARD,
    TRANSITIONS,
    UNSHARDED,
)
from shardwise.plan.schedule import KEEP, AfterForward
from shardwise.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy


def shard_device(mesh: DataMesh, offload: OffloadPolicy) -> torch.device:
    """Where shards live."""
    return torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else mesh.device


def _written_to(slot: Slot) -> tuple[int, int]:
    """Changes when somebody writes to a gathered parameter, or assigns its ``data``."""
    if slot.tensor_parallel is not None or is_tensor_extension(slot.local):
        # They have no memory of their own to tell by, or are rebuilt in each gather.
        return 0, 0
    return slot.unsharded._version, slot.unsharded.data_ptr()


class Unit:
    """Parameters that are gathered, freed and reduced together."""

    def __init__(
        self,
        name: str,
        modules: tuple[nn.Module, ...],
        slots: list[Slot],
        form: ShardedForm,
        mesh: DataMesh,
        after_forward: AfterForward,
        precision: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        sums: Summation = DEFAULT_SUMMATION,
    ) -> None:
        self.name = name
        self.modules = modules
        # A forward of the model need not run all of them.
        self.has_several = len(modules) > 1
        self.slots = slots
        self.form = form
        self.mesh = mesh
        self.precision = precision
        self.offload = offload
        self.sums = sums
        self.rank = mesh.rank
        self.recorder: trace.Recorder | None = None
        # Set before anything else can reach the unit: its hooks on making, its root on adoption.
        self.hooks: HooksInterface
        self.root: RootInterface
        self.is_top = True
        self.number = 0
        self.collective_names = CollectiveNames(name, len(slots))

        # What users set on the module, read in the step.
        self.after_forward = after_forward
        self.after_forward_is_explicit = False
        self.frees_after_backward = True
        self.gathers_in_backward = True
        self.gather_calls: GroupCollectives = mesh.shard
        self.forward_prefetch: tuple[Unit, ...] = ()
        self.backward_prefetch: tuple[Unit, ...] | None = None
        self.prefetches_late = False
        # Whether all ranks gather and reduce the unit, whichever of them run it (``engine/step/joint_units``).
        self.is_joint = False

        # Units whose parameters this unit's modules show: its own, and those a tied parameter belongs to.
        self.needs: tuple[Unit, ...] = (self,) if slots else ()
        self.state = SHARDED
        self.holders = 0
        self.prefetched = False
        self._gathers_part = False
        # What the shards were when the parameters shown now were last known to be theirs; None while a step uses them.
        self._kept_version: int | None = None
        self._num_steps = 0
        self._gathered_as: list[tuple[int, int]] = []
        # Somebody gave a gathered parameter other memory, which gathers do not fill.
        self._was_moved = False
        # Kept only because nothing will tell when a backward comes to it.
        self.is_unseen = False
        # Gathered, while modules show the shards.
        self.is_hidden = False
        self._sharded_shown: Shown = []
        self._unsharded_shown: Shown = []
        self._snapshot: list[Any] = []
        self.shard_device = shard_device(mesh, offload)
        self.is_offloaded = self.shard_device != mesh.device
        self.pins = self.is_offloaded and isinstance(offload, CPUOffloadPolicy) and offload.pin_memory
        self.gradients = UnitGradients(self, sums)
        self._build()

    # --- memory ---------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Gives the slots memory; sharded parameters keep their values and identity."""
        self._is_meta = any(slot.local.device.type == "meta" for slot in self.slots)
        if self._is_meta:
            return
        part_world = self.after_forward.part_world
        with torch.inference_mode(False), torch.no_grad():
            self.buffers = UnitBuffers(
                self.slots,
                self.form,
                self.mesh,
                self.precision,
                self.shard_device,
                self.pins,
                self.gather_calls,
                self.mesh.part(part_world) if part_world else None,
            )
            for slot in self.slots:
                tag(slot.unsharded, self, slot)
            self.gradients.forget_parameters()
            self._note_trainable()

    def _note_places(self) -> None:
        """Lists what the modules show in either form, and what the unit leaves there: a step only walks the lists."""
        self._sharded_shown = sharded_shown(self.slots, self)
        self._unsharded_shown = unsharded_shown(self.slots)
        self._snapshot = [] if self._is_meta else self.form.snapshot(self.slots)

    def show_sharded(self) -> None:
        """Shows the sharded parameters in all their places, which may have changed."""
        self._note_places()
        show(self._sharded_shown)

    def show_places(self) -> None:
        """Shows the form that the parameters are in, in all their places, which may have changed."""
        self._note_places()
        is_gathered = self.state is UNSHARDED and not self.is_hidden
        show(self._unsharded_shown if is_gathered else self._sharded_shown)

    @property
    def has_memory(self) -> bool:
        """Whether parameters have left the meta device."""
        return not self._is_meta

    def descriptions(self) -> list[str]:
        """A line for each parameter that tells whether ranks hold the same model."""
        prefix = f"{self.name}." if self.name else ""
        reduced = self.precision.reduce_dtype
        reduced_in = f"reduced in {reduced}, " if reduced is not None else ""
        reduced_in += "summed exactly, " if self.sums.is_exact else ""
        return [
            f"'{prefix}{slot.name}' {slot.description}, {reduced_in}"
            f"{'no memory yet' if slot.local.device.type == 'meta' else 'with memory'}"
            for slot in self.slots
        ]

    def take_back_replaced(self) -> None:
        """Takes over what changed from outside, for whoever reads the shards between steps."""
        if self._is_meta or not self.form.all_show(self._snapshot):
            self._catch_up()

    def move_from_meta(self) -> None:
        """Moves parameters that have just left the meta device into the unit's buffer, if they came as they should.

        What ``to_empty()`` took for them goes back to the device: left in its allocator, in pieces of the shards' odd
        sizes, it would be of little use to activations.
        """
        if not self._is_meta or not self.slots:
            return
        home = self.shard_device
        found = [slot.found() for slot in self.slots]
        for slot, param in zip(self.slots, found, strict=True):
            if param is None or not slot.fits(param) or param.device.type != home.type:
                return
        del found, param
        self.adopt_replaced_parameters()
        if home.type == "cuda":
            torch.cuda.empty_cache()

    def adopt_replaced_parameters(self) -> None:
        """Takes parameters that were replaced from outside back into the unit's buffer."""
        self.gradients.check_none_wait_for_replicas()
        self._follow_ties()
        adopt_found(self.slots, self.name, self.rank)
        for slot in self.slots:
            tag(slot.sharded, self, slot)
        self.show_sharded()
        check_are_home(self.slots, self.shard_device, self.is_offloaded, self.name, self.rank)
        self._build()

    def _follow_ties(self) -> None:
        """Names were tied to other sharded parameters: those are gathered for them from now on."""
        owners = follow_ties(self)
        if not owners:
            return
        self.slots = self.form.named(self.slots)
        for owner in owners:
            if owner is self:
                continue
            for unit in self.root.units:
                if self in unit.needs and owner not in unit.needs:
                    unit.needs = (*unit.needs, owner)
            if not owner.holders:
                # Or what was frozen or thawed since its last gather would pass for what it left there.
                owner._note_trainable()
            owner.show_places()

    def _note_trainable(self) -> None:
        """Reads ``requires_grad``, which users may flip between steps, over to the unsharded parameters."""
        trainable = [slot.sharded.requires_grad for slot in self.slots]
        if trainable == self.gradients.trainable:
            return
        self._note_places()
        for slot, requires_grad in zip(self.slots, trainable, strict=True):
            slot.unsharded.requires_grad_(requires_grad)
        self.gradients.train(trainable)

    def is_unchanged(self) -> bool:
        """Whether the modules show the parameters that the last gather left there, trained or frozen as they were."""
        return not self._is_meta and self.form.all_show(self._snapshot)

    def _catch_up(self) -> None:
        """Takes over what changed from outside since the last gather: parameters frozen, thawed or replaced."""
        if not self._is_meta:
            self._note_trainable()
            if self.form.all_show(self._snapshot):
                return
        self.adopt_replaced_parameters()
        # order: the values' move into the unit's buffer before it is gathered, because this step's gathers waited for
        # what came before the step
        self.root.streams.gather.wait_compute()

    def all_calls(self) -> list[GroupCollectives]:
        """The groups this unit talks on."""
        mesh = self.mesh
        part = [mesh.part(self.after_forward.part_world)] if self.after_forward.part_world else []
        replicate = [mesh.replicate] if mesh.replicate is not None else []
        return [self.gather_calls, self.gradients.settings.calls, *replicate, *part]

    def set_gather_calls(self, calls: GroupCollectives) -> None:
        self.gather_calls = calls
        if not self._is_meta:
            self.buffers.gather.calls = calls

    # --- sharded and unsharded ------------------------------------------------------------------------------------

    def issue_gather(self, phase: str, in_forward: bool = False, prefetch: bool = False) -> None:
        """Starts to gather the parameters, unless they are there or under way."""
        state = self.state
        if state is UNSHARDED or state is GATHERING or not self.slots:
            return
        root = self.root
        # Between a forward and its backward nobody may replace parameters or flip what is trained.
        if not root.in_backward and (self._is_meta or not self.form.all_show(self._snapshot)):
            self._catch_up()
        root.make_room(self, prefetch)
        stream = root.streams.gather
        self._gathers_part = (
            in_forward
            and self.after_forward.part_world > 0
            and root.expects_backward
            and not self.keeps_after_forward()
        )
        with stream:
            self.buffers.issue_gather(
                self.collective_names.gather[phase], state is SHARDED_AFTER_FORWARD and not in_forward
            )
            if self.gather_calls.ordered_by_stream:
                self._finish_gather()
        self.state = TRANSITIONS[state, GATHER]
        self._kept_version = None
        self.prefetched = prefetch
        if self.recorder is not None:
            self.recorder.add(trace.UNSHARD, self.name, phase, self.rank)

    def _finish_gather(self) -> None:
        self.buffers.finish_gather(self._gathers_part)
        self._arrival = self.gather_calls.channel.last_event = self.root.streams.gather.record_event()

    def wait_gather(self) -> None:
        """Makes the parameters usable by what comes next on the compute stream, and shows them."""
        if self.state is not GATHERING:
            return
        streams = self.root.streams
        if not self.gather_calls.ordered_by_stream:
            with streams.gather:
                self._finish_gather()
        # order: copy-out before compute, because forward and backward read the full parameters
        streams.compute_waits_for(self._arrival)
        show(self._unsharded_shown)
        self.state = TRANSITIONS[GATHERING, ARRIVE]
        self.prefetched = False
        if self._kept_version is not None:
            self._note_writes()

    def reshard(self, phase: str, keep_part: bool = False) -> None:
        """Frees the unsharded parameters, or calls off a gather that nobody waits for."""
        state = self.state
        if state is SHARDED:
            return
        if state is GATHERING:
            self._call_off_gather(phase)
            return
        if state is SHARDED_AFTER_FORWARD:
            self.buffers.gather.drop_part()
        else:
            if not self.is_hidden:
                tied = {} if self._kept_version is None else self._take_over_changes()
                show(self._sharded_shown)
                for place, other in tied.items():
                    place.params[place.name] = other.sharded
            self.is_unseen = self.is_hidden = False
            self.root.free_after_compute(self)
            if self._was_moved:
                self._was_moved = False
                self._build()
                self.show_sharded()
        step = RESHARD
        self._kept_version = None
        if self._gathers_part:
            if keep_part:
                step = KEEP_PART
                self._kept_version = self._version()
            else:
                self.buffers.gather.drop_part()
        self.state = TRANSITIONS[state, step]
        if self.recorder is not None:
            self.recorder.add(trace.RESHARD, self.name, phase, self.rank)

    def end_step(self) -> None:
        """A backward that nothing follows has ended: shards what nobody holds or has told to stay."""
        if not self.holders and self.frees_after_backward and not self.is_unseen:
            self.reshard(trace.IN_POST_BACKWARD)

    def abandon_step(self, drops_held: bool) -> None:
        """Gives up what a broken-off step has under way, and shards the parameters again."""
        self.holders = 0
        self.hooks.forget()
        self.abandon_gather()
        self.gradients.abandon_step(drops_held)

    def abandon_gather(self) -> None:
        """Shards the parameters again, without waiting for a gather under way: it may have failed."""
        if self.state is GATHERING and not self.gather_calls.ordered_by_stream:
            self.state = TRANSITIONS[GATHERING, ABANDON]
            self.prefetched = False
            self._kept_version = None
            if self.buffers.gather.abandon():
                self.root.free_after_compute(self)
            else:
                # A peer that comes later may still write to the old memory, which goes when it has.
                self._build()
        self.reshard(trace.IDLE)

    def _call_off_gather(self, phase: str) -> None:
        """Drops a gather before anyone saw it; under way on all ranks, it must land before its memory goes."""
        if not self.gather_calls.ordered_by_stream:
            with self.root.streams.gather:
                self._finish_gather()
        self.buffers.gather.drop_part()
        self.root.free_after_compute(self)
        self.prefetched = False
        self._kept_version = None
        self.state = TRANSITIONS[GATHERING, ABANDON]
        if self.recorder is not None:
            self.recorder.add(trace.RESHARD, self.name, phase, self.rank)

    def _version(self) -> int:
        return self._num_steps + sum(slot.version() for slot in self.slots)

    def was_stepped(self) -> None:
        """An optimizer has written to the shards, which torch's foreach and fused kernels do without raising versions.

        Parameters that were kept from before have gone stale.
        """
        self._num_steps += 1
        if self.state is not SHARDED and not self.holders and not self.root.is_busy:
            self.reshard(trace.IDLE)

    def hold(self) -> None:
        """Somebody computes with the unsharded parameters: they stay until it is released as often as it was held."""
        self.holders += 1
        if self.is_hidden:
            self.reveal()

    def reveal(self) -> None:
        """Shows the parameters that were kept gathered."""
        if self.is_hidden:
            self.is_hidden = False
            show(self._unsharded_shown)
            self._note_writes()

    def release(self) -> bool:
        """One of those who held the unit is done; whether it was the last."""
        self.holders -= 1
        return self.holders == 0

    def keep(self, is_hidden: bool = False) -> None:
        """Stays gathered for now; notes what the shards are, to notice when the parameters have gone stale.

        ``is_hidden``: no backward is to come, so whoever looks at the modules now means to read or write the shards.
        """
        if self._kept_version is None:
            self._kept_version = self._version()
            if self.state is UNSHARDED:
                self._note_writes()
        if is_hidden and self.state is UNSHARDED:
            self.is_hidden = True
            show(self._sharded_shown)

    def _note_writes(self) -> None:
        self._gathered_as = list(map(_written_to, self.slots))

    def is_stale(self) -> bool:
        """Whether shards were written to or replaced, or parameters frozen or thawed, since the unit was kept."""
        return self._kept_version is not None and (
            self._version() != self._kept_version
            or (self.is_hidden and not self.form.all_show(self._snapshot))
            or (self.state is UNSHARDED and not self.is_hidden and self._is_displaced())
            or (
                self.state is UNSHARDED
                and any(
                    not slot.sharded.requires_grad == slot.unsharded.requires_grad == trainable
                    for slot, trainable in zip(self.slots, self.gradients.trainable, strict=True)
                )
            )
        )

    def _is_displaced(self) -> bool:
        """Whether modules show something else than the gathered parameters, or those were given other memory."""
        return not is_showing(self._unsharded_shown) or any(
            _written_to(slot)[1] != noted[1]
            for slot, noted in zip(self.slots, self._gathered_as, strict=True)
        )

    def _take_over_changes(self) -> dict[Place, Slot]:
        """Takes over what users did with the unsharded parameters while those were shown: freezing, writing, tying.

        Returns the places that were tied to other parameters, and the slots of those.
        """
        self.take_over_writes()
        for slot, trainable in zip(self.slots, self.gradients.trainable, strict=True):
            if slot.unsharded.requires_grad != trainable:
                slot.sharded.requires_grad_(not trainable)
                slot.unsharded.requires_grad_(trainable)
        return ties_while_gathered(self)

    def take_over_writes(self) -> None:
        """Gives the shards what was written to kept parameters while modules showed them."""
        if self._kept_version is None or self.is_hidden or self.state is not UNSHARDED:
            return
        for slot, noted in zip(self.slots, self._gathered_as, strict=True):
            if _written_to(slot) != noted:
                take_written(slot, self.form.own_part(slot, slot.unsharded, self.mesh), self.name, self.rank)
                self._was_moved |= slot.unsharded.data_ptr() != noted[1]

    def keeps_after_forward(self) -> bool:
        """The root's parameters are needed at once when backward begins, so it keeps them unless told otherwise.

        Without grad there is no backward to keep them for.
        """
        if self.is_top and not self.after_forward_is_explicit and self.root.expects_backward:
            return True
        return self.after_forward is KEEP
