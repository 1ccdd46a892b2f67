"""Other answers to a question: the smallest change that fits, settings side by side, and a curve over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.forecast.plan import Plan, Question, answer
from shardwise.torch_internals import leaves_of, map_tree

__all__ = ["Change", "over_ranks", "smallest_change", "with_half_batch"]


@dataclass(frozen=True)
class Change:
    """A question with a change, and how to say it."""

    name: str
    question: Question


def _candidates(question: Question) -> Iterable[Change]:
    """Changes that save memory, from those that cost least time to those that cost most."""
    settings = question.settings
    if settings.shard is not None:
        return
    frees: dict[str, Any] = {}
    if settings.reshard_after_forward is False:
        frees = {"reshard_after_forward": True}
        yield Change("reshard_after_forward=True", question.changed(**frees))
    if settings.replicas > 1:
        yield Change("replicas=1", question.changed(replicas=1, **frees))
    smaller = list(_smaller_batches(question))
    if smaller:
        name, halved = smaller[0]
        yield Change(name, halved.changed(**frees))
    if not settings.recompute:
        frees["recompute"] = True
        yield Change("recompute=True", question.changed(**frees))
    said = "recompute=True, " if "recompute" in frees else ""
    for name, changed in smaller:
        yield Change(said + name, changed.changed(**frees))
    for factor in (2, 4, 8):
        ranks, nodes = question.ranks * factor, question.nodes * factor
        yield Change(f"{said}{ranks} ranks", question.changed(ranks=ranks, nodes=nodes, **frees))
    if not settings.offload:
        for name, changed in [("offload=True", question), *smaller[-1:]]:
            named = name if changed is question else f"offload=True, {name}"
            yield Change(said + named, changed.changed(offload=True, **frees))


def _smaller_batches(question: Question) -> Iterable[tuple[str, Question]]:
    """Micro-batches of a half, a quarter, ..., and as many more of them."""
    count = question.settings.micro_batches
    smaller = with_half_batch(question)
    while smaller is not None:
        yield f"micro_batches={smaller.settings.micro_batches} instead of {count}, each smaller", smaller
        smaller = with_half_batch(smaller)


def smallest_change(plan: Plan) -> tuple[str, Plan] | None:
    """Returns the first change with which the step fits, and its plan; None if none of them helps."""
    for change in _candidates(plan.question):
        changed = answer(change.question)
        if changed.fits:
            return change.name, changed
    return None


def with_half_batch(question: Question) -> Question | None:
    """Returns the question with micro-batches of half the size and twice as many; None if they cannot be halved."""
    args, kwargs = question.job.inputs()
    sizes = {
        leaf.shape[0] for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()
    }
    if len(sizes) != 1 or min(sizes) < 2 or min(sizes) % 2:
        return None

    def halved() -> tuple[tuple[Any, ...], dict[str, Any]]:
        def cut(leaf: torch.Tensor) -> torch.Tensor:
            return leaf[: leaf.shape[0] // 2] if leaf.dim() else leaf

        found: tuple[tuple[Any, ...], dict[str, Any]] = map_tree(cut, question.job.inputs())
        return found

    job = replace(question.job, inputs=halved)
    return question.changed(job=job, micro_batches=2 * question.settings.micro_batches)


def over_ranks(question: Question, first: int, last: int) -> list[tuple[str, Plan]]:
    """Returns plans for ``first``, twice that, ... up to ``last`` ranks, with as many ranks on a node as asked."""
    on_node = max(1, question.ranks // question.nodes)
    found = []
    ranks = first
    while ranks <= last:
        nodes = max(1, ranks // on_node)
        found.append((f"ranks={ranks}", answer(question.changed(ranks=ranks, nodes=nodes))))
        ranks *= 2
    return found
