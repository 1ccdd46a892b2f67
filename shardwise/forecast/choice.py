"""Chooses settings for a job: the fastest step that fits into a budget of memory, found by predicting a few.

    chosen = shardwise.choose(make_model, inputs, ranks=64, nodes=8, budget_gb=70)
    print(chosen.text())                       # what was chosen, why, and what it was compared with
    chosen.shard(model, mesh)                  # as chosen

The search is the same on every rank: nothing in it is random, measured, or taken from this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.errors import ConfigError
from shardwise.forecast.plan import Plan, Question, answer, question_of
from shardwise.forecast.prices import Device
from shardwise.forecast.rehearsal import largest_block_bytes, sharded_as
from shardwise.forecast.report import comparison_text, gib

__all__ = ["Choice", "choose", "choose_for"]

# A change has to make a step this much faster to be worth another setting.
_WORTH = 0.99
# How many blocks may form a unit.
_GROUPS = (2, 4)
_PARTS = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Choice:
    """The settings that were chosen, and every plan that was compared, in order; ``best`` is one of them."""

    best: Plan
    compared: tuple[tuple[str, Plan], ...]
    budget_bytes: int

    @property
    def settings(self) -> dict[str, Any]:
        """What was chosen, as keywords of ``shardwise.plan``."""
        return self.best.question.settings.changed()

    def shard(self, model: nn.Module, mesh: Any) -> Any:
        """Shards a model as chosen, over a mesh of as many ranks, and returns it."""
        return sharded_as(model, self.best.question.settings, mesh)

    def text(self) -> str:
        chosen = {key: value for key, value in self.settings.items() if key not in ("wrap", "mp_policy")}
        name = ", ".join(f"{key}={value}" for key, value in chosen.items()) or "the defaults"
        memory = self.best.memory
        spare = self.budget_bytes - memory.reserved
        faster = [
            (other, plan)
            for other, plan in self.compared
            if plan.seconds < self.best.seconds and plan.memory.reserved > self.budget_bytes
        ]
        why = f"the fastest of {len(self.compared)} that fits into {gib(self.budget_bytes)} GiB"
        lines = [f"chosen: {name}, {why}, with {gib(spare)} to spare"]
        lines += [
            f"  {other} is faster and needs {gib(plan.memory.reserved - self.budget_bytes)} GiB more"
            for other, plan in faster[:1]
        ]
        return "\n".join([*lines, "", comparison_text(self.compared)])


def choose(
    model: Callable[[], nn.Module] | nn.Module,
    inputs: Any,
    *,
    ranks: int,
    nodes: int = 1,
    device: str | Device = "h200",
    budget_gb: float | None = None,
    **options: Any,
) -> Choice:
    """Chooses how to shard: what to keep after forward, what to recompute, how to group blocks, replicas, and offload.

    Args:
        model: as for ``shardwise.plan``, and so are the other arguments; settings given there stay as they are.
        inputs: one rank's inputs of a micro-batch.
        ranks: devices that train together.
        nodes: the machines that they are on.
        device: the name of a device, or a file of prices.
        budget_gb: GiB that torch's allocator may reserve. Default: what the device has beside CUDA and NCCL.
        options: those of ``shardwise.plan``.

    Raises:
        ConfigError: nothing that was tried fits into the budget.
    """
    question = question_of(model, inputs, ranks=ranks, nodes=nodes, device=device, **options)
    budget = None if budget_gb is None else int(budget_gb * 2**30)
    return choose_for(question, budget, recomputes_parts=True)


def choose_for(question: Question, budget_bytes: int | None = None, recomputes_parts: bool = False) -> Choice:
    """As ``choose``; ``recomputes_parts``: activations of some blocks may be kept, and of others recomputed."""
    device = question.device
    budget = device.memory_bytes - device.context_bytes if budget_bytes is None else budget_bytes
    compared: list[tuple[str, Plan]] = []

    def tried(name: str, changed: Question) -> Plan:
        plan = answer(changed)
        compared.append((name, plan))
        return plan

    fitting = [
        plan for name, changed in _first(question) if (plan := tried(name, changed)).memory.reserved <= budget
    ]
    if not fitting:
        fitting = [
            plan
            for name, changed in _last_resorts(question)
            if (plan := tried(name, changed)).memory.reserved <= budget
        ][:1]
    if not fitting:
        least = min(plan.memory.reserved for _, plan in compared)
        raise ConfigError(
            f"none of {len(compared)} settings fits into {gib(budget)} GiB: the least is {gib(least)}",
            where=f"the choice of settings for {question.ranks} ranks",
            fix="use more ranks, smaller micro-batches, or a larger budget",
        )
    best = min(fitting, key=lambda plan: plan.seconds)
    if recomputes_parts and best.question.settings.recompute == 1 and not question.settings.recompute:
        # Only as many blocks as need to be.
        for part in _PARTS:
            parts = [tried(name, changed) for name, changed in _with_part(question, part)]
            if partly := [plan for plan in parts if plan.memory.reserved <= budget]:
                best = min([best, *partly], key=lambda plan: plan.seconds)
                break
    for name, changed in _refinements(best.question):
        plan = tried(name, changed)
        if plan.memory.reserved <= budget and plan.seconds < _WORTH * best.seconds:
            best = plan
    return Choice(best, tuple(compared), budget)


def _first(question: Question) -> Iterator[tuple[str, Question]]:
    given = question.settings.recompute
    for part in (False, True) if not given else (given,):
        yield from _with_part(question, part)


def _with_part(question: Question, part: float) -> Iterator[tuple[str, Question]]:
    """That part of the blocks recomputed, kept after forward or not."""
    keeps = (True, False) if question.settings.reshard_after_forward is None else (None,)
    for frees in keeps:
        changes: dict[str, Any] = {"recompute": part}
        if frees is not None:
            changes["reshard_after_forward"] = frees
        yield ", ".join(f"{key}={value}" for key, value in changes.items()), question.changed(**changes)


def _last_resorts(question: Question) -> Iterator[tuple[str, Question]]:
    frees = question.settings.reshard_after_forward is not False
    for recomputes in (False, True):
        if not (question.settings.recompute and not recomputes):
            changes: dict[str, Any] = {"recompute": recomputes, "offload": True}
            if frees:
                changes["reshard_after_forward"] = True
            yield f"offload=True, recompute={recomputes}", question.changed(**changes)


def _refinements(question: Question) -> Iterator[tuple[str, Question]]:
    """What is worth a try around the best settings so far."""
    settings = question.settings
    if settings.api == "fully_shard" and settings.shard is None and not settings.group_bytes:
        block_bytes = largest_block_bytes(question.job, settings)
        for count in _GROUPS if block_bytes else ():
            yield f"group_bytes={count * block_bytes}", question.changed(group_bytes=count * block_bytes)
    if question.nodes > 1 and question.settings.replicas == 1:
        yield f"replicas={question.nodes}", question.changed(replicas=question.nodes)
