"""Predicts a recipe's step: for ``shardwise plan``, and before a run's first step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.forecast.auto import num_nodes
from shardwise.forecast.choice import EVERYTHING, Choice, choose_for
from shardwise.forecast.device_files import load_device, prices_of_gpu
from shardwise.forecast.memory_play import MemoryForecast
from shardwise.forecast.plan import Plan, Question, answer
from shardwise.forecast.prices import Device
from shardwise.forecast.rehearsal import META, Job
from shardwise.forecast.settings import Settings
from shardwise.forecast.tape import ACTIVATIONS
from shardwise.policies import MixedPrecisionPolicy
from shardwise.train.config import Config
from shardwise.train.hugging_face import HuggingFaceModel
from shardwise.train.losses import mean_loss
from shardwise.train.rank_grid import num_replicas
from shardwise.train.team import Team

__all__ = [
    "as_settings",
    "assumptions",
    "choose_settings",
    "chosen_here",
    "predict",
    "question_of",
]


def predict(config: Config, device: str | Device, ranks: int, nodes: int) -> Plan:
    """Predicts a step of this run on one of ``ranks`` devices on ``nodes`` machines."""
    return answer(question_of(config, device, ranks, nodes))


def question_of(config: Config, device: str | Device, ranks: int, nodes: int) -> Question:
    """Returns what a recipe asks.

    Raises:
        ConfigError: the mode does not shard parameters, or the batch cannot be divided among the ranks.
    """
    config = replace(config, model=config.model.resolved())
    sharding, train, model = config.sharding, config.train, config.model
    if sharding.mode in ("none", "optimizer"):
        raise ConfigError(
            f"there is no prediction for sharding.mode={sharding.mode}, which runs torch's DistributedDataParallel",
            where=f"the plan of '{config.name}'",
            fix="use full, gradients or hybrid",
        )
    if sharding.tensor_parallel > 1 or sharding.pipeline > 1:
        raise ConfigError(
            "there is no prediction for tensor parallelism and pipelines",
            where=f"the plan of '{config.name}'",
            fix="use sharding.tensor_parallel=1 and sharding.pipeline=1",
        )
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ConfigError(
            f"{ranks} ranks cannot be spread over {nodes} nodes",
            where=f"the plan of '{config.name}'",
            fix="let ranks be a multiple of nodes",
        )
    size, rest = divmod(train.batch_size, ranks * train.accumulate)
    if rest or not size:
        raise ConfigError(
            f"train.batch_size is {train.batch_size}, which {ranks} ranks with {train.accumulate} micro-batches each "
            "cannot divide",
            where=f"the plan of '{config.name}'",
            fix=f"use a multiple of {ranks * train.accumulate}, or fewer micro-batches",
        )
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[sharding.precision]
    settings = Settings(
        wrap=model.units(_built(config)),
        reshard_after_forward=sharding.mode != "gradients",
        mp_policy=MixedPrecisionPolicy(dtype, torch.float32) if dtype else MixedPrecisionPolicy(),
        offload=sharding.offload,
        replicas=num_replicas(sharding.replicas, ranks, ranks // nodes) if sharding.mode == "hybrid" else 1,
        group_bytes=sharding.group_bytes,
        recompute=sharding.recompute,
        compile=sharding.compile,
        micro_batches=train.accumulate,
        optimizer="sgd" if config.optimizer.name == "sgd" else "adamw",
    )
    prices = load_device(device) if isinstance(device, str) else device
    tokens = size * model.context * train.accumulate
    return Question(_job(config, size), settings, ranks, nodes, prices, tokens, config.name)


def as_settings(chosen: Settings) -> list[str]:
    """Returns what was chosen as settings of a recipe, ``name=value``."""
    mode = "gradients" if chosen.reshard_after_forward is False else "full"
    found = [f"sharding.mode={'hybrid' if chosen.replicas > 1 else mode}"]
    if chosen.replicas > 1:
        found.append(f"sharding.replicas={chosen.replicas}")
    found.append(f"sharding.recompute={str(bool(chosen.recompute)).lower()}")
    if chosen.offload:
        found.append("sharding.offload=true")
    if chosen.group_bytes:
        found.append(f"sharding.group_bytes={chosen.group_bytes}")
    found.append(f"train.accumulate={chosen.micro_batches}")
    return found


class PeakCheck:
    """Predicts the most memory that a run's steps allocate on a GPU, and compares it with the first step; on rank 0.

    Elsewhere, and for what has no prediction, it does nothing.
    """

    def __init__(self, config: Config, team: Team, device: torch.device, note: Callable[[str], None]) -> None:
        self._note = note
        self._device = device
        self._predicted: MemoryForecast | None = None
        if team.rank == 0 and device.type == "cuda":
            nodes = num_nodes(team.world_size)
            self._predicted = _peak_of(config, torch.cuda.get_device_name(device), team.world_size, nodes)
        if self._predicted is not None:
            memory = self._predicted
            note(f"predicted peak memory: {_gib(memory.allocated)}, {memory.place}")

    def compare(self) -> None:
        """Compares the prediction with what torch's allocator has counted so far; once."""
        predicted, self._predicted = self._predicted, None
        if predicted is not None:
            self._note(difference_of(predicted, torch.cuda.max_memory_allocated(self._device)))
            self._note(shares_of(self._device))


def difference_of(predicted: MemoryForecast, allocated: int) -> str:
    """Says how far a prediction was off; beyond 5 %, also which kind was wrong.

    All kinds but activations are known to the byte, so these were.
    """
    off = allocated / predicted.allocated - 1.0
    said = f"peak memory of the first step: {_gib(allocated)}, {100 * off:+.1f} % of what was predicted"
    if abs(off) <= _CLOSE:
        return said
    known = {kind: num_bytes for kind, num_bytes in predicted.by_kind.items() if kind != ACTIVATIONS}
    kinds = sorted(known.items(), key=lambda item: -item[1])
    took = allocated - sum(known.values())
    return (
        f"{said}: activations took {_gib(took)} instead of {_gib(predicted.by_kind.get(ACTIVATIONS, 0))}, beside "
        f"{', '.join(f'{kind} {_gib(num_bytes)}' for kind, num_bytes in kinds)}"
    )


def shares_of(device: torch.device) -> str:
    """Says who holds a GPU's memory now: tensors, torch's allocator, and what no allocator of torch knows of."""
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"memory of the device: {_gib(allocated)} in tensors and workspaces, {_gib(reserved - allocated)} kept by "
        f"torch's allocator for later ones (torch.cuda.empty_cache() returns what it can), "
        f"{_gib(total - free - reserved)} outside of it (CUDA's context, NCCL's buffers, other processes), "
        f"{_gib(free)} free"
    )


_CLOSE = 0.05


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _peak_of(config: Config, gpu: str, ranks: int, nodes: int) -> MemoryForecast | None:
    device = prices_of_gpu(gpu)
    if device is None:
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            return predict(config, device, ranks, nodes).memory
    except Exception:  # noqa: BLE001
        # A run does not depend on its prediction.
        return None


def choose_settings(
    config: Config, device: str | Device, ranks: int, nodes: int, budget_gb: float | None
) -> Choice:
    """Chooses mode, groups of units, recomputation, offload and micro-batches of a recipe: the fastest that fits."""
    sharding = replace(config.sharding, mode="full", group_bytes=0, recompute=False, offload=False)
    # From all samples of a rank at once to one at a time.
    train = replace(config.train, accumulate=1)
    question = question_of(replace(config, sharding=sharding, train=train), device, ranks, nodes)
    budget = None if budget_gb is None else int(budget_gb * 2**30)
    may = EVERYTHING - {"alone", "parts", "forward_prefetch"}  # for which recipes have no settings
    return choose_for(question.changed(reshard_after_forward=None), budget, may)


def chosen_here(config: Config, ranks: int | None, budget_gb: float | None) -> Choice:
    """Chooses settings for the GPUs of this machine, or of the job that a launcher has started; same on all ranks.

    Raises:
        ConfigError: there is no GPU, or there are no prices for it.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    device = None if gpu is None else prices_of_gpu(gpu)
    if device is None:
        raise ConfigError(
            f"settings are chosen for GPUs, and {'this machine has none' if gpu is None else f'{gpu} has no prices'}",
            where="shardwise train --auto",
            fix="choose them for a device that you name: shardwise plan RECIPE --device h200 --ranks 8 --choose",
        )
    world = int(os.environ.get("WORLD_SIZE", ranks or torch.cuda.device_count()))
    nodes = num_nodes(world)
    return choose_settings(config, device, world, nodes, budget_gb)


def assumptions(config: Config) -> list[str]:
    """What of a recipe is predicted as something else."""
    found = []
    if config.sharding.float8 != "off":
        found.append("float8 products are predicted in the precision of the others: time is an upper bound")
    if config.optimizer.name not in ("adamw", "sgd"):
        found.append(f"the optimizer {config.optimizer.name} is predicted as AdamW")
    if config.data.format == "chat":
        found.append("conversations are predicted as whole sequences without masks")
    return found


def _built(config: Config) -> nn.Module:
    with META:
        if isinstance(config.model, HuggingFaceModel):
            return replace(config.model, pretrained=False).build()
        return config.model.build()


def _job(config: Config, batch_size: int) -> Job:
    shape = (batch_size, config.model.context)

    def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.empty(shape, dtype=torch.long, device=META),), {}

    def loss(output: Any) -> Tensor:
        logits = config.model.logits(output).float()
        targets = torch.empty(logits.shape[:-1], dtype=torch.long, device=META)
        return mean_loss(logits, targets, config.loss, targets.numel())

    return Job(lambda: _built(config), inputs, loss)
