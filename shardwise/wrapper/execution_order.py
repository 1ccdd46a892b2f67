"""Observers of the order in which a wrapped model's units run forward: ``OrderCheck`` and ``ForwardPrefetch``.

``OrderCheck`` runs at ``dist.DebugLevel.DETAIL``. In the first training forward, ranks compare their position before
every unit and at the end of forward; where they differ, all of them raise instead of waiting for each other. After
that, each rank compares its order with that of the first forward, without communication, and warns at the first
difference.

``ForwardPrefetch`` lets each unit gather the one that ran after it in the last forward.
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

# The number of the end of forward, beside the numbers of units.
_END = (1 << 63) - 1


class OrderCheck:
    """Checks the order of one model's units on this rank."""

    def __init__(self, top: Unit) -> None:
        self._top = top
        self._names: dict[int, str] = {_END: "the end of forward"}
        self._first_order: list[int] | None = None
        self._order: list[int] = []
        self._is_checking = False
        self._has_warned = False

    def begin_forward(self) -> None:
        """Starts a new order. Forwards without grad or in eval mode are not checked."""
        self._is_checking = torch.is_grad_enabled() and self._top.modules[0].training
        self._order = []

    @untraced
    def before_unit(self, unit: Unit) -> None:
        """Checks the position of a unit, before it is gathered for forward."""
        if self._is_checking and unit.root is self._top.root and not unit.settings.is_joint:
            self._names[unit.position.number] = unit.name or "(root)"
            self._append(unit.position.number)

    @untraced
    def end_forward(self) -> None:
        if self._is_checking:
            self._append(_END)
            self._is_checking = False
            if self._first_order is None:
                self._first_order = self._order

    def _append(self, number: int) -> None:
        position, first = len(self._order), self._first_order
        self._order.append(number)
        if first is None:
            self._compare_ranks(number)
        elif not self._has_warned and (position >= len(first) or first[position] != number):
            self._warn(first, position, number)

    def _compare_ranks(self, number: int) -> None:
        mesh: DataMesh = self._top.mesh
        for calls in (mesh.shard, mesh.replicate):
            if calls is None or calls.world == 1:
                continue
            with unseen_by_modes(), torch.inference_mode(False), torch.no_grad():
                gathered = gather_bytes(number.to_bytes(8, "little"), calls, mesh.device)
            numbers = [int.from_bytes(each, "little") for each in gathered]
            if len(set(numbers)) == 1:
                continue
            by_unit: dict[int, list[int]] = {}
            for rank, each in zip(dist.get_process_group_ranks(calls.group), numbers, strict=True):
                by_unit.setdefault(each, []).append(rank)
            units = "; ".join(f"ranks {ranks} are at {self._name(each)}" for each, ranks in by_unit.items())
            raise RankDisagreement(
                f"Forward order differs across ranks: after {len(self._order) - 1} units, {units}",
                where=f"rank {dist.get_rank()}, first iteration",
                fix="run the same modules in the same order on every rank",
            )

    def _warn(self, first: list[int], position: int, number: int) -> None:
        self._has_warned = True
        before = self._name(first[position]) if position < len(first) else "no more units"
        warnings.warn(
            f"Forward order differs from that of the first iteration on rank {dist.get_rank()}. Collectives are "
            f"unchecked and may give incorrect results or hang: at position {position} the first iteration had "
            f"{before}, this one has {self._name(number)}",
            stacklevel=5,
        )

    def _name(self, number: int) -> str:
        known = self._names.get(number)
        if known is None:
            known = next(
                (unit.name for unit in self._top.root.units if unit.position.number == number), str(number)
            )
        return known if number == _END else f"'{known}'"


class ForwardPrefetch:
    """Makes each unit gather, before its forward, the unit that ran after it in the last forward."""

    def __init__(self, top: Unit) -> None:
        self._top = top
        self._order: list[Unit] = []
        self._last_order: list[Unit] = []

    def begin_forward(self) -> None:
        self._order = []

    @untraced
    def before_unit(self, unit: Unit) -> None:
        if unit.root is self._top.root and unit.slots and not unit.settings.is_joint:
            self._order.append(unit)

    @untraced
    def end_forward(self) -> None:
        if self._order == self._last_order:
            return
        self._last_order = self._order
        for unit in self._top.root.units:
            unit.configure(forward_prefetch=())
        for unit, following in pairwise(self._order):
            unit.configure(forward_prefetch=(following,))


def order_observers(top: Unit, prefetches: bool) -> tuple[OrderCheck | ForwardPrefetch, ...]:
    """Makes the observers that the debug level and the option ``forward_prefetch`` ask for."""
    top.root.adopt_units()
    observers: list[OrderCheck | ForwardPrefetch] = []
    if debugs_in_detail():
        observers.append(OrderCheck(top))
        for unit in top.root.units:
            # A rank that leaves the first order gets a warning, not an error about its collective log.
            unit.name_collectives(UnnamedCollectives())
    if prefetches:
        observers.append(ForwardPrefetch(top))
    return tuple(observers)
