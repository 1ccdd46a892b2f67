"""How a model is sharded and trained in a step that is predicted: one frozen record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch import nn

from shardwise.errors import ConfigError
from shardwise.policies import MixedPrecisionPolicy

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What is chosen about a step; the names are those of ``fully_shard`` and of ``FSDPModule``'s methods."""

    wrap: Any = None
    """Which modules are units, as ``fully_shard(wrap=...)``; None: the classes of which a list has several."""
    group_bytes: int = 0
    """How large units of several modules may be, as ``fully_shard(group_bytes=...)``; 0: one module each."""
    alone: tuple[str, ...] = ()
    """Names of modules beside those that are units of their own, such as a large embedding."""
    reshard_after_forward: bool | int | None = None
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: bool = False
    """Keep shards, gradients and the optimizer's state in host memory."""
    replicas: int = 1
    """Replicas of hybrid sharding: shards are spread over ``ranks / replicas`` ranks."""
    recompute: float = False
    """Activation checkpointing of every block, or of such a part of them, evenly spread: 0.5 is every second one."""
    compile: bool = False
    """Compile every block, within its recomputation."""
    micro_batches: int = 1
    """Forwards and backwards a step; every backward reduces."""
    forward_prefetch: int = 0
    """How many units ahead forward gathers."""
    api: Literal["fully_shard", "wrapper", "none"] = "fully_shard"
    """none: the model whole on every rank, without communication."""
    optimizer: str | None = "adamw"
    """adamw (fused), adamw-foreach, adamw-in-backward (``shardwise.optim.flat(..., in_backward=True)``), sgd, or None
    for forward and backward alone."""
    shard: Callable[[nn.Module, Any], Any] | None = None
    """Your own way to shard: takes the model and a mesh, and replaces all of the above but the last four."""

    def check(self, ranks: int, where: str) -> None:
        """Raises ConfigError for settings that no run could have."""
        if self.replicas < 1 or ranks % self.replicas:
            raise ConfigError(
                f"{ranks} ranks cannot be divided into {self.replicas} replicas",
                where=where,
                fix=f"use a divisor of {ranks}",
            )
        if self.api == "wrapper" and self.offload:
            raise ConfigError(
                "there is no prediction for the wrapper with offload",
                where=where,
                fix="predict fully_shard, whose step with offload is the same",
            )
        if not 0 <= self.recompute <= 1:
            raise ConfigError(
                f"recompute is {self.recompute}", where=where, fix="use a part of the blocks, from 0 to 1"
            )
        if self.micro_batches < 1:
            raise ConfigError(
                f"a step has {self.micro_batches} micro-batches", where=where, fix="use 1 or more"
            )
        if self.optimizer not in (None, "adamw", "adamw-foreach", "adamw-in-backward", "sgd"):
            raise ConfigError(
                f"there is no prediction for the optimizer '{self.optimizer}'",
                where=where,
                fix="use adamw, adamw-foreach, adamw-in-backward, sgd, or None",
            )

    def changed(self) -> dict[str, Any]:
        """The settings that are not the default, as one could pass them."""
        return self.differences(Settings())

    def differences(self, other: Settings) -> dict[str, Any]:
        """The settings that are not those of the other."""
        return {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if getattr(self, entry.name) != getattr(other, entry.name)
        }
