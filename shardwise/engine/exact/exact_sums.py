"""Exact sums of gradients: in one order, whatever the number of ranks and the way they share a model.

    micro-batches       0   1   2   3   4   5   6   7
    on 2 ranks, rank    0   1   0   1   0   1   0   1
    after a backward    └─┬─┘   └─┬─┘   └─┬─┘   └─┬─┘     tree over ranks (``engine/exact/exact_collectives``)
    from one to next      └───┬───┘       └───┬───┘       blocks that gradients carry along (``Tally``)
                              └───────┬───────┘

Each backward is a micro-batch of every rank. Its gradients travel in the dtype they were computed in and are added in
float32, first over ranks, then over replicas, then over backwards, always in the order of ``plan/tree``.

A gradient is at all times the sum so far. What it takes to add the next micro-batch in its place, the blocks that the
sum is made of, is carried by the gradients themselves and goes with them: there is nothing to begin or to end.
Gradients that somebody wrote to stay as they are, and what comes is summed anew and added to them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from shardwise.comm.mesh import DataMesh
from shardwise.comm.streams import SideStreams
from shardwise.engine.exact.exact_collectives import ExactCollectives
from shardwise.engine.reduce.gradient_buffer import GradientView, gradient_version
from shardwise.engine.reduce.reduce_in_flight import ReduceInFlight
from shardwise.engine.reduce.reduce_plan import ReducePlan, ReduceSettings, Summation, computed_dtype
from shardwise.engine.unit.binding import Slot
from shardwise.engine.unit.dtensor_form import ShardedForm
from shardwise.errors import ConfigError, StateError
from shardwise.plan.tree import is_power_of_two, total, with_term
from shardwise.policies import MixedPrecisionPolicy
from shardwise.torch_internals import local_of, post_accumulate_hooks

if TYPE_CHECKING:
    from shardwise.engine.unit.unit import Unit

TALLY_ATTRIBUTE = "_shardwise_tally"


class ExactSummation(Summation):
    """How a unit's gradients are summed up where ``exact=True`` was said."""

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
        shard_device: torch.device,
        pins: bool,
    ) -> ReducePlan:
        sent = computed_dtype(slots)
        wanted = precision.reduce_dtype
        if wanted is not None and wanted.itemsize < sent.itemsize:
            sent = wanted
        return ExactReducePlan(
            slots, form, mesh, sent, shard_device, pins, torch.promote_types(sent, torch.float32)
        )


EXACT_SUMMATION = ExactSummation()


def check_mesh(mesh: DataMesh, where: str) -> None:
    """Raises unless the ranks of ``mesh`` hold aligned blocks of micro-batches."""
    for axis, calls in (("shards over", mesh.shard), ("replicates over", mesh.replicate)):
        if calls is not None and not is_power_of_two(calls.world):
            raise ConfigError(
                f"exact sums are made in pairs, and the mesh {axis} {calls.world} ranks",
                where=where,
                fix="use 1, 2, 4, 8, ... ranks, or leave exact out",
            )


def check_model(units: Iterable[Unit], where: str) -> None:
    """Raises if some units of a model are summed exactly and others are not: the result would be neither."""
    training = [unit for unit in units if unit.gradients.num_trainable]
    exact = [unit for unit in training if unit.gradients.sums.is_exact]
    others = [unit for unit in training if not unit.gradients.sums.is_exact]
    if exact and others:
        raise ConfigError(
            f"unit '{exact[0].name}' sums its gradients exactly and unit '{others[0].name}' does not: the model would "
            "still depend on how it is sharded",
            where=where,
            fix="pass exact=True to every call that shards a part of the model, or to none",
        )


def check_not_exact(units: Iterable[Unit], setter: str, reason: str) -> None:
    """Raises if a setting would have gradients summed in another order than exact sums have."""
    for unit in units:
        if unit.gradients.sums.is_exact:
            raise ConfigError(
                f"unit '{unit.name}' sums its gradients exactly, and {setter} {reason}",
                where=f"{setter}, unit '{unit.name}', rank {unit.rank}",
                fix=f"leave {setter} out, or shard the model without exact=True",
            )


class ExactReducePlan(ReducePlan):
    """The reduce of one set of trainable slots: sent as computed, summed in float32."""

    def __init__(
        self,
        slots: list[Slot],
        form: ShardedForm,
        mesh: DataMesh,
        sent_dtype: torch.dtype,
        shard_device: torch.device,
        pins: bool,
        sum_dtype: torch.dtype,
    ) -> None:
        super().__init__(slots, form, mesh, sent_dtype, shard_device, pins, sum_dtype)
        # Gradients have memory of their own: each is a block that a later sum may need.
        self._lends = False
        # What reduces of one backward are told apart by.
        self.reduce_number = 0
        # Which gradients are this plan's, or that of one made anew in its place.
        self.token = (id(form), self.row_numel, sum_dtype, tuple(slot.name for slot in slots))

    def begin(self, settings: ReduceSettings, streams: SideStreams, codes: tuple[int, int]) -> ReduceInFlight:
        self.reduce_number = self.reduce_number + 1 if self.is_again else 0
        return ExactReduceInFlight(self, settings, streams, codes, self.reduce_number)


class Tally:
    """The sum that a unit's gradients stand for, and the blocks it is made of; a new one for every sum.

    ``trees`` has a tree for each reduce of a backward, because a unit may be reduced in several parts: (how many
    backwards, their blocks). ``bases`` are gradients that were there before the first, by number of the part.
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
        self._block_versions: list[int] = []

    @staticmethod
    def found(plan: ExactReducePlan) -> Tally:
        """The one that the gradients of a plan carry; an empty one if they do not agree or were written to."""
        carried = (_carried(part.slot.sharded.grad) for part in plan.parts)
        tally = next((each for each in carried if each is not None and each._token == plan.token), None)
        return tally if tally is not None and tally._still_holds(plan) else Tally(plan.token)

    def _still_holds(self, plan: ExactReducePlan) -> bool:
        # A gradient that was replaced by a later sum may be one of its blocks, and somebody may have kept it. (What a
        # DTensor's own operations write to such a one is not seen.)
        if self._block_versions != [block._version for block in self._blocks()]:
            return False
        for number, version in self._versions.items():
            gradient = plan.parts[number].slot.sharded.grad
            if gradient is None or _carried(gradient) is not self or gradient_version(gradient) != version:
                return False
        return True

    def _blocks(self) -> Iterable[torch.Tensor]:
        return (block for _, blocks in self._trees for block in blocks)

    @property
    def numbers(self) -> list[int]:
        """The parts that have been given a gradient."""
        return list(self._versions)

    def with_row(self, reduce_number: int, row: torch.Tensor) -> Tally:
        """The sum with one more row, of that reduce of a backward."""
        trees = list(self._trees)
        # An optimizer that steps in a hook may have dropped gradients between two reduces of a backward.
        reduce_number = min(reduce_number, len(trees))
        if reduce_number == len(trees):
            trees.append((0, ()))
        count, blocks = trees[reduce_number]
        trees[reduce_number] = (count + 1, with_term(blocks, count, row, torch.add))
        return Tally(self._token, tuple(trees), dict(self._bases))

    def row(self) -> torch.Tensor:
        """The sum; possibly a block itself."""
        rows = [total(blocks, torch.add) for _, blocks in self._trees]
        return total(rows[::-1], torch.add)

    def base(self, number: int, existing: torch.Tensor | None) -> torch.Tensor | None:
        """What a part's gradient was before this sum began; ``existing`` is that of a part which joins it now."""
        if existing is not None:
            self._bases[number] = local_of(existing) if isinstance(existing, DTensor) else existing
        return self._bases.get(number)

    def go_with(self, gradients: dict[int, torch.Tensor]) -> None:
        """Lets the gradients carry it."""
        for gradient in gradients.values():
            gradient.__dict__[TALLY_ATTRIBUTE] = self
        self._versions = {number: gradient_version(gradient) for number, gradient in gradients.items()}
        self._block_versions = [block._version for block in self._blocks()]

    def __deepcopy__(self, memo: dict[int, object]) -> Tally:
        return Tally()

    def __reduce__(self) -> tuple[type[OrderedDict[str, object]], tuple[()]]:
        # What is saved must load without shardwise, and with torch.load(weights_only=True).
        return (OrderedDict, ())


def _carried(gradient: torch.Tensor | None) -> Tally | None:
    tally = None if gradient is None else gradient.__dict__.get(TALLY_ATTRIBUTE)
    return tally if isinstance(tally, Tally) else None


class ExactReduceInFlight(ReduceInFlight):
    """One exact reduce under way. The own row becomes a block of the sum that gradients are."""

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

    def _make_own_row(self) -> torch.Tensor:
        # From the lane's memory: blocks come and go there.
        with self._streams.reduce:
            return super()._make_own_row()

    def _divide(self, own_row: torch.Tensor) -> None:
        if self._division.after != 1.0:
            own_row.div_(self._division.after)
        self.is_done = True

    def _give_out(self) -> list[Slot]:
        plan, stream, row = self.plan, self._streams.reduce, self._own_row
        assert row is not None
        self._own_row = None
        received = {part.slot for part in self._received}
        hooked: list[Slot] = []
        given: dict[int, torch.Tensor] = {}
        with stream:
            before = Tally.found(plan)
            known = set(before.numbers)
            tally = before.with_row(self._reduce_number, row)
            runs = [tally.row()] if plan.is_one_run else self._cast_runs(tally.row())
            for number, part in enumerate(plan.parts):
                if part.slot in received and part.slot.sharded._backward_hooks:
                    raise StateError(
                        f"parameter '{part.slot.name}' has a gradient hook, which may change each micro-batch's part "
                        "of an exact sum",
                        where=f"backward, rank {plan.mesh.rank}",
                        fix="use register_post_accumulate_grad_hook, which sees the sum; or leave exact=True out",
                    )
                if (part.slot in received or number in known) and not part.is_none:
                    base = tally.base(number, None if number in known else part.slot.sharded.grad)
                    gradient = self._part_of(runs, part, base)
                    part.slot.sharded.grad = given[number] = part.slot.gradient(gradient)
                if part.slot in received and post_accumulate_hooks(part.slot.sharded):
                    hooked.append(part.slot)
            tally.go_with(given)
        return hooked

    def _part_of(
        self, runs: list[torch.Tensor], part: GradientView, base: torch.Tensor | None
    ) -> torch.Tensor:
        gradient = runs[part.run].as_strided(part.shape, part.strides, part.start)
        if base is None:
            return gradient
        if self.plan.is_offloaded:
            # order: the transfer before the sum, because the host adds
            self._streams.host_waits_for(self._streams.reduce.record_event())
        return torch.add(base, gradient)
