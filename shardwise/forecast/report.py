"""A plan as text: memory at the peak, the step's time and where it goes, and bytes on each link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.policies import MixedPrecisionPolicy

if TYPE_CHECKING:
    from shardwise.forecast.plan import Plan

_KIND_NAMES = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "element-wise",
    "reduction": "norms, softmax, sums",
    "copy": "copies and casts",
    "optimizer": "optimizer",
}


def gib(num_bytes: float) -> str:
    """GiB with two decimals, and with four where two would say nothing."""
    found = num_bytes / 2**30
    return f"{found:,.2f}" if not 0 < abs(found) < 0.1 else f"{found:.4f}"


def count(number: float) -> str:
    """A number of parameters, in billions or millions."""
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def text_of(plan: Plan) -> str:
    lines = [*_head(plan), "", *_memory(plan), "", *_time(plan), "", *_links(plan)]
    return "\n".join(lines)


def _head(plan: Plan) -> list[str]:
    question, rehearsal = plan.question, plan.rehearsal
    nodes = f" on {question.nodes} nodes" if question.nodes > 1 else ""
    made = f"{len(rehearsal.units)} units" if rehearsal.units else "not sharded"
    name = question.name or "model"
    where = f"{question.ranks} × {question.device.name}{nodes}"
    lines = [f"{name}: {count(rehearsal.num_params)} parameters, {made}, {where}"]
    changed = question.settings.changed()
    if changed:
        lines.append("  " + ", ".join(f"{name}={_short(value)}" for name, value in changed.items()))
    return lines


def _short(value: object) -> str:
    if isinstance(value, MixedPrecisionPolicy):
        return f"{value.param_dtype}/{value.reduce_dtype}".replace("torch.", "")
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, tuple):
        return ", ".join(_short(each) for each in value)
    return str(value).replace("torch.", "")


def _memory(plan: Plan) -> list[str]:
    memory, device = plan.memory, plan.question.device
    lines = [f"memory of a rank, GiB      at its peak: {memory.place}"]
    for kind, num_bytes in sorted(memory.by_kind.items(), key=lambda item: -item[1]):
        lines.append(f"  {kind:<24} {gib(num_bytes):>9}")
    lines += [
        f"  {'allocated':<24} {gib(memory.allocated):>9}",
        f"  {'fragmentation':<24} {gib(memory.fragmentation):>9}   reserved: {gib(memory.reserved)}",
        f"  {'CUDA, libraries, NCCL':<24} {gib(device.context_bytes):>9}   outside of torch's allocator",
        f"  {'the device has':<24} {gib(device.memory_bytes):>9}   {verdict(plan)}",
    ]
    if memory.num_retries:
        lines.append(
            f"  memory ran out {memory.num_retries} times, and cached blocks were returned to the device"
        )
    return lines


def verdict(plan: Plan, budget_bytes: int | None = None) -> str:
    """Whether a plan fits into a budget; None: into what the device has."""
    spare = plan.spare_bytes if budget_bytes is None else budget_bytes - plan.memory.reserved
    return f"fits with {gib(spare)} GiB to spare" if spare >= 0 else f"does not fit by {gib(-spare)} GiB"


def _time(plan: Plan) -> list[str]:
    step = plan.step
    low, high = plan.seconds_range
    speed = f"{plan.tokens_per_second:,.0f} tokens/s a rank"
    lines = [f"{'step':<26} {ms(step.seconds)} ms ({ms(low).strip()} to {ms(high).strip()})   {speed}"]
    for kind, seconds in sorted(step.by_kind.items(), key=lambda item: -item[1]):
        lines.append(f"  {_KIND_NAMES.get(kind, kind):<24} {ms(seconds)}")
    lines.append(f"  {'exposed communication':<24} {ms(step.exposed)}")
    lines.append(
        f"  {'waiting for the host':<24} {ms(step.host_bound)}   of {ms(step.host).strip()} of host time"
    )
    if step.optimizer:
        lines.append(f"  {'optimizer on the host':<24} {ms(step.optimizer)}")
    phases = ", ".join(
        f"{name} {ms(seconds).strip()}" for name, seconds in step.by_phase.items() if seconds > 1e-5
    )
    lines.append(f"  of these: {phases}")
    if step.seconds and step.flops:
        lines.append(f"  {step.flops / step.seconds / 1e12:,.3g} TFLOP/s")
    return lines


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:>9,.1f}"


def _links(plan: Plan) -> list[str]:
    links, question = plan.question.device.links, plan.question
    lines = []
    for axis, num_bytes in plan.step.sent.items():
        ranks = {
            "shard": question.ranks // question.settings.replicas,
            "replicate": question.settings.replicas,
        }.get(axis)
        local = question.ranks_per_node(axis, ranks or question.ranks)
        link = links.within if ranks is not None and local >= ranks else links.between
        over = f"{ranks} ranks, " if ranks else ""
        lines.append(f"sent by a rank, GiB      {gib(num_bytes):>9}   {axis}: {over}over {link.name}")
    return lines or ["sent by a rank, GiB           0.00"]


def comparison_text(plans: Sequence[tuple[str, Plan]], budget_bytes: int | None = None) -> str:
    """A line for each plan."""
    width = max(len(name) for name, _ in plans)
    lines = [
        f"{'':<{width}} {'ms a step':>11} {'tokens/s a rank':>16} {'exposed ms':>11} {'reserved GiB':>13}"
    ]
    lines += [
        f"{name:<{width}} {ms(plan.seconds):>11} {plan.tokens_per_second:>16,.0f} {ms(plan.step.exposed):>11} "
        f"{gib(plan.memory.reserved):>13}   {verdict(plan, budget_bytes)}"
        for name, plan in plans
    ]
    return "\n".join(lines)
