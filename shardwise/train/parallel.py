"""Turns a model into a module that trains on all ranks, in one of five sharding modes.

    mode        parameters   gradients   optimizer state   made of
    none        whole        whole       whole             DistributedDataParallel
    optimizer   whole        whole       partitioned       DistributedDataParallel, ZeroRedundancyOptimizer
    gradients   sharded*     sharded     sharded           fully_shard(reshard_after_forward=False)
    full        sharded      sharded     sharded           fully_shard
    hybrid      sharded within a replica                   fully_shard on a mesh of two axes

    * whole from forward to backward

With exact sums, the first two use FullyShardedDataParallel with NO_SHARD instead: only the engine sums exactly, and
modules compute the same in all modes.

The rest of this package accesses parameters by name, and does not need to know the mode.
"""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardwise.checkpoint.parts import part_of
from shardwise.composable.fsdp_module import FSDPModule
from shardwise.composable.fully_shard import fully_shard
from shardwise.errors import ConfigError, StateError
from shardwise.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.train.config import Mode, Sharding
from shardwise.train.model import ModelSource
from shardwise.train.records import counted
from shardwise.training_step.clip_grad_norm import clip_grad_norm_
from shardwise.wrapper.options import MixedPrecision, ShardingStrategy
from shardwise.wrapper.wrap_policies import ModuleWrapPolicy
from shardwise.wrapper.wrapper import FullyShardedDataParallel

__all__ = ["Parallel", "num_replicas"]


class Parallel:
    """A model on all ranks.

    Args:
        source: builds the model.
        sharding: the settings of sharding.
        device: the device of this rank.
        seed: the seed of the initial values, which are the same on any number of ranks.
        exact: sum gradients in an order that depends neither on the number of ranks nor on the mode.
    """

    def __init__(
        self,
        source: ModelSource,
        sharding: Sharding,
        device: torch.device,
        seed: int,
        exact: bool = False,
    ) -> None:
        self._source, self._sharding, self._device, self._is_exact = source, sharding, device, exact
        self.home = torch.device("cpu") if sharding.offload else device
        """The device of the parameters between steps."""
        torch.manual_seed(seed)
        with torch.device("meta") if source.builds_on_meta else contextlib.nullcontext():
            self.module = source.build()
        self.flops_of_token = source.flops_of_token(self.module)
        self.num_parameters = sum(param.numel() for param in self.module.parameters())
        classes = source.units(self.module)
        self.units = {name: unit for name, unit in self.module.named_modules() if isinstance(unit, classes)}
        if not self.units:
            raise ConfigError(
                f"the model has no module of class {', '.join(kind.__name__ for kind in classes)}",
                where=type(source).__name__,
                fix="name the class of its blocks as unit",
            )
        for unit in self.units.values():
            # Compile inside recomputation: the other way round, the compiler skips the unit.
            if sharding.compile and sharding.recompute:
                unit.forward = _with_recomputation(torch.compile(unit.forward))
            elif sharding.recompute:
                unit.forward = _with_recomputation(unit.forward)
            elif sharding.compile:
                unit.compile()
        self.is_sharded = sharding.mode not in ("none", "optimizer")
        if self.is_sharded:
            self._shard(classes)
        self._initialize_parameters(seed)
        if not self.is_sharded and exact:
            self.module = self._wrap_for_exact_sums(classes)
        self._forward_module = self.module if self.is_sharded or exact else self._wrap_in_ddp()

    # --- set-up -------------------------------------------------------------------------------------------------

    def _shard(self, classes: tuple[type[nn.Module], ...]) -> None:
        sharding = self._sharding
        if sharding.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        else:
            policy = MixedPrecisionPolicy()
        offload = (
            CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if sharding.offload else OffloadPolicy()
        )
        if not self._source.builds_on_meta and not sharding.offload:
            self.module.to(self._device)
        fully_shard(
            self.module,
            wrap=classes,
            mesh=_mesh(sharding, self._device),
            reshard_after_forward=sharding.mode != "gradients",
            mp_policy=policy,
            offload_policy=offload,
            exact=self._is_exact,
        )

    def _initialize_parameters(self, seed: int) -> None:
        """Initializes parameters one by one, each from its own seed: if sharded, no rank ever holds the whole model."""
        if not self._source.builds_on_meta:
            return
        self.module.to_empty(device=self.home)
        for name, param in self.module.named_parameters():
            generator = torch.Generator(self._device).manual_seed(
                seed * 0x9E3779B1 + zlib.crc32(name.encode())
            )
            whole = torch.empty(param.shape, dtype=param.dtype, device=self._device)
            self._source.fill(name, whole, generator)
            part = part_of(param)
            for dim, (start, size) in enumerate(zip(part.offsets, part.tensor.shape, strict=True)):
                whole = whole.narrow(dim, min(start, whole.size(dim) - size), size)
            part.tensor.copy_(whole)

    def _wrap_in_ddp(self) -> nn.Module:
        self.module.to(self._device)
        devices = [self._device.index] if self._device.type == "cuda" else None
        return DistributedDataParallel(self.module, device_ids=devices)

    def _wrap_for_exact_sums(self, classes: tuple[type[nn.Module], ...]) -> nn.Module:
        precision = None
        if self._sharding.precision == "bf16":
            # No module is exempt from mixed precision, as none is in the sharded modes.
            precision = MixedPrecision(
                torch.bfloat16, torch.float32, cast_forward_inputs=True, _module_classes_to_ignore=()
            )
        return FullyShardedDataParallel(
            self.module.to(self._device),
            device_mesh=init_device_mesh(self._device.type, (dist.get_world_size(),)),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            auto_wrap_policy=ModuleWrapPolicy(set(classes)),
            mixed_precision=precision,
            use_orig_params=True,
            exact=True,
        )

    @property
    def mode(self) -> Mode:
        return self._sharding.mode

    # --- in a step ----------------------------------------------------------------------------------------------

    def logits(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Returns the logits after each token, which sees only tokens of its own segment, if there are any."""
        with self._autocast():
            if segments is None:
                output = self._forward_module(tokens)
            else:
                output = self._forward_module(tokens, **self._source.segment_arguments(segments))
            return self._source.logits(output).float()

    def extend(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Returns the logits after the last of ``tokens``, which follow those of ``cache``, and the new cache."""
        with self._autocast():
            logits, cache = self._source.extend(self.module, tokens, cache)
        return logits.float(), cache

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Returns the context for forward and backward of a micro-batch, which defers what can wait for the last one.

        Replicas exchange whole gradients, so they exchange them once. Sharded modes reduce every time, which keeps
        gradients sharded; only the sum over replicas is deferred. With exact sums nothing is deferred.
        """
        if isinstance(self._forward_module, DistributedDataParallel) and not is_last:
            return self._forward_module.no_sync()
        if (
            isinstance(self._forward_module, FSDPModule)
            and self._sharding.mode == "hybrid"
            and not self._is_exact
        ):
            self._forward_module.set_requires_all_reduce(is_last)
        return contextlib.nullcontext()

    def clip(self, largest_norm: float) -> float | None:
        """Clips gradients and returns the norm before, the same on every rank; None, unclipped, if it is not finite."""
        try:
            norm = clip_grad_norm_(
                self.module.parameters(), largest_norm or math.inf, error_if_nonfinite=True
            )
        except StateError:
            return None
        return float(norm)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._sharding.precision == "bf16" and not self.is_sharded and not self._is_exact:
            return torch.autocast(self._device.type, torch.bfloat16)
        return contextlib.nullcontext()


def _with_recomputation(forward: Callable[..., Any]) -> Callable[..., Any]:
    return partial(checkpoint, forward, use_reentrant=False)


def _mesh(sharding: Sharding, device: torch.device) -> DeviceMesh:
    world_size = dist.get_world_size()
    if sharding.mode != "hybrid":
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    replicas = num_replicas(
        sharding.replicas, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    )
    shape = (replicas, world_size // replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


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
