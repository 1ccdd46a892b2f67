"""What one call of ``FullyShardedDataParallel`` does to a model: every wrapper it makes, decided before the first.

Modules are chosen, options read and parameters checked without changing anything. Then tensors are given memory,
moved and made equal on all ranks, once for the whole model. What is left is a list of wrappings, inner ones first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm.mesh import DataMesh
from shardwise.engine.exact.exact_sums import EXACT_SUMMATION, check_mesh
from shardwise.engine.reduce.reduce_plan import DEFAULT_SUMMATION, Summation
from shardwise.engine.unit.binding import FoundParameter, is_wrapper
from shardwise.engine.unit.factory import check_fits_shards, find_parameters
from shardwise.engine.unit.membership import hidden, membership, units_of
from shardwise.engine.unit.module_selection import has_forward
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError, ConfigTypeError
from shardwise.policies import CPUOffloadPolicy, OffloadPolicy
from shardwise.torch_internals import children_of, parameters_of
from shardwise.wrapper.device_and_mesh import (
    chosen_device,
    chosen_mesh,
    materialize,
    move,
    send_from_first_rank,
)
from shardwise.wrapper.mixed_precision import cast_buffers, compute_as_stored
from shardwise.wrapper.options import (
    STRATEGIES,
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    Strategy,
    as_choice,
    as_record,
)
from shardwise.wrapper.wrap_policies import choose

OPTIONS = frozenset(
    (
        "process_group",
        "sharding_strategy",
        "cpu_offload",
        "backward_prefetch",
        "mixed_precision",
        "device_id",
        "forward_prefetch",
        "use_orig_params",
        "device_mesh",
        "param_init_fn",
        "sync_module_states",
        "limit_all_gathers",
        "exact",
    )
)


# Modules that have a wrapper around them.
_wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass
class WrapperPlan:
    """One wrapper to be made: a module, where it stands in the model, and its options as the engine needs them."""

    module: nn.Module
    places: list[tuple[nn.Module, str]]
    sharding_strategy: ShardingStrategy
    mesh: DataMesh
    precision: MixedPrecision
    offload: OffloadPolicy
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    use_orig_params: bool
    ignored: set[nn.Parameter]
    sums: Summation
    # Modules that no inner wrapper has taken; and those of them that are left out of mixed precision.
    own_modules: list[nn.Module]
    as_stored: list[nn.Module]

    @property
    def strategy(self) -> Strategy:
        return STRATEGIES[self.sharding_strategy]

    def set_up(self, unit: Unit) -> None:
        """Hands the options that are settings to the unit, and its modules theirs."""
        _wrapped.add(self.module)
        left_out = set(self.as_stored)
        cast_buffers(
            (module for module in self.own_modules if module not in left_out), self.precision.buffer_dtype
        )
        for module in self.as_stored:
            compute_as_stored(module)
        if self.backward_prefetch is None:
            unit.configure(backward_prefetch=())
        unit.configure(prefetches_late=self.backward_prefetch is BackwardPrefetch.BACKWARD_POST)


def plan_wrappers(
    module: nn.Module,
    options: dict[str, Any],
    policy: Any,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[Any] | None,
) -> list[WrapperPlan]:
    """Checks everything; then prepares the model's tensors. The outermost wrapping comes last."""
    where = f"FullyShardedDataParallel({type(module).__name__})"
    if not isinstance(module, nn.Module):
        raise ConfigTypeError(
            f"FullyShardedDataParallel was given a {type(module).__name__}",
            where=where,
            fix="pass an nn.Module",
        )
    modules, params = _ignored(module, ignored_modules, ignored_states, where)
    _check_module(module, where)
    for found in _managed(module, params):
        check_fits_shards(found, "ignored_states", where)
        _check_is_plain(found, where)
    chosen: list[tuple[nn.Module, dict[str, Any]]] = []
    if policy is not None:
        _check_none_wrapped(module, where)
        chosen = choose(module, policy, modules, params, where)
    chosen.append((module, {}))
    wrappings = [_read(member, {**options, **changed}, params, where) for member, changed in chosen]
    for wrapping in wrappings[:-1]:
        wrapping.places = _places(module, wrapping.module)
    _share_out(wrappings, modules)
    _check_tied(wrappings, params, where)
    _prepare(module, modules, params, wrappings[-1], options, where)
    return wrappings


def _read(module: nn.Module, options: dict[str, Any], ignored: set[nn.Parameter], where: str) -> WrapperPlan:
    if unknown := set(options) - OPTIONS:
        raise ConfigError(
            f"auto_wrap_policy chose the options {sorted(unknown)} for a {type(module).__name__}",
            where=where,
            fix=f"choose among {sorted(OPTIONS)}",
        )
    strategy = as_choice(ShardingStrategy, options["sharding_strategy"] or ShardingStrategy.FULL_SHARD, where)
    precision = options["mixed_precision"]
    precision = MixedPrecision() if precision is None else as_record(MixedPrecision, precision, where)
    offload = options["cpu_offload"]
    offloads = offload is not None and as_record(CPUOffload, offload, where).offload_params
    prefetch = options["backward_prefetch"]
    device = chosen_device(options["device_id"], module.parameters(), options["device_mesh"], where)
    mesh = chosen_mesh(options["process_group"], options["device_mesh"], STRATEGIES[strategy], device, where)
    if options["exact"]:
        check_mesh(mesh, where)
    return WrapperPlan(
        module,
        [],
        strategy,
        mesh,
        precision,
        CPUOffloadPolicy(pin_memory=device.type == "cuda") if offloads else OffloadPolicy(),
        None if prefetch is None else as_choice(BackwardPrefetch, prefetch, where),
        bool(options["forward_prefetch"]),
        bool(options["use_orig_params"]),
        ignored,
        EXACT_SUMMATION if options["exact"] else DEFAULT_SUMMATION,
        [],
        [],
    )


def _ignored(
    module: nn.Module, modules: Iterable[nn.Module] | None, states: Iterable[Any] | None, where: str
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    if modules is not None and states is not None:
        raise ConfigError(
            "both ignored_modules and ignored_states were given", where=where, fix="pass ignored_states alone"
        )
    tops: list[nn.Module] = []
    params: set[nn.Parameter] = set()
    for state in (*(modules or ()), *(states or ())):
        if isinstance(state, nn.Parameter) and modules is None:
            params.add(state)
        elif isinstance(state, nn.Module):
            tops.append(state)
        else:
            raise ConfigTypeError(
                f"a {type(state).__name__} is to be ignored", where=where, fix="pass modules or parameters"
            )
    if module in tops:
        raise ConfigError(
            f"{type(module).__name__} is to be wrapped and ignored",
            where=where,
            fix="leave one of the two out",
        )
    ignored = {inner for top in tops for inner in top.modules()}
    return ignored, params | {param for top in tops for param in top.parameters()}


def _check_module(module: nn.Module, where: str) -> None:
    if is_wrapper(module) or module in _wrapped:
        raise ConfigError(
            f"{type(module).__name__} is wrapped already", where=where, fix="wrap each module once"
        )
    if units_of(module):
        raise ConfigError(
            f"{type(module).__name__} is sharded by fully_shard already",
            where=where,
            fix="use one of the two on a module",
        )
    if not has_forward(module):
        raise ConfigError(
            f"{type(module).__name__} only holds modules: nothing calls it, so nothing would gather its parameters",
            where=where,
            fix=f"wrap the modules inside the {type(module).__name__}, or the module around it",
        )


def _check_none_wrapped(module: nn.Module, where: str) -> None:
    for name, inner in module.named_modules():
        if is_wrapper(inner):
            raise ConfigError(
                f"auto_wrap_policy was given for a model whose '{name}' is wrapped already",
                where=where,
                fix="wrap by hand or by policy, not both",
            )


def _managed(module: nn.Module, ignored: set[nn.Parameter]) -> list[FoundParameter]:
    return [found for found in find_parameters((module,), ignored) if found.taken is None]


def _check_is_plain(found: FoundParameter, where: str) -> None:
    if isinstance(found.param, DTensor):
        raise ConfigError(
            f"parameter '{found.name}' is a DTensor already",
            where=where,
            fix="combine tensor parallelism with fully_shard, or put the parameter into ignored_states",
        )


def _places(root: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (parent, name)
        for parent in root.modules()
        for name, child in children_of(parent).items()
        if child is module
    ]


def _share_out(wrappings: list[WrapperPlan], ignored: set[nn.Module]) -> None:
    """Gives each module to the innermost wrapping around it."""
    taken = set(ignored)
    for wrapping in wrappings:
        wrapping.own_modules = _unwrapped(wrapping.module, taken)
        taken.update(wrapping.own_modules)
        precision = wrapping.precision
        if precision.param_dtype is not None or precision.buffer_dtype is not None:
            left_out = tuple(precision._module_classes_to_ignore)
            wrapping.as_stored = [member for member in wrapping.own_modules if isinstance(member, left_out)]


def _check_tied(wrappings: list[WrapperPlan], ignored: set[nn.Parameter], where: str) -> None:
    """A parameter that stands in modules of several wrappers is gathered once, in one dtype."""
    chosen: dict[int, torch.dtype] = {}
    for wrapping in wrappings:
        for module in wrapping.own_modules:
            for name, param in parameters_of(module).items():
                taken = hidden(module, name) if param is None else membership(param)
                tensor = param if taken is None else taken[1].sharded
                if tensor is None or tensor in ignored or module in wrapping.as_stored:
                    continue
                own = wrapping.precision.param_dtype or tensor.dtype
                there = own if taken is None else taken[0].settings.precision.param_dtype or tensor.dtype
                there = chosen.setdefault(id(tensor if taken is None else taken[1]), there)
                if own != there:
                    raise ConfigError(
                        f"parameter '{name}' of a {type(module).__name__} is tied to one of another wrapper, which "
                        f"computes in {there}; here it would be {own}",
                        where=f"MixedPrecision(param_dtype=...), {where}",
                        fix="give both wrappers the same param_dtype, or wrap the two modules as one",
                    )


def _prepare(
    module: nn.Module,
    ignored_modules: set[nn.Module],
    ignored: set[nn.Parameter],
    outermost: WrapperPlan,
    options: dict[str, Any],
    where: str,
) -> None:
    """Memory, device and first values of what is not wrapped yet."""
    own = _unwrapped(module, ignored_modules)
    device = outermost.mesh.device
    materialize(own, options["param_init_fn"], device, ignored, where)
    if options["device_id"] is not None:
        move(own, device, ignored)
    if options["sync_module_states"]:
        tensors = [found.param for found in _managed(module, ignored)]
        buffers = [buffer for member in own for buffer in member.buffers(recurse=False)]
        send_from_first_rank([*tensors, *buffers], outermost.mesh)


def _unwrapped(module: nn.Module, ignored: set[nn.Module]) -> list[nn.Module]:
    """The modules below ``module`` that no wrapper has taken and nobody wants ignored, it first."""
    found: dict[nn.Module, None] = {}

    def visit(member: nn.Module) -> None:
        if member not in found and member not in ignored and not is_wrapper(member):
            found[member] = None
            for child in member.children():
                visit(child)

    visit(module)
    return list(found)
