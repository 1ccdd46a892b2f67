"""Ranks whose batches run out at different times: those that have none left step along as shadows.

    for batch, weight in uneven(model, batches):
        loss = weight * model(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

A shadow runs its last batch again with a weight of zero: it takes part in every collective and adds nothing to any
gradient. Before each batch the ranks of the model tell each other whether they have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

from shardwise.comm.collectives.agreement import gather_bytes
from shardwise.comm.collectives.group import GroupCollectives
from shardwise.engine.unit.membership import units_of
from shardwise.errors import ConfigError
from shardwise.torch_internals import unseen_by_modes

Batch = TypeVar("Batch")


def uneven(
    model: nn.Module, batches: Iterable[Batch], *, average_over_present: bool = False
) -> Iterator[tuple[Batch, float]]:
    """Yields this rank's batches with a weight for their loss, as often as the rank that has the most.

    Args:
        model: a sharded model; its ranks are the ones that step together.
        batches: what this rank has; at least one.
        average_over_present: weigh losses so that gradients are averages over the ranks that had a batch. By default
            they are over all ranks, those without one counting as zero.
    """
    groups = _groups_of(model)
    source = iter(batches)
    last: list[Batch] = []
    while True:
        batch = next(source, _NOTHING)
        num_present, num_ranks, all_can = _count(batch is not _NOTHING, bool(last), groups)
        if num_present == 0:
            return
        if not all_can:
            raise ConfigError(
                "a rank has no batch at all, so there is none that it could step along with",
                where="uneven(model, batches)",
                fix="give every rank at least one batch, of any kind",
            )
        if batch is _NOTHING:
            yield last[0], 0.0
        else:
            last = [batch]  # type: ignore[list-item]
            yield last[0], num_ranks / num_present if average_over_present else 1.0


_NOTHING = object()


def _groups_of(model: nn.Module) -> list[GroupCollectives]:
    units = [unit for module in model.modules() for unit in units_of(module)]
    if not units:
        raise ConfigError(
            f"{type(model).__name__} is not sharded, so it has no ranks that step together",
            where="uneven(model, batches)",
            fix="shard the model first",
        )
    mesh = units[0].mesh
    return [calls for calls in (mesh.shard, mesh.replicate) if calls is not None and calls.world > 1]


def _count(has_batch: bool, has_last: bool, groups: list[GroupCollectives]) -> tuple[int, int, bool]:
    """How many ranks have a batch, of how many, and whether all have one or can step along."""
    counts = (int(has_batch), 1, int(has_batch or has_last))
    # Over each axis in turn: sums of sums.
    for calls in groups:
        own = b"".join(count.to_bytes(4, "little") for count in counts)
        with unseen_by_modes(), torch.inference_mode(False), torch.no_grad():
            gathered = gather_bytes(own, calls, calls.device)
        counts = tuple(  # type: ignore[assignment]
            sum(int.from_bytes(entry[start : start + 4], "little") for entry in gathered)
            for start in (0, 4, 8)
        )
    num_present, num_ranks, num_able = counts
    return num_present, num_ranks, num_able == num_ranks
