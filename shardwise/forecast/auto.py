"""``fully_shard(model, plan="auto", inputs=..., budget_gb=...)``: chooses settings for a model at hand, and shards it.

Rank 0 chooses, on a copy of the model without memory; the others are told. A ``Choice`` or a ``Plan`` made before, on
any machine, is taken as it is.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm.collectives.agreement import gather_objects
from shardwise.comm.mesh import data_mesh, default_device_type, default_mesh, join_launched_ranks
from shardwise.composable.planned import make_plans_with
from shardwise.engine.unit.membership import units_of
from shardwise.errors import ConfigError
from shardwise.forecast.choice import EVERYTHING, Choice, choose_for
from shardwise.forecast.device_files import prices_of_gpu
from shardwise.forecast.plan import Plan, question_of
from shardwise.forecast.rehearsal import META, sharded_as
from shardwise.forecast.settings import Settings
from shardwise.policies import MixedPrecisionPolicy

__all__ = ["num_nodes", "shard_with_plan"]

_WHERE = "fully_shard(model, plan=...)"
_LOGGER = logging.getLogger("shardwise")


def num_nodes(world: int) -> int:
    """Returns how many machines these ranks are on, as torchrun and other launchers say."""
    return max(1, world // int(os.environ.get("LOCAL_WORLD_SIZE", world)))


def shard_with_plan(
    model: nn.Module,
    plan: Any,
    *,
    inputs: Any,
    loss: Callable[[Any], torch.Tensor] | None,
    budget_gb: float | None,
    mesh: DeviceMesh | None,
    device_type: str | None,
    mp_policy: MixedPrecisionPolicy,
    **given: Any,
) -> Any:
    """Shards a model as planned; ``given`` are settings that stay as they are."""
    _check(model, plan, inputs)
    if mesh is None:
        join_launched_ranks()
        whole = default_mesh(device_type or default_device_type(model.parameters()), _WHERE)
    else:
        whole = mesh
    ranks = whole.size()
    if plan == "auto":
        fixed = Settings(
            mp_policy=mp_policy,
            # A mesh of two axes has replicas.
            replicas=whole.size(0) if whole.ndim == 2 else 1,
            **{name: value for name, value in given.items() if value is not None},
        )
        may = EVERYTHING - {"micro_batches"} - ({"replicas"} if mesh is not None else set())
        changed = _agreed(whole, lambda: _chosen(model, inputs, loss, budget_gb, fixed, whole, may))
        settings = replace(fixed, **changed)
    else:
        question = (plan.best if isinstance(plan, Choice) else plan).question
        settings = question.settings
        if question.ranks != ranks:
            raise ConfigError(
                f"the plan is for {question.ranks} ranks, and there are {ranks}",
                where=_WHERE,
                fix=f"make it with ranks={ranks}",
            )
    if mesh is None and settings.replicas > 1:
        shape = (settings.replicas, ranks // settings.replicas)
        whole = init_device_mesh(whole.device_type, shape, mesh_dim_names=("replicate", "shard"))
    return sharded_as(model, settings, whole)


def _check(model: Any, plan: Any, inputs: Any) -> None:
    if not isinstance(plan, (Choice, Plan)) and plan != "auto":
        raise ConfigError(
            f"plan={plan!r} is no plan",
            where=_WHERE,
            fix='pass "auto", or what shardwise.choose or shardwise.plan returned',
        )
    if not isinstance(model, nn.Module) or any(units_of(module) for module in model.modules()):
        raise ConfigError(
            "a plan is for one whole model that is not sharded yet",
            where=_WHERE,
            fix="pass the outermost module, and shard nothing of it before",
        )
    if plan == "auto" and inputs is None:
        raise ConfigError(
            "the plan depends on what the model is given in a step",
            where=_WHERE,
            fix="pass inputs=, a micro-batch of this rank, or tensors of its shape on the meta device",
        )


def _agreed(mesh: DeviceMesh, choose: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what rank 0 chooses; raises what it raises."""
    groups = data_mesh(mesh, None, _WHERE)
    found: Any = None
    if groups.rank == 0:
        try:
            found = choose()
        except ConfigError as error:
            found = error
    for calls in (groups.shard, groups.replicate):
        if calls is not None:
            found = gather_objects(found, calls)[0]
    if isinstance(found, ConfigError):
        raise found
    chosen: dict[str, Any] = found
    return chosen


def _chosen(
    model: nn.Module,
    inputs: Any,
    loss: Callable[[Any], torch.Tensor] | None,
    budget_gb: float | None,
    fixed: Settings,
    mesh: DeviceMesh,
    may: frozenset[str],
) -> dict[str, Any]:
    """Returns the settings that were chosen, of those that may be sent to other ranks."""
    question = question_of(
        without_memory(model),
        inputs,
        ranks=mesh.size(),
        nodes=num_nodes(mesh.size()),
        device=_prices_here(mesh.device_type),
        loss=loss,
    )
    budget = None if budget_gb is None else int(budget_gb * 2**30)
    with torch.random.fork_rng(devices=[]):
        chosen = choose_for(replace(question, settings=fixed), budget, may)
    _LOGGER.info('fully_shard(plan="auto"): %s', chosen.text())
    return chosen.best.question.settings.differences(fixed)


def without_memory(model: nn.Module) -> nn.Module:
    """Returns a copy of the model on the meta device; nothing is allocated."""
    known: dict[int, Any] = {}
    for param in model.parameters():
        known[id(param)] = nn.Parameter(torch.empty_like(param, device=META), param.requires_grad)
    for buffer in model.buffers():
        known[id(buffer)] = torch.empty_like(buffer, device=META)
    return copy.deepcopy(model, known)


def _prices_here(device_type: str) -> str:
    if device_type == "cpu":
        return "cpu-gloo"
    gpu = torch.cuda.get_device_name()
    prices = prices_of_gpu(gpu)
    if prices is None:
        raise ConfigError(
            f"there are no prices for {gpu}",
            where=_WHERE,
            fix="measure them with `shardwise doctor --measure FILE`, and pass "
            "plan=shardwise.choose(..., device=FILE)",
        )
    return prices


make_plans_with(shard_with_plan)
