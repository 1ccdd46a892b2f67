"""A unit's gradients in a backward: watched as they come in, put by or reduced, and what is left when it ends.

Which parameters are trained is the unit's to find out; each choice of them has a reduce of its own, planned once.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING

import torch

from shardwise import trace
from shardwise.engine.reduce.gradient_buffer import GradientBuffer, presence
from shardwise.engine.reduce.reduce_plan import ReducePlan, Summation
from shardwise.errors import StateError
from shardwise.torch_internals import backward_reaches

if TYPE_CHECKING:
    from shardwise.engine.unit.unit import Unit


class UnitGradients:
    """The gradients of one unit."""

    def __init__(self, unit: Unit, sums: Summation) -> None:
        self._unit = unit
        self.sums = sums
        self._is_tensor_parallel = any(slot.tensor_parallel is not None for slot in unit.slots)

        # What users set on the module, read in the step.
        self.settings = sums.settings(unit.mesh)
        self.are_synced = True
        self.max_inputs = 1

        self.trainable: list[bool] = []
        self.num_trainable = 0
        self._plans: dict[tuple[bool, ...], ReducePlan | None] = {}
        self.plan: ReducePlan | None = None
        self._watched: set[int] = set()
        # Whether some were put by.
        self.are_held = False
        # The reduces that this backward has started.
        self._started: set[ReducePlan] = set()

    # --- which parameters are trained -----------------------------------------------------------------------------

    def train(self, trainable: list[bool]) -> None:
        """Takes the reduce of these parameters from now on; the unsharded ones know already which they are."""
        self.trainable = trainable
        self.num_trainable = sum(trainable)
        self.plan = self._plan_of(trainable)

    def _plan_of(self, chosen: list[bool]) -> ReducePlan | None:
        """The reduce of the chosen parameters, planned once."""
        unit, key = self._unit, tuple(chosen)
        if key not in self._plans:
            slots = [slot for slot, is_chosen in zip(unit.slots, chosen, strict=True) if is_chosen]
            # Its buffers are for backward, whatever mode the forward runs in that has noticed the change.
            with torch.inference_mode(False):
                self._plans[key] = (
                    self.sums.plan(
                        slots, unit.form, unit.mesh, unit.settings.precision, unit.shard_device, unit.pins
                    )
                    if slots
                    else None
                )
        return self._plans[key]

    def _plan_with_held(self) -> ReducePlan | None:
        """The reduce of what is trained now and of what was put by, perhaps before it was frozen."""
        if not self.are_held:
            return self.plan
        held = [slot.held is not None for slot in self._unit.slots]
        return self._plan_of([any(either) for either in zip(held, self.trainable, strict=True)])

    @property
    def some_are_frozen(self) -> bool:
        return self.num_trainable != len(self._unit.slots)

    def forget_parameters(self) -> None:
        """The unsharded parameters are new ones: none of them is watched yet, and none has a place in a reduce."""
        self._watched = set()
        self._plans = {}
        self.trainable = []

    def forget_reduces(self, plans: set[ReducePlan]) -> None:
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
                slot.hold_gradient(self._unit.settings.precision.reduce_dtype)
            return True
        if self.are_held:
            with_held = self._plan_with_held()
            assert with_held is not None
            plan = with_held
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
        is_through = self._started and not self.are_held and self._unit.mesh.replicate is None
        if self.are_synced and not is_through:
            for plan in self._still_to_reduce():
                self._issue(plan, [None] * len(plan.slots))
                unit = self._unit
                if unit.settings.frees_after_backward and unit.holders == 0 and unit.root.is_last_backward:
                    # Peers whose backward came by have freed it and will gather it again: this rank must join them.
                    unit.reshard(trace.IN_POST_BACKWARD)
        self._started.clear()

    def _still_to_reduce(self) -> list[ReducePlan]:
        plans: list[ReducePlan | None] = []
        if self.are_held or (self.settings.includes_unused and not self._started):
            plans.append(self._plan_with_held())
        if self.settings.all_reduces:
            # Parameters may have been frozen since: their sums still wait for the replicas'.
            plans += [
                plan
                for plan in self._plans.values()
                if plan is not None and plan.partial is not None and plan not in self._started
            ]
        return [plan for plan in dict.fromkeys(plans) if plan is not None]

    def _issue(self, plan: ReducePlan, gradients: list[torch.Tensor | None]) -> None:
        unit = self._unit
        plan.is_again = bool(self._started)
        self._started.add(plan)
        if self.are_held:
            gradients = [
                slot.add_held(gradient, unit.settings.precision.reduce_dtype)
                for slot, gradient in zip(plan.slots, gradients, strict=True)
            ]
            self.are_held = False
        root = unit.root
        if root.agreement.guard is not None:
            root.agreement.guard.look(unit.name, plan.slots, gradients)
        present = presence(gradients)
        codes = unit.collective_names.reduce(plan, self.settings, present)
        root.start_reduce(plan, self.settings, gradients, present, self.max_inputs, codes)
        if unit.settings.recorder is not None:
            unit.settings.recorder.add(trace.REDUCE, unit.name, trace.IN_POST_BACKWARD, unit.rank)

    # --- between steps --------------------------------------------------------------------------------------------

    def lent(self) -> GradientBuffer | None:
        """The row that holds all of the unit's gradients, if they are as the last backward left them."""
        return None if self.plan is None or self._is_tensor_parallel else self.plan.lent

    def abandon_step(self, drops_held: bool) -> None:
        """Gives up what came in during a step that broke off, and what was put by before it if that is asked for."""
        self._started.clear()
        if drops_held:
            self.drop()
        else:
            for slot in self._unit.slots:
                slot.unsharded.grad = None

    def zero(self, shards: Container[torch.Tensor], set_to_none: bool) -> None:
        """As ``zero_grad``, of what users cannot see: gradients put by, and sums that wait for their replicas."""
        for slot in self._unit.slots:
            if slot.held is not None and slot.sharded in shards:
                if set_to_none:
                    slot.held = None
                else:
                    slot.held.zero_()
        self.are_held = any(slot.held is not None for slot in self._unit.slots)
        for plan in self._plans.values():
            if plan is not None and plan.partial is not None:
                run_starts = [run.start for run in plan.runs]
                plan.partial = plan.partial.zeroed(shards, set_to_none, run_starts)

    @property
    def wait_for_replicas(self) -> bool:
        """Whether a sum over the shard group is still to be summed over the replicas."""
        return any(plan is not None and plan.partial is not None for plan in self._plans.values())

    def check_none_wait_for_replicas(self) -> None:
        """Raises if a sum waits for its replicas: its place goes with the parameters' memory."""
        if self.wait_for_replicas:
            unit = self._unit
            raise StateError(
                "parameters were replaced while sums of their unit's gradients wait for the replicas'",
                where=f"unit '{unit.name}', rank {unit.rank}",
                fix="replace them after a backward with set_requires_all_reduce(True), or call zero_grad() first",
            )

    def drop(self) -> None:
        """Drops what has come in or was put by."""
        self.are_held = False
        for slot in self._unit.slots:
            slot.drop_gradient()
        for plan in self._plans.values():
            if plan is not None:
                plan.partial = None
