"""Wrapped models for the tests of `FullyShardedDataParallel`, and how to look at them whole."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shardwise import CustomPolicy, FullyShardedDataParallel, ShardingStrategy
from shardwise.testing.parity import Accumulation, History
from shardwise.testing.workloads import WORKLOADS


def device() -> torch.device:
    """Where this rank computes: the same tests run on CPUs with gloo and on GPUs with NCCL."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if "nccl" in dist.get_backend()
        else torch.device("cpu")
    )


ONE_AXIS = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


def wrap(model: nn.Module, units, **options) -> FullyShardedDataParallel:
    """The model with these modules wrapped, then itself."""
    chosen = set(units)
    return FullyShardedDataParallel(model, auto_wrap_policy=CustomPolicy(lambda m: m in chosen), **options)


def wrapped(name: str, **options) -> FullyShardedDataParallel:
    model = WORKLOADS[name].model()
    return wrap(model, WORKLOADS[name].units(model), **options)


def whole_gradients(model: FullyShardedDataParallel) -> dict[str, torch.Tensor | None]:
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        return {
            name: None if param.grad is None else param.grad.cpu().clone()
            for name, param in model.named_parameters()
        }


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def train(model, workload, steps, accumulation=None, optimizer=sgd) -> History:
    """This rank's losses, and whole gradients and parameters after each step."""
    accumulation = accumulation or Accumulation()
    rank, optim, history = dist.get_rank(), optimizer(model.parameters()), History()
    for step in range(steps):
        losses = []
        for micro_batch in range(accumulation.micro_batches):
            batch = workload.data(step, micro_batch, rank, device())
            if accumulation.syncs(micro_batch):
                loss = workload.loss(model(*batch), batch)
                loss.backward()
            else:
                with model.no_sync():
                    loss = workload.loss(model(*batch), batch)
                    loss.backward()
            losses.append(loss.item())
        history.losses.append([losses])
        history.grads.append(whole_gradients(model))
        optim.step()
        optim.zero_grad()
        state = model.state_dict()
        history.params.append({name: state[name].cpu() for name in history.grads[-1]})
    return history
