"""Exact sums of gradients: always in the same order, however many ranks there are and however they shard the model.

    micro-batches       0   1   2   3   4   5   6   7
    on 2 ranks, rank    0   1   0   1   0   1   0   1
    after a backward    └─┬─┘   └─┬─┘   └─┬─┘   └─┬─┘     tree over ranks (``ExactCollectives``)
    across backwards      └───┬───┘       └───┬───┘       subtrees that gradients carry (``Tally``)
                              └───────┬───────┘

Each backward is one micro-batch of every rank. Its gradients are sent in the dtype they were computed in and added in
float32: first over ranks, then over replicas, then over backwards, always in the order of ``planning/sums``. The order
in which a group's own reduce adds depends on the number of ranks and on the network: here the terms are sent unsummed,
and the rank that owns an element adds its terms.

    rows of all ranks ──one all-to-all, in the dtype they are in──▶ terms of the own row ──tree over ranks──▶ own row

A gradient always is the sum of the backwards up to now. The subtrees of that sum, needed to add the next micro-batch in
the right order, are attached to the gradients and dropped with them, so accumulation needs no explicit begin or end. If
gradients were written to, they are kept, and later backwards form a new sum that is added to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from shardwise.comm.collectives.group import DONE, GroupCollectives, Work, WrappedCollectives
from shardwise.comm.mesh import DataMesh
from shardwise.comm.streams import SideStreams
from shardwise.engine.buffers import GradientView, gradient_version
from shardwise.engine.reduce.reduce_in_flight import ReduceInFlight
from shardwise.engine.reduce.reduce_plan import ReducePlan, Summation
from shardwise.engine.unit.binding import Attachment, Slot, computed_dtype
from shardwise.engine.unit.dtensor_form import ShardedForm
from shardwise.engine.unit.settings import ReduceSettings, ShardHome
from shardwise.errors import ConfigError, StateError
from shardwise.planning.layout import Packing, ceil_div
from shardwise.planning.sums import is_power_of_two, total, tree_sum, with_term
from shardwise.policies import MixedPrecisionPolicy
from shardwise.torch_internals import local_part, post_accumulate_hooks

if TYPE_CHECKING:
    from shardwise.engine.unit.unit import Unit

TALLY_ATTRIBUTE = "_shardwise_tally"


class ExactSummation(Summation):
    """How a unit's gradients are summed with ``exact=True``."""

    is_exact = True

    def settings(self, mesh: DataMesh) -> ReduceSettings:
        replicate = None if mesh.replicate is None else ExactCollectives(mesh.replicate)
        return ReduceSettings(ExactCollectives(mesh.shard), replicate_calls=replicate)

    def plan(
        self,
        slots: list[Slot],
        form: ShardedForm,
        mesh: DataMesh,
        precision: MixedPrecisionPolicy,
        home: ShardHome,
    ) -> ReducePlan:
        sent = computed_dtype(slots)
        reduce_dtype = precision.reduce_dtype
        if reduce_dtype is not None and reduce_dtype.itemsize < sent.itemsize:
            sent = reduce_dtype
        return ExactReducePlan(slots, form, mesh, sent, home, torch.promote_types(sent, torch.float32))


EXACT_SUMMATION = ExactSummation()


def check_mesh(mesh: DataMesh, where: str) -> None:
    """Raises unless the ranks of ``mesh`` hold aligned subtrees of micro-batches."""
    for axis, calls in (("shards over", mesh.shard), ("replicates over", mesh.replicate)):
        if calls is not None and not is_power_of_two(calls.world):
            raise ConfigError(
                f"exact sums need a power of two of ranks, and the mesh {axis} {calls.world} ranks",
                where=where,
                fix="use 1, 2, 4, 8, ... ranks, or leave out exact=True",
            )


def check_model(units: Iterable[Unit], where: str) -> None:
    """Raises if only some units of a model are summed exactly."""
    training = [unit for unit in units if unit.gradients.num_trainable]
    exact = [unit for unit in training if unit.gradients.sums.is_exact]
    others = [unit for unit in training if not unit.gradients.sums.is_exact]
    if exact and others:
        raise ConfigError(
            f"unit '{exact[0].name}' sums its gradients exactly and unit '{others[0].name}' does not: the result would "
            "still depend on how the model is sharded",
            where=where,
            fix="pass exact=True to every fully_shard call of the model, or to none",
        )


def check_not_exact(units: Iterable[Unit], setter: str, reason: str) -> None:
    """Raises if a setting would change the order in which an exact unit's gradients are summed."""
    for unit in units:
        if unit.gradients.sums.is_exact:
            raise ConfigError(
                f"unit '{unit.name}' sums its gradients exactly, and {setter} {reason}",
                where=f"{setter}, unit '{unit.name}', rank {unit.rank}",
                fix=f"do not call {setter}, or shard the model without exact=True",
            )


class ExactReducePlan(ReducePlan):
    """The exact reduce of one set of trainable slots: sent in the dtype they were computed in, summed in float32."""

    # Each gradient is a subtree that a later sum may need.
    _reuses_gradients = False

    # Counts the reduces of one backward.
    reduce_number = 0

    def _plan_own_row(self, form: ShardedForm, packing: Packing) -> None:
        super()._plan_own_row(form, packing)
        # Identifies the gradients of this plan, and of one that replaces it later.
        self.token = (id(form), self.row_numel, self.sum_dtype, tuple(slot.name for slot in self.slots))

    def begin(self, settings: ReduceSettings, streams: SideStreams, codes: tuple[int, int]) -> ReduceInFlight:
        self.reduce_number = self.reduce_number + 1 if self.is_again else 0
        return ExactReduceInFlight(self, settings, streams, codes, self.reduce_number)


class Tally(Attachment):
    """The subtrees of the sum that a unit's gradients are; every sum has a new tally.

    ``trees`` has an entry for each reduce of a backward, because a unit may be reduced several times in one: (number of
    backwards, their subtrees). ``bases`` are the gradients from before the first backward, by index of their view.
    """

    def __init__(
        self,
        token: object = None,
        trees: tuple[tuple[int, tuple[torch.Tensor, ...]], ...] = (),
        bases: dict[int, torch.Tensor] | None = None,
    ) -> None:
        self._token = token
        self._trees = trees
        self._bases = bases or {}
        self._versions: dict[int, int] = {}
        self._subtree_versions: list[int] = []

    @staticmethod
    def found(plan: ExactReducePlan) -> Tally:
        """The tally that a plan's gradients carry; an empty one if they disagree or were written to."""
        carried = (_carried(view.slot.sharded.grad) for view in plan.views)
        tally = next((each for each in carried if each is not None and each._token == plan.token), None)
        return tally if tally is not None and tally._still_holds(plan) else Tally(plan.token)

    def _still_holds(self, plan: ExactReducePlan) -> bool:
        # A gradient that a later sum replaced may be one of its subtrees, and users may have kept and changed it.
        # (Changes by in-place operations of the DTensor itself are not noticed.)
        if self._subtree_versions != [subtree._version for subtree in self._subtrees()]:
            return False
        for number, version in self._versions.items():
            gradient = plan.views[number].slot.sharded.grad
            if gradient is None or _carried(gradient) is not self or gradient_version(gradient) != version:
                return False
        return True

    def _subtrees(self) -> Iterable[torch.Tensor]:
        return (subtree for _, subtrees in self._trees for subtree in subtrees)

    @property
    def numbers(self) -> list[int]:
        """The views whose gradients have been assigned."""
        return list(self._versions)

    def with_row(self, reduce_number: int, row: torch.Tensor) -> Tally:
        """The tally with one more row, which is the ``reduce_number``-th reduce of a backward."""
        trees = list(self._trees)
        # An optimizer that steps in a hook may have dropped gradients between two reduces of one backward.
        reduce_number = min(reduce_number, len(trees))
        if reduce_number == len(trees):
            trees.append((0, ()))
        count, subtrees = trees[reduce_number]
        trees[reduce_number] = (count + 1, with_term(subtrees, count, row, torch.add))
        return Tally(self._token, tuple(trees), dict(self._bases))

    def row(self) -> torch.Tensor:
        """The sum, which may share memory with a subtree."""
        rows = [total(subtrees, torch.add) for _, subtrees in self._trees]
        return total(rows[::-1], torch.add)

    def base(self, number: int, existing: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of a view from before this sum began; ``existing`` is that of a view that joins the sum now."""
        if existing is not None:
            self._bases[number] = local_part(existing)
        return self._bases.get(number)

    def attach_to(self, gradients: dict[int, torch.Tensor]) -> None:
        for gradient in gradients.values():
            gradient.__dict__[TALLY_ATTRIBUTE] = self
        self._versions = {number: gradient_version(gradient) for number, gradient in gradients.items()}
        self._subtree_versions = [subtree._version for subtree in self._subtrees()]


def _carried(gradient: torch.Tensor | None) -> Tally | None:
    tally = None if gradient is None else gradient.__dict__.get(TALLY_ATTRIBUTE)
    return tally if isinstance(tally, Tally) else None


class ExactReduceInFlight(ReduceInFlight):
    """One exact reduce in flight. The own row becomes a subtree of the sum."""

    plan: ExactReducePlan

    def __init__(
        self,
        plan: ExactReducePlan,
        settings: ReduceSettings,
        streams: SideStreams,
        codes: tuple[int, int],
        reduce_number: int,
    ) -> None:
        super().__init__(plan, settings, streams, codes)
        self._reduce_number = reduce_number

    def _divide(self, own_row: torch.Tensor) -> None:
        if self._division.after != 1.0:
            own_row.div_(self._division.after)
        self.is_done = True

    def _assign_gradients(self) -> list[Slot]:
        plan, stream, row = self.plan, self._streams.reduce, self._own_row
        assert row is not None
        self._own_row = None
        received = {view.slot for view in self._received}
        hooked: list[Slot] = []
        assigned: dict[int, torch.Tensor] = {}
        with stream:
            before = Tally.found(plan)
            known = set(before.numbers)
            tally = before.with_row(self._reduce_number, row)
            segments = [tally.row()] if plan.needs_no_cast else self._cast_segments(tally.row())
            for number, view in enumerate(plan.views):
                if view.slot in received and view.slot.sharded._backward_hooks:
                    raise StateError(
                        f"parameter '{view.slot.name}' has a gradient hook, which may change the terms of an exact sum",
                        where=f"backward, rank {plan.mesh.rank}",
                        fix="use register_post_accumulate_grad_hook, which sees the sum; or leave out exact=True",
                    )
                if (view.slot in received or number in known) and not view.is_none:
                    base = tally.base(number, None if number in known else view.slot.sharded.grad)
                    gradient = self._with_base(segments, view, base)
                    view.slot.sharded.grad = assigned[number] = view.slot.gradient(gradient)
                if view.slot in received and post_accumulate_hooks(view.slot.sharded):
                    hooked.append(view.slot)
            tally.attach_to(assigned)
        return hooked

    def _with_base(
        self, segments: list[torch.Tensor], view: GradientView, base: torch.Tensor | None
    ) -> torch.Tensor:
        gradient = segments[view.segment].as_strided(view.shape, view.strides, view.start)
        if base is None:
            return gradient
        if self.plan.home.is_offloaded:
            # order: the transfer before the sum, because the host adds
            self._streams.host_waits_for(self._streams.reduce.record_event())
        return torch.add(base, gradient)


# --- over ranks ------------------------------------------------------------------------------------------------------


class ExactCollectives(WrappedCollectives):
    """A group whose reduces are tree sums over its ranks, in the dtype of their output."""

    set_by = "exact=True"

    def __init__(self, inner: GroupCollectives) -> None:
        super().__init__(inner)
        self.averages = False

    def lend(self, num_bytes: int) -> torch.Tensor | None:
        return self.inner.lend(num_bytes)

    def issue_reduce_scatter(
        self, output: torch.Tensor, rows: torch.Tensor, average: bool, code: int
    ) -> Work:
        if self.world == 1:
            output.copy_(rows)
            return DONE
        arrived = torch.empty_like(rows)
        return _ReduceScatterWork(
            self.inner.issue_exchange(arrived, rows, code), arrived.view(self.world, -1), output
        )

    def issue_all_reduce(self, tensor: torch.Tensor, average: bool, code: int) -> Work:
        if self.world == 1:
            return DONE
        # Each rank sums a shard of the tensor: fewer bytes are sent than if every rank received all terms.
        shard_numel = ceil_div(tensor.numel(), self.world)
        shards = tensor
        if shard_numel * self.world != tensor.numel():
            shards = tensor.new_zeros(shard_numel * self.world)
            shards[: tensor.numel()] = tensor
        arrived = torch.empty_like(shards)
        work = self.inner.issue_exchange(arrived, shards, code)
        return _AllReduceWork(self.inner, work, code, arrived.view(self.world, -1), shards, tensor)


class _ReduceScatterWork:
    """An exchange of the own row's terms, ``carried_by``, whose ``wait`` sums them."""

    def __init__(self, carried_by: Work, arrived: torch.Tensor, output: torch.Tensor) -> None:
        self.carried_by = carried_by
        self._arrived = arrived
        self._output = output

    def wait(self) -> None:
        self.carried_by.wait()
        self._output.copy_(_sum(self._arrived, self._output.dtype))


class _AllReduceWork:
    """The same for a shard of the tensor; ``wait`` then gathers the sums of all ranks."""

    def __init__(
        self,
        calls: GroupCollectives,
        carried_by: Work,
        code: int,
        arrived: torch.Tensor,
        shards: torch.Tensor,
        tensor: torch.Tensor,
    ) -> None:
        self.carried_by = carried_by
        self._calls = calls
        self._code = code
        self._arrived = arrived
        self._shards = shards
        self._tensor = tensor

    def wait(self) -> None:
        self.carried_by.wait()
        own = _sum(self._arrived, self._tensor.dtype)
        self.carried_by = self._calls.issue_all_gather(self._shards, own, self._code)
        self.carried_by.wait()
        if self._shards is not self._tensor:
            self._tensor.copy_(self._shards[: self._tensor.numel()])


def _sum(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tree sum of rows, which are overwritten where they have ``dtype`` already."""

    def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left.to(dtype).add_(right)

    return tree_sum(rows.unbind(), add)
