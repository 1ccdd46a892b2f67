"""``shardwise.plan``: the memory and time of a training step, known before there is a GPU.

    planned = shardwise.plan(make_model, inputs, ranks=64, nodes=8, device="h200", wrap=Block)
    print(planned.text())
    planned.fits, planned.memory.reserved, planned.seconds, planned.tokens_per_second

The step is rehearsed (``rehearsal``): the engine runs as it is, on meta devices. Its tape is then played for memory by
torch's caching allocator (``memory_play``, ``allocator``), and for time by a clock (``clock``) at the device's prices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.forecast.clock import StepTime, time_step
from shardwise.forecast.device_files import load_device
from shardwise.forecast.memory_play import MemoryForecast, play_memory
from shardwise.forecast.picture import timeline_of
from shardwise.forecast.prices import Device
from shardwise.forecast.rehearsal import Job, Rehearsal, rehearse
from shardwise.forecast.report import count, text_of
from shardwise.forecast.settings import Settings
from shardwise.forecast.timeline import Timeline

__all__ = ["Plan", "Question", "answer", "plan", "question_of"]

# cuBLAS takes a workspace for forward's thread and one for backward's, and more of it since Hopper.
_WORKSPACE_BYTES = 8_519_680
_WORKSPACE_BYTES_SINCE_HOPPER = 32 << 20


@dataclass(frozen=True)
class Question:
    """What is asked: a job on a number of ranks and nodes, with settings."""

    job: Job
    settings: Settings
    ranks: int
    nodes: int
    device: Device
    # Tokens, or other samples, that a rank takes in a step.
    tokens: int
    name: str = ""

    def changed(self, **changes: Any) -> Question:
        """The question with other settings, or another number of ranks."""
        own = {
            key: changes.pop(key) for key in ("ranks", "nodes", "device", "job", "tokens") if key in changes
        }
        return replace(self, settings=replace(self.settings, **changes), **own)

    def ranks_per_node(self, axis: str, world: int) -> int:
        """How many ranks of a group of this axis share a node: shards are spread over neighbours."""
        on_node = max(1, self.ranks // self.nodes)
        if axis == "replicate":
            return max(1, min(world, on_node // (self.ranks // self.settings.replicas)))
        return min(world, on_node)


@dataclass(frozen=True)
class Plan:
    """A predicted step of one rank."""

    question: Question
    rehearsal: Rehearsal
    memory: MemoryForecast
    step: StepTime

    @property
    def seconds(self) -> float:
        """How long the step takes."""
        return self.step.seconds

    @property
    def seconds_range(self) -> tuple[float, float]:
        """The step at the fast and at the slow end of what prices may be."""
        spread, step = self.question.device.spread, self.step
        off = (
            spread["compute"] * step.compute
            + spread["links"] * step.exposed
            + spread["host"] * (step.host_bound + step.optimizer)
        )
        return step.seconds - off, step.seconds + off

    @property
    def tokens_per_second(self) -> float:
        """Tokens that each rank takes in a second."""
        return self.question.tokens / self.seconds if self.seconds else 0.0

    @property
    def spare_bytes(self) -> int:
        """What the device has left; negative where it does not suffice."""
        device = self.question.device
        return device.memory_bytes - device.context_bytes - self.memory.reserved

    @property
    def fits(self) -> bool:
        return self.spare_bytes >= 0

    @cached_property
    def timeline(self) -> Timeline:
        """The step as a picture for ``shardwise.forecast.page``."""
        return timeline_of(self.rehearsal, self.step, self.facts())

    def facts(self) -> dict[str, str]:
        question = self.question
        return {
            "model": f"{question.name or 'model'}, {count(self.rehearsal.num_params)} parameters",
            "ranks": f"{question.ranks} on {question.nodes} node{'s' * (question.nodes > 1)}",
            "device": question.device.name,
            "settings": ", ".join(f"{key}={value}" for key, value in question.settings.changed().items()),
            "step": f"{1e3 * self.seconds:.1f} ms, {self.tokens_per_second:,.0f} tokens/s a rank",
            "memory": f"{self.memory.allocated / 2**30:.2f} GiB allocated, {self.memory.reserved / 2**30:.2f} reserved",
            "memory curve": "allocated by the host, which runs ahead; drawn where compute uses it",
        }

    def text(self) -> str:
        """The prediction as a table."""
        return text_of(self)

    def as_json(self) -> dict[str, Any]:
        """The prediction as numbers, in bytes and seconds."""
        step, memory = self.step, self.memory
        low, high = self.seconds_range
        return {
            "model": self.question.name,
            "parameters": self.rehearsal.num_params,
            "ranks": self.question.ranks,
            "nodes": self.question.nodes,
            "device": self.question.device.name,
            "settings": {key: str(value) for key, value in self.question.settings.changed().items()},
            "fits": self.fits,
            "spare_bytes": self.spare_bytes,
            "allocated_bytes": memory.allocated,
            "reserved_bytes": memory.reserved,
            "context_bytes": self.question.device.context_bytes,
            "peak": {"place": str(memory.place), "bytes_by_kind": memory.by_kind},
            "peak_bytes_by_phase": memory.by_phase,
            "seconds": step.seconds,
            "seconds_low": low,
            "seconds_high": high,
            "tokens_per_second": self.tokens_per_second,
            "seconds_by_kind": dict(step.by_kind),
            "exposed_seconds": step.exposed,
            "host_bound_seconds": step.host_bound,
            "sent_bytes": dict(step.sent),
            "flops": step.flops,
        }


def plan(
    model: Callable[[], nn.Module] | nn.Module,
    inputs: Any,
    *,
    ranks: int,
    nodes: int = 1,
    device: str | Device = "h200",
    loss: Callable[[Any], torch.Tensor] | None = None,
    tokens: int | None = None,
    name: str = "",
    **settings: Any,
) -> Plan:
    """Predicts memory and time of a training step on one of ``ranks`` devices, without a device.

    Args:
        model: builds the model; it is called with meta as the default device, so that nothing is allocated. Or a
            model on the meta device.
        inputs: one rank's inputs of a micro-batch: a tensor, a tuple of arguments or a dict of keywords. Only shapes
            and dtypes matter: ``torch.empty(2, 8192, dtype=torch.long, device="meta")``.
        ranks: devices that train together.
        nodes: the machines that they are on.
        device: the name of a device whose prices come with shardwise, or a file of prices.
        loss: takes the model's output and returns the loss. Default: the output itself, its ``loss``, or its sum.
        tokens: what a rank takes in a step, for tokens a second. Default: the elements of the first input.
        name: of the model, for the text.
        settings: the fields of ``shardwise.forecast.settings.Settings``: ``wrap``, ``reshard_after_forward``,
            ``mp_policy``, ``offload``, ``replicas``, ``recompute``, ``micro_batches``, ``optimizer``, ...

    Raises:
        ConfigError: the model cannot be run without data, or no run could have these settings.
    """
    return answer(
        question_of(
            model,
            inputs,
            ranks=ranks,
            nodes=nodes,
            device=device,
            loss=loss,
            tokens=tokens,
            name=name,
            **settings,
        )
    )


def question_of(
    model: Callable[[], nn.Module] | nn.Module,
    inputs: Any,
    *,
    ranks: int,
    nodes: int = 1,
    device: str | Device = "h200",
    loss: Callable[[Any], torch.Tensor] | None = None,
    tokens: int | None = None,
    name: str = "",
    **settings: Any,
) -> Question:
    """Returns what ``plan`` answers; its arguments are the same."""
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ConfigError(
            f"{ranks} ranks cannot be spread over {nodes} nodes",
            where="shardwise.plan",
            fix="let ranks be a multiple of nodes",
        )
    chosen = Settings(**settings)
    prices = load_device(device) if isinstance(device, str) else device
    job = Job(_builder(model), _inputs(inputs), loss)
    count = _num_tokens(inputs) if tokens is None else tokens
    return Question(job, chosen, ranks, nodes, prices, count * chosen.micro_batches, name)


def answer(question: Question) -> Plan:
    """Rehearses what is asked, and plays its tape."""
    question.settings.check(question.ranks, "shardwise.plan")
    device = question.device
    rehearsal = rehearse(question.job, question.settings, question.ranks, on_cuda=device.type == "cuda")
    memory = play_memory(rehearsal.tape, workspaces_of(device), device.memory_bytes - device.context_bytes)
    step = time_step(
        rehearsal.tape[rehearsal.steps[-1] :],
        device,
        question.ranks_per_node,
        question.settings.micro_batches,
    )
    return Plan(question, rehearsal, memory, step)


def workspaces_of(device: Device) -> list[int]:
    if device.type != "cuda":
        return []
    since_hopper = any(name in device.name for name in ("H100", "H200", "B200", "GH200"))
    return [_WORKSPACE_BYTES_SINCE_HOPPER if since_hopper else _WORKSPACE_BYTES] * 2


def _builder(model: Callable[[], nn.Module] | nn.Module) -> Callable[[], nn.Module]:
    if not isinstance(model, nn.Module):
        return model
    if any(param.device.type != "meta" for param in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} has memory",
            where="shardwise.plan",
            fix="pass a function that builds it, or build it within torch.device('meta')",
        )
    return lambda: copy.deepcopy(model)


def _inputs(inputs: Any) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    if callable(inputs) and not isinstance(inputs, torch.Tensor):
        return lambda: _as_arguments(inputs())
    arguments = _as_arguments(inputs)
    return lambda: arguments


def _as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def _num_tokens(inputs: Any) -> int:
    args, kwargs = _inputs(inputs)()
    first = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
    if first is None:
        return 0
    return first.numel() if not first.is_floating_point() else first.shape[0] if first.dim() else 1
