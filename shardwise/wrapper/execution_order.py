"""The order in which a wrapped model's units run: do ranks agree on it, and who comes next?

``OrderCheck`` asks at ``dist.DebugLevel.DETAIL`` whether ranks run units in the same order.

In the first training forward ranks compare notes before every unit and when forward ends, so that no rank can wait for
another that has gone a different way: all of them raise. From then on each rank compares itself with that first order,
without talking to others; where it departs from it, it warns once and goes on.
"""

from __future__ import annotations

import warnings
from itertools import pairwise

import torch
import torch.distributed as dist

from shardwise.comm.collectives.agreement import gather_bytes
from shardwise.comm.mesh import DataMesh
from shardwise.engine.unit.collective_names import UnnamedCollectives
from shardwise.engine.unit.unit import Unit
from shardwise.errors import RankDisagreement
from shardwise.torch_internals import debugs_in_detail, unseen_by_modes, untraced

# Stands for the end of a forward.
_END = (1 << 63) - 1


class OrderCheck:
    """The order of one model's units on this rank."""

    def __init__(self, top: Unit) -> None:
        self._top = top
        self._names: dict[int, str] = {_END: "the end of forward"}
        self._first: list[int] | None = None
        self._present: list[int] = []
        self._is_checking = False
        self._has_warned = False

    def begin(self) -> None:
        """A forward begins; those without grad or in eval mode are none of a training loop's iterations."""
        self._is_checking = torch.is_grad_enabled() and self._top.modules[0].training
        self._present = []

    @untraced
    def passes(self, unit: Unit) -> None:
        """A unit is about to be gathered for its forward."""
        if self._is_checking and unit.root is self._top.root and not unit.settings.is_joint:
            self._names[unit.number] = unit.name or "(root)"
            self._note(unit.number)

    @untraced
    def end(self) -> None:
        if self._is_checking:
            self._note(_END)
            self._is_checking = False
            if self._first is None:
                self._first = self._present

    def _note(self, number: int) -> None:
        position = len(self._present)
        self._present.append(number)
        if self._first is None:
            self._compare_ranks(number)
        elif not self._has_warned and (position >= len(self._first) or self._first[position] != number):
            self._warn(position, number)

    def _compare_ranks(self, number: int) -> None:
        mesh: DataMesh = self._top.mesh
        for calls in (mesh.shard, mesh.replicate):
            if calls is None or calls.world == 1:
                continue
            with unseen_by_modes(), torch.inference_mode(False), torch.no_grad():
                seen = gather_bytes(number.to_bytes(8, "little"), calls, mesh.device)
            numbers = [int.from_bytes(each, "little") for each in seen]
            if len(set(numbers)) == 1:
                continue
            by_unit: dict[int, list[int]] = {}
            for rank, each in zip(dist.get_process_group_ranks(calls.group), numbers, strict=True):
                by_unit.setdefault(each, []).append(rank)
            units = "; ".join(f"ranks {ranks} are at {self._name(each)}" for each, ranks in by_unit.items())
            raise RankDisagreement(
                f"Forward order differs across ranks: after {len(self._present) - 1} units, {units}",
                where=f"rank {dist.get_rank()}, first iteration",
                fix="run the same modules in the same order on every rank",
            )

    def _warn(self, position: int, number: int) -> None:
        assert self._first is not None
        self._has_warned = True
        before = self._name(self._first[position]) if position < len(self._first) else "nothing more"
        warnings.warn(
            f"Forward order differs from that of the first iteration on rank {dist.get_rank()}. Collectives are "
            f"unchecked and may give incorrect results or hang: at place {position} the first iteration had {before}, "
            f"this one has {self._name(number)}",
            stacklevel=5,
        )

    def _name(self, number: int) -> str:
        known = self._names.get(number)
        if known is None:
            known = next((unit.name for unit in self._top.root.units if unit.number == number), str(number))
        return known if number == _END else f"'{known}'"


class ForwardPrefetch:
    """Has each unit gather the one that ran after it in the last forward, before it computes."""

    def __init__(self, top: Unit) -> None:
        self._top = top
        self._order: list[Unit] = []
        self._settled: list[Unit] = []

    def begin(self) -> None:
        self._order = []

    @untraced
    def passes(self, unit: Unit) -> None:
        if unit.root is self._top.root and unit.slots and not unit.settings.is_joint:
            self._order.append(unit)

    @untraced
    def end(self) -> None:
        if self._order == self._settled:
            return
        self._settled = self._order
        for unit in self._top.root.units:
            unit.configure(forward_prefetch=())
        for unit, following in pairwise(self._order):
            unit.configure(forward_prefetch=(following,))


def watchers_of(top: Unit, prefetches: bool) -> tuple[OrderCheck | ForwardPrefetch, ...]:
    """What watches the order of a model's units: by debug level and by its options."""
    top.root.adopt_units()
    watchers: list[OrderCheck | ForwardPrefetch] = []
    if debugs_in_detail():
        watchers.append(OrderCheck(top))
        for unit in top.root.units:
            # A rank that departs from the first order is to be warned, not stopped by the names of its collectives.
            unit.name_collectives(UnnamedCollectives())
    if prefetches:
        watchers.append(ForwardPrefetch(top))
    return tuple(watchers)
