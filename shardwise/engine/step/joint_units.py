"""Units that all ranks of a model gather and reduce, whichever of them run them.

A unit is gathered where a rank runs it and reduced where its backward passes: ranks that take different branches would
part there. *Joint* units are gathered and reduced at places that every rank comes to, in the order of the model:

    forward of the root begins      all of them are gathered, and held
    backward begins                 those that are not there any more (another backward has ended) once more
    end of backward                 all of them are reduced, with zeros for what a rank did not use; then let go

In between a rank runs those it likes, in any order, as often as it likes. The price is memory: their full parameters
from the first of these places to the last, and their full gradients until the last.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from shardwise import trace
from shardwise.errors import StateError
from shardwise.plan.lifecycle import UNSHARDED
from shardwise.plan.schedule import KEEP

if TYPE_CHECKING:
    from shardwise.engine.unit.unit import Unit


class JointUnits:
    """The joint units of one root."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._references = [weakref.ref(unit) for unit in units]
        self._is_holding = False

    @property
    def _units(self) -> list[Unit]:
        return [unit for reference in self._references if (unit := reference()) is not None]

    def begin_forward(self) -> None:
        for unit in self._units:
            if unit.gathered.is_stale():
                unit.reshard(trace.IN_FORWARD)
        self._gather(trace.IN_FORWARD)

    def begin_backward(self) -> None:
        self._gather(trace.IN_PRE_BACKWARD)

    def _gather(self, phase: str) -> None:
        absent = [unit for unit in self._units if unit.state is not UNSHARDED]
        # One ahead, so that no more than two of them have their rows in memory beside the full parameters.
        for unit, following in zip_longest(absent, absent[1:]):
            unit.issue_gather(phase)
            if following is not None:
                following.issue_gather(phase)
            unit.wait_gather()
            unit.gathered.keep()
        if not self._is_holding:
            self._is_holding = True
            for unit in self._units:
                unit.hold()

    def end_forward(self) -> None:
        """Without grad there is no backward to hold them for."""
        self._let_go(trace.IN_FORWARD, [unit.settings.after_forward is not KEEP for unit in self._units])

    def end_backward(self) -> None:
        self._let_go(trace.IN_POST_BACKWARD, [unit.settings.frees_after_backward for unit in self._units])

    def _let_go(self, phase: str, frees: list[bool]) -> None:
        if not self._is_holding:
            return
        self._is_holding = False
        for unit, is_freed in zip(self._units, frees, strict=True):
            if unit.release():
                if is_freed:
                    unit.reshard(phase)
                else:
                    unit.gathered.keep(is_hidden=True)

    def forget(self) -> None:
        """A step broke off, and its units were let go one by one."""
        self._is_holding = False


def set_joint(units: Iterable[Unit], is_joint: bool) -> None:
    """Makes units joint, with those whose parameters they show, or what they were; between steps."""
    units = list(dict.fromkeys(shown for unit in units for shown in (unit, *unit.needs)))
    for unit in units:
        if unit.root.is_busy:
            raise StateError(
                f"unit '{unit.name}' is in the middle of a step",
                where=f"set_safe_participation, rank {unit.rank}",
                fix="call it between steps, on all ranks alike",
            )
    for unit in units:
        unit.reshard(trace.IDLE)
        unit.configure(is_joint=is_joint)
        unit.gradients.settings.includes_unused = is_joint
    for root in dict.fromkeys(unit.root for unit in units):
        root.update_joint_units()
