"""How the ranks of a run are arranged: pipeline stages, replicas, shards, and ranks that divide matrices.

    rank = ((stage × replicas + replica) × shards + shard) × tensor + part

Neighbours, which have the fastest links, divide matrices; stages, which exchange least, are furthest apart. All ranks
that differ only in stage or part read the same data.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.errors import ConfigError
from shardwise.train.config import Sharding
from shardwise.train.records import counted

__all__ = [
    "PIPELINE",
    "REPLICATE",
    "SHARD",
    "TENSOR",
    "RankGrid",
    "described",
    "num_replicas",
    "own_grid",
    "plan_grid",
]

PIPELINE, REPLICATE, SHARD, TENSOR = "pipeline", "replicate", "shard", "tensor"


@dataclass(frozen=True)
class RankGrid:
    """The size of each axis, and the place of this rank."""

    rank: int
    stages: int = 1
    replicas: int = 1
    shards: int = 1
    tensor: int = 1

    @property
    def data_world_size(self) -> int:
        """The number of ranks that read different data."""
        return self.replicas * self.shards

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor % self.data_world_size

    @property
    def stage(self) -> int:
        return self.rank // (self.tensor * self.data_world_size)

    @property
    def has_loss(self) -> bool:
        """Whether this rank, of all that read the same data, is the one whose loss counts."""
        return self.rank % self.tensor == 0 and self.stage == self.stages - 1

    def mesh(self, device_type: str, is_hybrid: bool) -> DeviceMesh:
        """Returns the mesh of all ranks; axes that the run does not use are left out."""
        sizes = {PIPELINE: self.stages, REPLICATE: self.replicas, SHARD: self.shards, TENSOR: self.tensor}
        always = {SHARD, REPLICATE} if is_hybrid else {SHARD}
        used = {name: size for name, size in sizes.items() if size > 1 or name in always}
        return init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))


def plan_grid(sharding: Sharding, rank: int, world_size: int) -> RankGrid:
    """Returns the grid of a run.

    Raises:
        ConfigError: the ranks cannot be divided in this way.
    """
    group = sharding.pipeline * sharding.tensor_parallel
    if world_size % group:
        raise ConfigError(
            f"{counted(world_size, 'rank')} cannot be divided into {_groups(sharding)}",
            where="sharding.tensor_parallel, sharding.pipeline",
            fix=f"start {group * max(1, round(world_size / group))} ranks, or use sizes whose product divides "
            f"{world_size}",
        )
    data_world_size = world_size // group
    replicas = 1
    if sharding.mode == "hybrid":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        # A host has neighbours; stages are furthest apart.
        on_host = min(data_world_size, max(1, local // sharding.tensor_parallel))
        replicas = num_replicas(sharding.replicas, data_world_size, on_host)
    return RankGrid(
        rank,
        sharding.pipeline,
        replicas,
        data_world_size // replicas,
        sharding.tensor_parallel,
    )


def own_grid(sharding: Sharding) -> RankGrid:
    """Returns the grid of the default process group."""
    return plan_grid(sharding, dist.get_rank(), dist.get_world_size())


def described(sharding: Sharding) -> str:
    """Returns the mode as text, with what it is combined with."""
    return ", ".join(
        [
            sharding.mode,
            *([f"tensor parallel {sharding.tensor_parallel}"] if sharding.tensor_parallel > 1 else []),
            *([f"pipeline {sharding.pipeline}"] if sharding.pipeline > 1 else []),
        ]
    )


def _groups(sharding: Sharding) -> str:
    parts = []
    if sharding.pipeline > 1:
        parts.append(f"{sharding.pipeline} pipeline stages")
    if sharding.tensor_parallel > 1:
        parts.append(f"groups of {sharding.tensor_parallel} that divide matrices")
    return " of ".join(parts)


def num_replicas(wanted: int, world_size: int, local_world_size: int) -> int:
    """Returns the number of replicas in hybrid mode: ``wanted``, or else one per host, or two on a single host."""
    replicas = wanted
    if not replicas:
        hosts = world_size // local_world_size if world_size % local_world_size == 0 else 1
        replicas = hosts if hosts > 1 else min(2, world_size)
    if world_size % replicas:
        raise ConfigError(
            f"{counted(world_size, 'rank')} cannot be divided into {counted(replicas, 'replica')}",
            where="sharding.replicas",
            fix=f"use a divisor of {world_size}, or sharding.mode=full",
        )
    return replicas
