"""Chooses settings for a job: the fastest step that fits into a budget of memory, found by predicting a few.

    chosen = shardwise.choose(make_model, inputs, ranks=64, nodes=8, budget_gb=70)
    print(chosen.text())                       # what was chosen, why, and what it was compared with
    chosen.shard(model, mesh)                  # as chosen

The search is the same on every rank: nothing in it is random, measured, or taken from this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.errors import ConfigError
from shardwise.forecast.alternatives import with_half_batch
from shardwise.forecast.plan import Plan, Question, answer, question_of
from shardwise.forecast.prices import Device
from shardwise.forecast.rehearsal import block_bytes, large_modules, sharded_as
from shardwise.forecast.report import comparison_text, gib
from shardwise.forecast.settings import Settings

__all__ = ["EVERYTHING", "Choice", "choose", "choose_for", "least_memory"]

# A change has to make a step this much faster to be worth another setting.
_WORTH = 0.99
# What may be chosen beside the usual: large modules as units of their own, recomputation of some blocks, gathers
# further ahead, smaller micro-batches and more of them, and replicas.
EVERYTHING = frozenset(("alone", "parts", "forward_prefetch", "micro_batches", "replicas"))
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
        return "\n".join([*lines, "", comparison_text(self.compared, self.budget_bytes)])


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
    return choose_for(question, budget, EVERYTHING)


def choose_for(
    question: Question, budget_bytes: int | None = None, may: frozenset[str] = EVERYTHING
) -> Choice:
    """As ``choose``; ``may`` says which settings may be chosen beside the usual ones."""
    device = question.device
    budget = device.memory_bytes - device.context_bytes if budget_bytes is None else budget_bytes
    if question.settings.shard is not None:
        raise ConfigError(
            "there is nothing to choose where a function of yours shards the model",
            where="the choice of settings",
            fix="pass wrap= instead of shard=, or predict your function with shardwise.plan",
        )
    search = _Search(question, budget)
    best = search.fastest(_ladder(question, may)) or search.fastest(_ladder(question, may, offload=True))
    if best is None:
        least = min((plan for _, plan in search.compared), key=lambda plan: plan.memory.reserved)
        raise ConfigError(
            f"none of {len(search.compared)} settings fits into {gib(budget)} GiB: the least is "
            f"{gib(least.memory.reserved)}, with {search.name_of(least.question)}",
            where=f"the choice of settings for {question.ranks} ranks",
            fix="use more ranks, smaller micro-batches, or a larger budget",
        )
    if "parts" in may and best.question.settings.recompute == 1 and not question.settings.recompute:
        # Only as many blocks as need to be.
        for part in _PARTS:
            kept = search.fastest([_kept_or_freed(best.question.changed(recompute=part), question)])
            if kept is not None:
                best = min(best, kept, key=lambda plan: plan.seconds)
                break
    return Choice(search.refined(best, may), tuple(search.compared), budget)


def least_memory(question: Question) -> Plan:
    """Returns the plan that needs the least memory of those that ``choose`` may try first."""
    plans = [answer(rung[-1]) for rung in _ladder(question, EVERYTHING, offload=True)]
    return min(plans, key=lambda plan: plan.memory.reserved)


class _Search:
    """The plans that were tried, in order; nothing is predicted twice."""

    def __init__(self, question: Question, budget: int) -> None:
        self.compared: list[tuple[str, Plan]] = []
        self._given = question.settings
        self._budget = budget
        self._plans: dict[str, Plan] = {}

    def name_of(self, question: Question) -> str:
        """What these settings have that those of the question lack."""
        changed = question.settings.differences(self._given).items()
        return ", ".join(f"{key}={value}" for key, value in changed) or "as given"

    def _plan(self, question: Question) -> Plan:
        name = self.name_of(question)
        if name not in self._plans:
            self._plans[name] = answer(question)
            self.compared.append((name, self._plans[name]))
        return self._plans[name]

    def _fits(self, plan: Plan) -> bool:
        return plan.memory.reserved <= self._budget

    def fastest(self, rungs: Iterable[list[Question]]) -> Plan | None:
        """Returns the fastest plan that fits, on the rungs down to the first where one fits without recomputing.

        A rung begins with what is fastest and ends with what needs the least; rungs below are slower.
        """
        fitting: list[Plan] = []
        for fast, *others in rungs:
            if self._fits(plan := self._plan(fast)):
                fitting.append(plan)
            elif others and self._fits(plan := self._plan(others[-1])):
                fitting.append(plan)
                fitting += [plan for question in others[:-1] if self._fits(plan := self._plan(question))]
            if any(plan.question.settings.recompute == self._given.recompute for plan in fitting):
                break
        return min(fitting, key=lambda plan: plan.seconds, default=None)

    def refined(self, best: Plan, may: frozenset[str]) -> Plan:
        """Returns the best plan after changes of a setting or two at a time, as long as they help."""
        before = None
        while before is not best:
            before = best
            for changed in _refinements(before, self._given, may):
                plan = self._plan(changed)
                if self._fits(plan) and plan.seconds < _WORTH * best.seconds:
                    best = plan
        return best


def _ladder(question: Question, may: frozenset[str], offload: bool = False) -> Iterator[list[Question]]:
    """Rungs of settings: each has smaller micro-batches, and more of them, than the one above."""
    given = question.settings
    rung: Question | None = question
    while rung is not None:
        parts: tuple[float, ...] = (given.recompute,) if given.recompute else (False, True)
        changed = [rung.changed(recompute=part, offload=offload or given.offload) for part in parts]
        # Whole parameters of all units are what offload is to save.
        yield [
            each
            for part in changed
            for each in _with_large_ones_alone(
                _kept_or_freed(part, question, keeps=not offload), question, may
            )
        ]
        splits = "micro_batches" in may and given.micro_batches == 1
        rung = with_half_batch(rung) if splits else None


def _kept_or_freed(question: Question, given: Question, keeps: bool = True) -> list[Question]:
    """Parameters kept from forward to backward, and freed, where that is not given."""
    if given.settings.reshard_after_forward is not None:
        return [question]
    return [question.changed(reshard_after_forward=frees) for frees in ((False, True) if keeps else (True,))]


def _with_large_ones_alone(questions: list[Question], given: Question, may: frozenset[str]) -> list[Question]:
    """Adds what needs less where an embedding or an output layer is as large as a block: a unit of its own."""
    large = large_modules(given.job, given.settings) if "alone" in may and not given.settings.alone else ()
    return [*questions, questions[-1].changed(alone=large)] if large else questions


def _refinements(best: Plan, given: Settings, may: frozenset[str]) -> Iterator[Question]:
    """What is worth a try around the best settings so far."""
    question = best.question
    as_given = question.changed(reshard_after_forward=given.reshard_after_forward)
    yield from _kept_or_freed(question, as_given)
    if given.api == "fully_shard" and not given.group_bytes:
        blocks = block_bytes(question.job, given)
        # Twice as many blocks in a unit, up to all of them.
        count = 2
        while blocks and count < 2 * len(blocks):
            grouped = question.changed(group_bytes=min(count * max(blocks), sum(blocks)))
            yield from _kept_or_freed(grouped, as_given)
            count *= 2
    waits = best.step.exposed > (1 - _WORTH) * best.seconds
    yield from _with_large_ones_alone([question], question.changed(alone=given.alone), may)[1:]
    if "forward_prefetch" in may and waits and given.api == "fully_shard" and not given.forward_prefetch:
        for units in (0, 1, 2):
            yield question.changed(forward_prefetch=units)
    if "replicas" in may and given.replicas == 1:
        for replicas in range(2, question.nodes + 1):
            if question.nodes % replicas == 0:
                yield question.changed(replicas=replicas)
