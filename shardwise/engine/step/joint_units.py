"""Joint units: all ranks gather and reduce them, whichever of them run them.

Usually a unit is gathered when a rank runs it and reduced when its backward passes: ranks that take different branches
would diverge. *Joint* units are gathered and reduced at points that every rank reaches, in the order of the model:

    forward of the root begins      all of them are gathered and held
    backward begins                 those freed since (by the end of another backward) are gathered again
    backward ends                   all of them are reduced, with zeros for what a rank did not use, and released

In between a rank may run any of them, in any order and as often as it likes. The price is memory: full parameters from
the first of these points to the last, and full gradients until the last.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from shardwise import trace
from shardwise.errors import StateError
from shardwise.planning.lifecycle import KEEP, UNSHARDED

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
        # One ahead, so that at most two of them have rows in memory beside the full parameters.
        for unit, following in zip_longest(absent, absent[1:]):
            unit.issue_gather(phase)
            if following is not None:
                following.issue_gather(phase)
            unit.wait_gather()
            unit.gathered.keep()
        if not self._is_holding:
            self._is_holding = True
            for unit in self._units:
                unit.gathered.hold()

    def end_forward(self) -> None:
        """Releases the units after a forward without grad: no backward will follow."""
        self._release(trace.IN_FORWARD, [unit.settings.after_forward is not KEEP for unit in self._units])

    def end_backward(self) -> None:
        self._release(trace.IN_POST_BACKWARD, [unit.settings.frees_after_backward for unit in self._units])

    def _release(self, phase: str, frees: list[bool]) -> None:
        if not self._is_holding:
            return
        self._is_holding = False
        for unit, is_freed in zip(self._units, frees, strict=True):
            if unit.gathered.release():
                if is_freed:
                    unit.reshard(phase)
                else:
                    unit.gathered.keep(is_hidden=True)

    def forget(self) -> None:
        """Forgets that units are held: a step raised, and each was released."""
        self._is_holding = False


def set_joint(units: Iterable[Unit], is_joint: bool) -> None:
    """Makes units joint, with the owners of tied parameters, or undoes it; between steps."""
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
