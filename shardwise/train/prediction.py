"""Predicts a recipe's step: for ``shardwise plan``, and before a run's first step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.forecast.device_files import load_device
from shardwise.forecast.plan import Plan, Question, answer
from shardwise.forecast.prices import Device
from shardwise.forecast.rehearsal import META, Job
from shardwise.forecast.settings import Settings
from shardwise.policies import MixedPrecisionPolicy
from shardwise.train.config import Config
from shardwise.train.hugging_face import HuggingFaceModel
from shardwise.train.losses import mean_loss
from shardwise.train.rank_grid import num_replicas

__all__ = ["assumptions", "predict", "question_of"]


def predict(config: Config, device: str | Device, ranks: int, nodes: int) -> Plan:
    """Predicts a step of this run on one of ``ranks`` devices on ``nodes`` machines."""
    return answer(question_of(config, device, ranks, nodes))


def question_of(config: Config, device: str | Device, ranks: int, nodes: int) -> Question:
    """Returns what a recipe asks.

    Raises:
        ConfigError: the mode does not shard parameters, or the batch cannot be divided among the ranks.
    """
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
        recompute=sharding.recompute,
        micro_batches=train.accumulate,
        optimizer="sgd" if config.optimizer.name == "sgd" else "adamw",
    )
    prices = load_device(device) if isinstance(device, str) else device
    tokens = size * model.context * train.accumulate
    return Question(_job(config, size), settings, ranks, nodes, prices, tokens, config.name)


def assumptions(config: Config) -> list[str]:
    """What of a recipe is predicted as something else."""
    found = []
    if config.sharding.compile:
        found.append("compiled blocks are predicted as eager ones: time and activations are upper bounds")
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
