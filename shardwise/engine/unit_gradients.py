"""A unit's gradients in a backward: watched as they come in, put by or reduced, and what is left when it ends.

Which parameters are trained is the unit's to find out; each choice of them has a reduce of its own, planned once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from shardwise import trace
from shardwise.engine.gradients import GradientBuffer, presence
from shardwise.engine.reduce import PackedReduce, Sums
from shardwise.torch_internals import backward_reaches

if TYPE_CHECKING:
    from shardwise.engine.unit import Unit


class UnitGradients:
    """The gradients of one unit."""

    def __init__(self, unit: Unit, sums: Sums) -> None:
        self._unit = unit
        self._sums = sums
        self._is_tensor_parallel = any(slot.tensor_parallel is not None for slot in unit.slots)

        # What users set on the module, read in the step.
        self.settings = sums.settings(unit.mesh)
        self.are_synced = True
        self.max_inputs = 1

        self.trainable: list[bool] = []
        self.num_trainable = 0
        self._plans: dict[tuple[bool, ...], PackedReduce | None] = {}
        self.plan: PackedReduce | None = None
        self._watched: set[int] = set()
        # Whether some were put by, and whether this backward has reduced any.
        self.are_held = False
        self._has_reduced = False

    # --- which parameters are trained -----------------------------------------------------------------------------

    def train(self, trainable: list[bool]) -> None:
        """Takes the reduce of these parameters from now on; the unsharded ones know already which they are."""
        unit, key = self._unit, tuple(trainable)
        self.trainable = trainable
        self.num_trainable = sum(trainable)
        if key not in self._plans:
            slots = [slot for slot in unit.slots if slot.unsharded.requires_grad]
            self._plans[key] = (
                self._sums.plan(slots, unit.form, unit.mesh, unit.precision, unit.shard_device, unit.pins)
                if slots
                else None
            )
        self.plan = self._plans[key]

    @property
    def some_are_frozen(self) -> bool:
        return self.num_trainable != len(self._unit.slots)

    def forget_parameters(self) -> None:
        """The unsharded parameters are new ones: none of them is watched yet, and none has a place in a reduce."""
        self._watched = set()
        self._plans = {}
        self.trainable = []

    def forget_reduces(self, plans: set[PackedReduce]) -> None:
        """Makes reduces anew whose buffers peers may still write to."""
        if plans.intersection(plan for plan in self._plans.values() if plan is not None):
            self._plans = {}
            self.train(self.trainable)

    # --- in backward ----------------------------------------------------------------------------------------------

    def are_reached_by_backward(self) -> bool:
        """Whether the backward that is running now will use the unit's parameters.

        Trainable parameters tell by their gradients. A unit that is frozen through and through cannot tell, and is
        taken to be used.
        """
        if self.plan is None:
            return bool(self._unit.slots)
        return any(map(backward_reaches, self.plan.params))

    def watch(self, arrived: Callable[[torch.Tensor], None]) -> None:
        """Calls ``arrived`` as each trainable parameter's gradient is complete; registered once in a lifetime."""
        for index, slot in enumerate(self._unit.slots):
            if slot.unsharded.requires_grad and index not in self._watched:
                self._watched.add(index)
                slot.unsharded.register_post_accumulate_grad_hook(arrived)

    def have_come(self) -> bool:
        """Whether backward has left any on the parameters, and nothing has taken them since."""
        if self.plan is not None:
            for param in self.plan.params:
                if param.grad is not None:
                    return True
        return False

    def reduce(self) -> bool:
        """Starts to reduce the gradients that have come in, with those put by before; without sync, puts them by.

        Returns whether there were any.
        """
        plan = self.plan
        if plan is None:
            return False
        if self.settings.includes_unused and not self._unit.root.ends_backward:
            # Ranks whose backwards pass different units can agree on an order of reduces only at the end.
            return False
        if not self.have_come():
            return False
        if not self.are_synced:
            self.are_held = True
            for slot in plan.slots:
                slot.hold_gradient(self._unit.precision.reduce_dtype)
            return True
        if self._is_tensor_parallel:
            gradients = [slot.plain_gradient() for slot in plan.slots]
        else:
            gradients = [param.grad for param in plan.params]
        for param in plan.params:
            param.grad = None
        self._issue(plan, gradients)
        return True

    def reduce_the_rest(self) -> None:
        """At the end of a backward: what earlier micro-batches put by and nothing came to; zeros if asked."""
        if self._has_reduced and not self.are_held:
            self._has_reduced = False
            return
        unit, settings, plan = self._unit, self.settings, self.plan
        waits_for_replicas = plan is not None and plan.partial is not None and settings.all_reduces
        wanted = self.are_held or settings.includes_unused or waits_for_replicas
        if wanted and self.are_synced and plan is not None:
            self._issue(plan, [None] * len(plan.slots))
            if unit.frees_after_backward and unit.holders == 0 and unit.root.is_last_backward:
                # Peers whose backward came by have freed it and will gather it again: this rank must join them.
                unit.reshard(trace.IN_POST_BACKWARD)
        self._has_reduced = False

    def _issue(self, plan: PackedReduce, gradients: list[torch.Tensor | None]) -> None:
        unit = self._unit
        plan.is_again = self._has_reduced
        self._has_reduced = True
        if self.are_held:
            self.are_held = False
            gradients = [
                slot.add_held(gradient, unit.precision.reduce_dtype)
                for slot, gradient in zip(plan.slots, gradients, strict=True)
            ]
        root = unit.root
        if root.accord.guard is not None:
            root.accord.guard.look(unit.name, plan.slots, gradients)
        present = presence(gradients)
        codes = unit.events.reduce(plan, self.settings, present)
        root.start_reduce(plan, self.settings, gradients, present, self.max_inputs, codes)
        if unit.recorder is not None:
            unit.recorder.add(trace.REDUCE, unit.name, trace.IN_POST_BACKWARD, unit.rank)

    # --- between steps --------------------------------------------------------------------------------------------

    def lent(self) -> GradientBuffer | None:
        """The row that holds all of the unit's gradients, if they are as the last backward left them."""
        return None if self.plan is None or self._is_tensor_parallel else self.plan.lent

    def abandon_step(self) -> None:
        """Gives up what came in during a step that broke off."""
        self._has_reduced = False
        self.drop()

    def drop(self) -> None:
        """Drops what has come in or was put by."""
        self.are_held = False
        for slot in self._unit.slots:
            slot.drop_gradient()
        for plan in self._plans.values():
            if plan is not None:
                plan.partial = None
