"""Turns a model into a module that trains on all ranks, in one of five sharding modes.

    mode        parameters   gradients   optimizer state   made of
    none        whole        whole       whole             DistributedDataParallel
    optimizer   whole        whole       partitioned       DistributedDataParallel, ZeroRedundancyOptimizer
    gradients   sharded*     sharded     sharded           fully_shard(reshard_after_forward=False)
    full        sharded      sharded     sharded           fully_shard
    hybrid      sharded within a replica                   fully_shard on a mesh of two axes

    * whole from forward to backward

The built-in Llama's matrices may be divided first (``tensor_parallel``), and its blocks be cut into stages
(``pipeline``): then the ranks that have the same part of the model shard it among themselves.

With exact sums, the first two use FullyShardedDataParallel with NO_SHARD instead: only the engine sums exactly, and
modules compute the same in all modes.

The rest of this package accesses parameters by name, and does not need to know the mode.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardwise.checkpoint.parts import part_of
from shardwise.composable.fsdp_module import FSDPModule
from shardwise.composable.fully_shard import fully_shard
from shardwise.errors import ConfigError, StateError
from shardwise.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.train.config import Mode, Sharding
from shardwise.train.float8 import multiply_in_float8
from shardwise.train.llama import Llama, LlamaModel
from shardwise.train.model import ModelSource
from shardwise.train.pipeline import Carried, LlamaStage, Pipeline, cut_into_stages
from shardwise.train.rank_grid import PIPELINE, REPLICATE, SHARD, TENSOR, own_grid
from shardwise.train.tensor_parallel import divide_matrices, padded_to_multiple
from shardwise.training_step.clip_grad_norm import clip_grad_norm_
from shardwise.wrapper.options import MixedPrecision, ShardingStrategy
from shardwise.wrapper.wrap_policies import ModuleWrapPolicy
from shardwise.wrapper.wrapper import FullyShardedDataParallel

__all__ = ["Parallel"]


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
        self.unit_names = tuple(self.units)
        """The names of the units on all ranks; with a pipeline, this rank has only some of them."""
        multiply_in_float8(self.units.values(), sharding.float8)
        for unit in self.units.values():
            # Compile inside recomputation: the other way round, the compiler skips the unit.
            if sharding.compile and sharding.recompute:
                unit.forward = _with_recomputation(torch.compile(unit.forward))
            elif sharding.recompute:
                unit.forward = _with_recomputation(unit.forward)
            elif sharding.compile:
                unit.compile()
        self.grid = own_grid(sharding)
        self.is_sharded = sharding.mode not in ("none", "optimizer")
        self._mesh = self.grid.mesh(device.type, sharding.mode == "hybrid") if self.is_sharded else None
        if self.grid.tensor > 1:
            divide_matrices(self._llama(), self._axes(TENSOR))
        self.elsewhere: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        """The shape and dtype of each parameter that is only in other ranks' stages."""
        stages = self._cut() if self.grid.stages > 1 else []
        if self.is_sharded:
            roots: Sequence[nn.Module] = stages or [self.module]
            for root in roots:
                self._shard(root, classes)
        self._initialize_parameters(seed)
        if not self.is_sharded and exact:
            self.module = self._wrap_for_exact_sums(classes)
        self._forward_module = self.module if self.is_sharded or exact else self._wrap_in_ddp()
        self.pipeline = self._pipeline_of(stages) if stages else None

    # --- set-up -------------------------------------------------------------------------------------------------

    def _shard(self, module: nn.Module, classes: tuple[type[nn.Module], ...]) -> None:
        sharding = self._sharding
        if sharding.precision == "fp32":
            policy = MixedPrecisionPolicy()
        else:
            policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        offload = (
            CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if sharding.offload else OffloadPolicy()
        )
        if not self._source.builds_on_meta and not sharding.offload:
            module.to(self._device)
        fully_shard(
            module,
            wrap=classes,
            group_bytes=sharding.group_bytes,
            mesh=self._axes(REPLICATE, SHARD) if sharding.mode == "hybrid" else self._axes(SHARD),
            reshard_after_forward=sharding.mode != "gradients",
            mp_policy=policy,
            offload_policy=offload,
            exact=self._is_exact,
        )

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of gathered parameters and of activations."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
            self._sharding.precision
        ]

    def _axes(self, *names: str) -> DeviceMesh:
        assert self._mesh is not None
        return self._mesh if self._mesh.mesh_dim_names == names else self._mesh[names]

    def _llama(self) -> LlamaModel:
        assert isinstance(self.module, LlamaModel)
        return self.module

    def _cut(self) -> list[LlamaStage]:
        """Keeps only this rank's stages of the pipeline in ``module``, and returns them."""
        whole = {name: (tuple(param.shape), param.dtype) for name, param in self.module.named_parameters()}
        per_rank = 2 if self._sharding.schedule == "interleaved" else 1
        grid = self.grid
        stages = cut_into_stages(self._llama(), grid.stage, grid.stages, per_rank, grid.tensor)
        own = {name for name, _ in self.module.named_parameters()}
        self.elsewhere = {name: facts for name, facts in whole.items() if name not in own}
        present = dict(self.module.named_modules())
        self.units = {name: unit for name, unit in self.units.items() if name in present}
        return stages

    def _pipeline_of(self, stages: list[LlamaStage]) -> Pipeline:
        source = self._source
        assert isinstance(source, Llama)
        context = source.context + -source.context % self.grid.tensor
        carried = Carried(context, source.width, source.vocabulary, self.grid.tensor, self._dtype)
        return Pipeline(stages, self._axes(PIPELINE), self._sharding.schedule, carried, self._device)

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
        if self._sharding.precision != "fp32":
            # No module is exempt from mixed precision, as none is in the sharded modes.
            precision = MixedPrecision(
                self._dtype, torch.float32, cast_forward_inputs=True, _module_classes_to_ignore=()
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

    def logits(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor | None:
        """Returns the logits after each token, which sees only tokens of its own segment, if there are any.

        With tensor parallelism, they are a DTensor, divided along the vocabulary. With a pipeline, only ranks of the
        last stage have them, the others get None, and there are no gradients.
        """
        if self.pipeline is not None:
            logits = self.pipeline.logits(tokens, segments)
            return None if logits is None else logits.float()
        length = tokens.size(1)
        tokens, segments = padded_to_multiple(tokens, segments, self.grid.tensor)
        with self._autocast():
            if segments is None:
                output = self._forward_module(tokens)
            else:
                output = self._forward_module(tokens, **self._source.segment_arguments(segments))
            logits = self._source.logits(output)
            self._source.check_logits(logits, tokens)
            return (logits if logits.size(1) == length else logits[:, :length]).float()

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
        return self.with_divided_logits()

    def with_divided_logits(self) -> AbstractContextManager[None]:
        """Returns the context in which the loss of logits that are divided along the vocabulary is computed."""
        return loss_parallel() if self.grid.tensor > 1 else contextlib.nullcontext()

    def clip(self, largest_norm: float) -> float | None:
        """Clips gradients and returns the norm before, the same on every rank; None, unclipped, if it is not finite."""
        try:
            norm = clip_grad_norm_(
                self.module.parameters(),
                largest_norm or math.inf,
                error_if_nonfinite=True,
                stages=None if self.pipeline is None else self.pipeline.group,
            )
        except StateError:
            return None
        return float(norm)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._sharding.precision != "fp32" and not self.is_sharded and not self._is_exact:
            return torch.autocast(self._device.type, self._dtype)
        return contextlib.nullcontext()


def _with_recomputation(forward: Callable[..., Any]) -> Callable[..., Any]:
    return partial(checkpoint, forward, use_reentrant=False)
