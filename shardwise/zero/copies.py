"""Copies of a ``ZeroRedundancyOptimizer``, by ``copy`` or ``pickle``: made on any one rank, without communication.

A copy holds parameters, options and the state of this rank's pieces. It becomes an optimizer of its own, with all
ranks' state, when it is first used; then every rank must use its copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from shardwise.errors import StateError
from shardwise.zero.argument_checks import group_or_world
from shardwise.zero.consolidated_state import PieceState

__all__ = ["CopiedOptimizer", "GroupReference"]


class GroupReference:
    """A process group that copies share; pickled, only whether it was the default group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group
        self._is_world = group is group_or_world(None)

    def __deepcopy__(self, memo: dict[int, object]) -> GroupReference:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"_group": None, "_is_world": self._is_world}

    def group(self) -> dist.ProcessGroup:
        if self._group is None and not self._is_world:
            raise StateError(
                "a pickled ZeroRedundancyOptimizer does not know its process group, which was not the default one",
                where="the first use of a ZeroRedundancyOptimizer that was unpickled",
                fix="build a new one for the group and load state_dict() or sharded_state_dict() into it",
            )
        return group_or_world(self._group)


@dataclass(frozen=True)
class CopiedOptimizer:
    """What a copy is built from, beside its parameter groups."""

    arguments: dict[str, Any]
    group: GroupReference
    own_state: tuple[list[PieceState], dict[str, Any]]
