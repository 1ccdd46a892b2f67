"""``uneven``: training when ranks have different numbers of batches.

    for batch, weight in uneven(model, batches):
        loss = weight * model(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

A rank without batches left repeats its last batch with a weight of zero: it takes part in every collective and adds
nothing to the gradients. Before each batch, ranks tell each other whether they have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

from shardwise.comm.collectives.agreement import gather_bytes
from shardwise.comm.collectives.group import GroupCollectives
from shardwise.engine.unit.membership import units_in
from shardwise.errors import ConfigError
from shardwise.torch_internals import unseen_by_modes

Batch = TypeVar("Batch")


def uneven(
    model: nn.Module, batches: Iterable[Batch], *, average_over_present: bool = False
) -> Iterator[tuple[Batch, float]]:
    """Yields this rank's batches, each with a weight for its loss; as many as the rank with the most batches has.

    Args:
        model: a sharded model; its ranks step together.
        batches: this rank's batches, at least one.
        average_over_present: choose weights so that gradients are averaged over the ranks that have a batch. By default
            they are averaged over all ranks, with zeros for ranks without a batch.
    """
    groups = _groups_of(model)
    source = iter(batches)
    last: list[Batch] = []
    while True:
        batch = next(source, _END)
        num_present, num_ranks, all_can_step = _count(batch is not _END, bool(last), groups)
        if num_present == 0:
            return
        if not all_can_step:
            raise ConfigError(
                "a rank has no batch at all, so it has none to repeat while the others step",
                where="uneven(model, batches)",
                fix="give every rank at least one batch; its values do not matter",
            )
        if batch is _END:
            yield last[0], 0.0
        else:
            last = [batch]  # type: ignore[list-item]
            yield last[0], num_ranks / num_present if average_over_present else 1.0


# Returned by next() when a rank has no batches left.
_END = object()


def _groups_of(model: nn.Module) -> list[GroupCollectives]:
    units = units_in(model.modules())
    if not units:
        raise ConfigError(
            f"{type(model).__name__} is not sharded",
            where="uneven(model, batches)",
            fix="shard the model first",
        )
    mesh = units[0].mesh
    return [calls for calls in (mesh.shard, mesh.replicate) if calls is not None and calls.world > 1]


def _count(has_batch: bool, has_last: bool, groups: list[GroupCollectives]) -> tuple[int, int, bool]:
    """The number of ranks that have a batch, the number of ranks, and whether each has one or can repeat one."""
    counts = (int(has_batch), 1, int(has_batch or has_last))
    # Summed over one axis after the other.
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
