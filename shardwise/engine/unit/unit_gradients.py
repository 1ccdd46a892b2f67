"""A unit's gradients: stashed or reduced as backward produces them, and what remains when backward ends.

The unit finds out which parameters are trained (``train``); each set of them has its own reduce plan, made once. A
reduce that has been issued belongs to the root.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from shardwise import trace
from shardwise.comm.mesh import DataMesh
from shardwise.engine.buffers import GradientBuffer, presence
from shardwise.engine.reduce.reduce_plan import ReducePlan, Summation
from shardwise.engine.unit.binding import Slot, is_wider
from shardwise.engine.unit.dtensor_form import ShardedForm
from shardwise.engine.unit.flat_form import FlatForm
from shardwise.engine.unit.interfaces import NamedUnit, Position, RootInterface
from shardwise.engine.unit.settings import ShardHome, UnitSettings
from shardwise.engine.unit.shown_stash import ShownStash
from shardwise.engine.unit.unit_buffers import UnitBuffers
from shardwise.errors import StateError
from shardwise.torch_internals import backward_reaches


class _Held(Protocol):
    holders: int


class ReducedUnit(NamedUnit, Protocol):
    """What is read of the unit here."""

    modules: tuple[nn.Module, ...]
    slots: list[Slot]
    form: ShardedForm
    mesh: DataMesh
    settings: UnitSettings
    root: RootInterface
    position: Position
    buffers: UnitBuffers

    @property
    def gathered(self) -> _Held: ...
    @property
    def home(self) -> ShardHome: ...
    @property
    def stays_in_view(self) -> bool: ...

    def reshard(self, phase: str) -> None: ...


class UnitGradients:
    """The gradients of one unit."""

    def __init__(self, unit: ReducedUnit, sums: Summation) -> None:
        self._unit = unit
        self.sums = sums
        self._is_tensor_parallel = any(slot.tensor_parallel is not None for slot in unit.slots)

        # What users set on the module.
        self.settings = sums.settings(unit.mesh)
        self.are_synced = True
        self.max_inputs = 1

        self.trainable: list[bool] = []
        self.num_trainable = 0
        self._plans: dict[tuple[bool, ...], ReducePlan | None] = {}
        self.plan: ReducePlan | None = None
        self._watched: set[int] = set()
        # Whether gradients are kept back: in the slots' stashes, or in place where the parameters stay in view.
        self.has_stash = False
        self._shown_stash = ShownStash(unit.form) if isinstance(unit.form, FlatForm) else None
        # The reduces that this backward has issued.
        self._started: set[ReducePlan] = set()

    # --- which parameters are trained -----------------------------------------------------------------------------

    def train(self, trainable: list[bool]) -> None:
        """Switches to the reduce plan of these parameters; the unsharded ones have their ``requires_grad`` already."""
        self.trainable = trainable
        self.num_trainable = sum(trainable)
        self.plan = self._plan_of(trainable)

    def _plan_of(self, chosen: list[bool]) -> ReducePlan | None:
        """Returns the reduce plan of the chosen parameters, made once."""
        unit, key = self._unit, tuple(chosen)
        if key not in self._plans:
            slots = [slot for slot, is_chosen in zip(unit.slots, chosen, strict=True) if is_chosen]
            # Its buffers are for backward, even if a forward in inference mode noticed the change.
            with torch.inference_mode(False):
                self._plans[key] = plan = (
                    self.sums.plan(slots, unit.form, unit.mesh, unit.settings.precision, unit.home)
                    if slots
                    else None
                )
            if plan is not None:
                plan.fits_in_full = len(plan.slices) == 1 and unit.buffers.has_room_for(plan.rows.size_bytes)
        return self._plans[key]

    def _plan_with_stash(self) -> ReducePlan | None:
        """Returns the plan of what is trained now and of what is stashed, perhaps from before it was frozen."""
        if not self.has_stash:
            return self.plan
        held = [slot.stash is not None for slot in self._unit.slots]
        return self._plan_of([any(either) for either in zip(held, self.trainable, strict=True)])

    def rows_fit(self, plan: ReducePlan) -> bool:
        """Whether rows can lie in the memory of the full parameters, once these are freed.

        The next gathers then wait for the reduce, so not where users asked for both at once.
        """
        calls, gather_calls = self.settings.calls, self._unit.settings.gather_calls
        return (
            plan.fits_in_full
            and self.max_inputs == 1
            and (calls is gather_calls or calls.channel is gather_calls.channel)
        )

    def may_borrow(self, plan: ReducePlan | None = None) -> bool:
        """Whether a reduce, by default the usual one, puts its rows there: streams must order it before gathers."""
        plan = plan or self.plan
        return (
            plan is not None
            and self.are_synced
            and self.settings.calls.ordered_by_stream
            and self.rows_fit(plan)
        )

    @property
    def some_are_frozen(self) -> bool:
        return self.num_trainable != len(self._unit.slots)

    def forget_parameters(self) -> None:
        """Drops hooks and plans, because the unsharded parameters are new ones; sums that wait for replicas stay."""
        plans, self._plans = self._plans, {}
        self._watched = set()
        self.trainable = []
        for chosen, plan in plans.items():
            if (
                plan is not None
                and plan.partial is not None
                and (new := self._plan_of(list(chosen))) is not None
            ):
                new.partial = plan.partial

    def forget_reduces(self, plans: set[ReducePlan]) -> None:
        """Replaces plans whose buffers peers may still write to."""
        if plans.intersection(plan for plan in self._plans.values() if plan is not None):
            self._plans = {}
            self.train(self.trainable)

    # --- in backward ----------------------------------------------------------------------------------------------

    def are_reached_by_backward(self) -> bool:
        """Whether the backward that is running will use the unit's parameters.

        Autograd knows which gradients it will compute. Of a unit without trainable parameters it knows nothing: that
        counts as used.
        """
        if self.plan is None:
            return bool(self._unit.slots)
        return any(map(backward_reaches, self.plan.params))

    def watch(self, arrived: Callable[[torch.Tensor], None]) -> None:
        """Calls ``arrived`` whenever a trainable parameter's gradient is complete; hooks each parameter once."""
        for index, slot in enumerate(self._unit.slots):
            if slot.unsharded.requires_grad and index not in self._watched:
                self._watched.add(index)
                slot.unsharded.register_post_accumulate_grad_hook(arrived)

    def have_come(self) -> bool:
        """Whether parameters have gradients that are not reduced or stashed yet."""
        if self.plan is not None:
            for param in self.plan.params:
                if param.grad is not None:
                    return True
        return False

    def check_some_have_come(self) -> None:
        """Raises if none are kept back, though the unit ran: its parameters were freed before backward."""
        if self.plan is not None and not self.has_stash and not self.have_come():
            unit = self._unit
            raise StateError(
                f"unit '{unit.name}' ran and has no gradient: its weights were freed after forward, before a schedule "
                "with separate backwards of inputs and weights looked for them",
                where=f"end of a pipeline's step, rank {unit.rank}",
                fix="shard the stages of such a pipeline with reshard_after_forward=False",
            )

    def check_were_announced(self) -> None:
        """Raises if gradients were computed with parameters that had not been gathered.

        Gradients of parameters that another unit shows, too, may have come while that one held them.
        """
        unit = self._unit
        others = [other for other in unit.root.units if other is not unit and unit in other.needs]
        elsewhere = {module for other in others for top in other.modules for module in top.modules()}
        if not any(
            slot.unsharded.grad is not None and elsewhere.isdisjoint(place.module for place in slot.places)
            for slot in unit.slots
        ):
            return
        self.drop()
        raise StateError(
            f"backward went through unit '{unit.name}' before its weights were gathered, so its gradients are wrong: "
            "it started from a tensor that forward stored somewhere else than in its output",
            where=f"backward, rank {unit.rank}",
            fix="return that tensor from forward (inside a tuple, dict or dataclass will do), or keep the weights with "
            "reshard_after_forward=False; and do not remove hooks from outputs",
        )

    def reduce(self) -> bool:
        """Starts to reduce the gradients, together with stashed ones; without sync, stashes them.

        Returns whether there were any.
        """
        plan = self.plan
        if plan is None:
            return False
        if self.settings.includes_unused and not self._unit.root.ends_backward:
            # Ranks whose backwards reach different units have the same order of reduces only at the end.
            return False
        if not self.have_come():
            return False
        if not self.are_synced:
            self.hide_stash()
            self.has_stash = True
            self.stash(self._unit.stays_in_view)
            return True
        if self.has_stash:
            self.hide_stash()
            with_stash = self._plan_with_stash()
            assert with_stash is not None
            plan = with_stash
        if self._is_tensor_parallel:
            gradients = [slot.plain_gradient() for slot in plan.slots]
        else:
            gradients = [param.grad for param in plan.params]
        for param in plan.params:
            param.grad = None
        self._issue(plan, gradients)
        return True

    def stash(self, stay_in_view: bool = False) -> None:
        """Moves gradients to the stash, if they are kept back.

        Where modules show the parameters until the next backward, which may add to their gradients without autograd,
        only those are moved that are summed in a wider dtype, or that have a stash: sums keep the order of backwards.
        """
        if self.plan is not None and not self.are_synced:
            dtype = self._unit.settings.precision.reduce_dtype
            for slot in self.plan.slots:
                if not stay_in_view or slot.stash is not None or is_wider(dtype, slot.gradient_dtype):
                    slot.stash_gradient(dtype)
                    self.has_stash |= slot.stash is not None

    def reduce_the_rest(self) -> None:
        """At the end of backward, reduces stashed gradients that none were added to, and zeros for unused units."""
        if self.has_stash:
            if self.are_synced:
                self.hide_stash()
            elif self._shown_stash is not None:
                self._shown_stash.show()
        is_done = self._started and not self.has_stash and self._unit.mesh.replicate is None
        if self.are_synced and not is_done:
            for plan in self._still_to_reduce():
                self._issue(plan, [None] * len(plan.slots))
                unit = self._unit
                if (
                    unit.settings.frees_after_backward
                    and not unit.gathered.holders
                    and unit.root.is_last_backward
                ):
                    # Peers whose backward reached it have freed it and will gather it again: so must this rank.
                    unit.reshard(trace.IN_POST_BACKWARD)
        self._started.clear()

    def hide_stash(self) -> None:
        """Takes the stash back that users see, as they left it: without the gradients that they set to None."""
        if self.has_stash and self._shown_stash is not None:
            self._shown_stash.hide()
            self.has_stash = any(slot.stash is not None for slot in self._unit.slots)

    def _still_to_reduce(self) -> list[ReducePlan]:
        plans: list[ReducePlan | None] = []
        if self.has_stash or (self.settings.includes_unused and not self._started):
            plans.append(self._plan_with_stash())
        if self.settings.all_reduces:
            # Parameters may have been frozen since: their sums still wait for the all-reduce.
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
        if self.has_stash:
            gradients = [
                slot.pop_stash(gradient, unit.settings.precision.reduce_dtype)
                for slot, gradient in zip(plan.slots, gradients, strict=True)
            ]
            self.has_stash = False
        root = unit.root
        if root.agreement.guard is not None:
            root.agreement.guard.look(unit.name, plan.slots, gradients)
        present = presence(gradients)
        root.finish_earlier_reduces(plan, self.max_inputs)
        codes = plan.codes(unit.position.collective_names, self.settings, present)
        reduction = plan.begin(self.settings, root.streams, codes)
        reduction.issue(gradients, present, root.lend_freed(unit, plan))
        root.reduces.append(reduction)
        if unit.settings.recorder is not None:
            unit.settings.recorder.add(trace.REDUCE, unit.name, trace.IN_POST_BACKWARD, unit.rank)

    # --- between steps --------------------------------------------------------------------------------------------

    def listen(self, method: Callable[[Any, Callable[[], None], bool], None]) -> None:
        """Calls ``method(unit, wait, is_last)`` whenever gradients have been assigned; does not keep it alive.

        ``wait`` returns when the host may read them; ``is_last``: in the last backward of the step. An object listens
        once: with another method it replaces the first.
        """
        callback = partial(_call, weakref.WeakMethod(method), weakref.ref(self._unit))
        self.settings.listeners[id(method.__self__)] = callback  # type: ignore[attr-defined]

    def lent(self) -> GradientBuffer | None:
        """Returns the buffer of all of the unit's gradients, if nobody has replaced one since the last backward."""
        return None if self.plan is None or self._is_tensor_parallel else self.plan.lent

    def abandon_step(self, drops_stash: bool) -> None:
        """Drops the gradients of a step that raised; with ``drops_stash``, stashed ones, too."""
        self._started.clear()
        if drops_stash:
            self.drop()
        else:
            for slot in self._unit.slots:
                slot.unsharded.grad = None

    def zero(self, shards: Container[torch.Tensor], set_to_none: bool) -> None:
        """``zero_grad`` of what users cannot see: stashed gradients, and sums that wait for the all-reduce."""
        if self.has_stash:
            self.stash()
            self.hide_stash()
            for slot in self._unit.slots:
                if slot.sharded in shards and slot.sharded.grad is not None:
                    # It was hidden by the stash.
                    slot.sharded.grad = None if set_to_none else slot.sharded.grad.zero_()
        for slot in self._unit.slots:
            if slot.stash is not None and slot.sharded in shards:
                if set_to_none:
                    slot.stash = None
                else:
                    slot.stash.zero_()
        self.has_stash = any(slot.stash is not None for slot in self._unit.slots)
        for plan in self._plans.values():
            if plan is not None and plan.partial is not None:
                plan.zero_partial(shards, set_to_none)

    @property
    def wait_for_replicas(self) -> bool:
        """Whether a sum over the shard group still waits for its all-reduce over the replicas."""
        return any(plan is not None and plan.partial is not None for plan in self._plans.values())

    def check_none_wait_for_replicas(self) -> None:
        """Raises if a sum waits for its all-reduce: it would be lost with the parameters' buffers."""
        if self.wait_for_replicas:
            unit = self._unit
            raise StateError(
                "parameters were replaced while their unit's gradients still wait to be summed over replicas",
                where=f"unit '{unit.name}', rank {unit.rank}",
                fix="replace them after a backward with set_requires_all_reduce(True), or call zero_grad() first",
            )

    def drop(self) -> None:
        """Drops all gradients: new, stashed, and waiting for the all-reduce."""
        self.hide_stash()
        self.has_stash = False
        for slot in self._unit.slots:
            slot.drop_gradient()
        for plan in self._plans.values():
            if plan is not None:
                plan.partial = None


def _call(
    method_ref: weakref.WeakMethod[Callable[..., None]],
    unit_ref: weakref.ref[ReducedUnit],
    wait: Callable[[], None],
    is_last: bool,
) -> None:
    method, unit = method_ref(), unit_ref()
    if method is not None and unit is not None:
        method(unit, wait, is_last)
