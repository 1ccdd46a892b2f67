"""Plans the wrappers that one call of ``FullyShardedDataParallel`` makes, before the first one is made.

First it chooses modules, reads options and checks parameters, without changing anything. Then it initializes, moves and
synchronizes the tensors of the whole model, once. ``wrapper.py`` makes the planned wrappers, inner ones first.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm.mesh import DataMesh
from shardwise.engine.reduce.exact_sums import EXACT_SUMMATION, check_mesh
from shardwise.engine.reduce.reduce_plan import DEFAULT_SUMMATION
from shardwise.engine.unit.binding import WRAPPED_NAME, FoundParameter, is_wrapper
from shardwise.engine.unit.factory import (
    check_fits_shards,
    check_tensor_parallel,
    find_parameters,
    make_unit,
)
from shardwise.engine.unit.flat_form import FlatForm
from shardwise.engine.unit.membership import hidden, membership, units_of
from shardwise.engine.unit.module_selection import has_forward
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError, ConfigTypeError
from shardwise.policies import as_record
from shardwise.torch_internals import children_of, local_part, parameters_of
from shardwise.wrapper.device_and_mesh import (
    chosen_device,
    chosen_mesh,
    materialize,
    move,
    send_from_first_rank,
)
from shardwise.wrapper.flat_handle import check_not_stepped_in_backward, mark_flattened
from shardwise.wrapper.mixed_precision import cast_buffers, compute_in_full_precision
from shardwise.wrapper.options import (
    BackwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
    WrapperOptions,
)
from shardwise.wrapper.wrap_policies import choose

# From a warning here to the caller of ``FullyShardedDataParallel``.
_STACKLEVEL = 4


@dataclass
class WrapperPlan:
    """One wrapper to be made: its module, the module's parents in the model, and its options."""

    module: nn.Module
    options: WrapperOptions
    mesh: DataMesh
    ignored: set[nn.Parameter]
    parents: list[tuple[nn.Module, str]] = field(default_factory=list)
    # Whether auto-wrapping leaves this module out of mixed precision.
    is_full_precision: bool = False
    # Modules inside this wrapper and no inner one; and those of them that mixed precision leaves out.
    own_modules: list[nn.Module] = field(default_factory=list)
    full_precision_modules: list[nn.Module] = field(default_factory=list)

    def make_unit(self, wrapper: nn.Module) -> Unit:
        """Shards the module's parameters as one unit of ``wrapper``, and applies mixed precision to its modules."""
        options, precision = self.options, self.options.mixed_precision
        unit = make_unit(
            type(self.module).__name__,
            (wrapper,),
            self.mesh,
            options.strategy.after_forward,
            FlatForm(
                None if options.use_orig_params else self.module,
                self.full_precision_modules,
                precision.keep_low_precision_grads,
            ),
            precision.policy(),
            options.offload_policy(self.mesh.device),
            self.ignored,
            EXACT_SUMMATION if options.exact else DEFAULT_SUMMATION,
        )
        mark_flattened(unit)
        for owner in self._container_units():
            unit.need(owner)
        left_out = set(self.full_precision_modules)
        cast_buffers(
            (module for module in self.own_modules if module not in left_out), precision.buffer_dtype
        )
        for module in self.full_precision_modules:
            compute_in_full_precision(module)
        if options.backward_prefetch is None:
            unit.configure(backward_prefetch=())
        unit.configure(prefetches_late=options.backward_prefetch is BackwardPrefetch.BACKWARD_POST)
        return unit

    def _container_units(self) -> list[Unit]:
        """The units of containers that have wrappers of their own: they are never called, so this unit gathers them."""
        return [
            needed
            for member in (*self.own_modules, self.module)
            for child in member.children()
            if is_wrapper(child) and not has_forward(child.get_submodule(WRAPPED_NAME))
            for inner in units_of(child)
            for needed in inner.needs
        ]


def plan_wrappers(
    module: nn.Module,
    given: dict[str, Any],
    policy: Any,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[Any] | None,
) -> list[WrapperPlan]:
    """Checks all arguments, then initializes, moves and synchronizes the model's tensors.

    Returns the wrappers to make, inner ones first; the last one is for ``module`` itself.
    """
    where = f"FullyShardedDataParallel({type(module).__name__})"
    if not isinstance(module, nn.Module):
        raise ConfigTypeError(
            f"FullyShardedDataParallel was given a {type(module).__name__}",
            where=where,
            fix="pass an nn.Module",
        )
    modules, params = _ignored(module, ignored_modules, ignored_states, where)
    _check_module(module, where)
    for found in _unsharded_parameters(module, params):
        check_fits_shards(found, "ignored_states", where)
        if not given["use_orig_params"]:
            check_not_stepped_in_backward(found.param, found.name, where)
    chosen: list[tuple[nn.Module, dict[str, Any]]] = []
    in_full: tuple[type[nn.Module], ...] = ()
    if policy is not None:
        _check_none_wrapped(module, where)
        in_full = _full_precision_classes(given["mixed_precision"], where)
        chosen = choose(module, policy, modules, params, in_full, where)
    chosen.append((module, {}))
    plans = [_plan_one(member, {**given, **overrides}, params, where) for member, overrides in chosen]
    for found in _unsharded_parameters(module, params):
        if isinstance(found.param, DTensor):
            check_tensor_parallel(found, found.param, plans[-1].mesh, where)
    for plan in plans[:-1]:
        plan.parents = _parents(module, plan.module)
        plan.is_full_precision = isinstance(plan.module, in_full)
    _warn_of_surprises(plans, modules)
    _assign_modules(plans, modules)
    _check_tied(plans, params, where)
    _prepare_tensors(plans, modules, where)
    return plans


def _plan_one(
    module: nn.Module, given: dict[str, Any], ignored: set[nn.Parameter], where: str
) -> WrapperPlan:
    options = WrapperOptions.read(given, module, where)
    device = chosen_device(options.device_id, module.parameters(), options.device_mesh, where)
    mesh = chosen_mesh(options.process_group, options.device_mesh, options.strategy, device, where)
    if options.exact:
        check_mesh(mesh, where)
    plan = WrapperPlan(module, options, mesh, ignored)
    if mesh.replicate is None and mesh.shard.world == 1:
        # Nothing to shard: as in torch, parameters are then kept.
        plan.options = replace(options, sharding_strategy=ShardingStrategy.NO_SHARD)
    return plan


def _ignored(
    module: nn.Module, modules: Iterable[nn.Module] | None, states: Iterable[Any] | None, where: str
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """The modules to ignore, with their submodules, and the parameters to ignore."""
    if modules is not None and states is not None:
        raise ConfigError(
            "both ignored_modules and ignored_states were given", where=where, fix="pass only ignored_states"
        )
    given = modules if states is None else states
    if given is not None and not isinstance(given, Iterable):
        raise ConfigTypeError(
            f"a {type(given).__name__} is not a list of what to ignore", where=where, fix="pass a list of it"
        )
    tops: list[nn.Module] = []
    params: set[nn.Parameter] = set()
    for state in given or ():
        if isinstance(state, nn.Parameter) and modules is None:
            params.add(state)
        elif isinstance(state, nn.Module) and is_wrapper(state):
            raise ConfigError(
                f"a wrapped {type(state.get_submodule(WRAPPED_NAME)).__name__} is to be ignored",
                where=where,
                fix="leave it out of the ignored modules: the wrapper around it has nothing of it",
            )
        elif isinstance(state, nn.Module):
            tops.append(state)
        else:
            raise ConfigTypeError(
                f"a {type(state).__name__} cannot be ignored", where=where, fix="pass modules or parameters"
            )
    if tops and params:
        raise ConfigError(
            f"ignored_states has {len(tops)} modules and {len(params)} parameters",
            where=where,
            fix="pass modules or parameters: the parameters of a module are module.parameters()",
        )
    ignored = {inner for top in tops for inner in top.modules()}
    return ignored, params | {param for top in tops for param in top.parameters()}


def _check_module(module: nn.Module, where: str) -> None:
    if units_of(module) and not is_wrapper(module):
        raise ConfigError(
            f"{type(module).__name__} is sharded by fully_shard already",
            where=where,
            fix="use either fully_shard or FullyShardedDataParallel on a module",
        )


def _warn_of_surprises(plans: list[WrapperPlan], ignored: set[nn.Module]) -> None:
    """Warns of what is done as asked, but is seldom meant."""
    outermost = plans[-1]
    name, options = type(outermost.module).__name__, outermost.options
    if outermost.module in ignored:
        warnings.warn(
            f"{name} is both wrapped and ignored: none of its parameters are sharded, and their gradients are not "
            f"averaged over ranks",
            stacklevel=_STACKLEVEL,
        )
    if any(not has_forward(plan.module) for plan in plans):
        kinds = sorted({type(plan.module).__name__ for plan in plans if not has_forward(plan.module)})
        warnings.warn(
            f"{', '.join(kinds)} has no forward, so no call of it gathers its parameters: they are gathered with those "
            f"of the wrapper around it. Wrap the modules inside instead",
            stacklevel=_STACKLEVEL,
        )
    if outermost.mesh.shard.world == 1 and outermost.mesh.replicate is None:
        warnings.warn(
            f"{name} is wrapped for a single rank: its parameters are not sharded (NO_SHARD)",
            stacklevel=_STACKLEVEL,
        )
    if kinds := sorted({type(plan.module).__name__ for plan in plans if plan.is_full_precision}):
        warnings.warn(
            f"auto_wrap_policy and mixed precision were given, so modules of {', '.join(kinds)} get wrappers of their "
            f"own, which compute in full precision",
            stacklevel=_STACKLEVEL,
        )
    device = outermost.mesh.device
    if options.device_id is None and device.type != "cpu":
        on_host = (
            found.param.device.type == "cpu"
            for found in _unsharded_parameters(outermost.module, outermost.ignored)
        )
        if any(on_host):
            warnings.warn(
                f"{name} is on the CPU and is sharded there, which takes longer than on {device}: pass device_id= to "
                f"move it first",
                stacklevel=_STACKLEVEL,
            )


def _full_precision_classes(precision: Any, where: str) -> tuple[type[nn.Module], ...]:
    """The classes of modules that mixed precision leaves out."""
    if precision is None:
        return ()
    return tuple(as_record(MixedPrecision, precision, where)._module_classes_to_ignore)


def _check_none_wrapped(module: nn.Module, where: str) -> None:
    for name, inner in module.named_modules():
        if is_wrapper(inner):
            raise ConfigError(
                f"auto_wrap_policy was given for a model whose '{name}' is wrapped already",
                where=where,
                fix="wrap the model's modules yourself or with auto_wrap_policy, not both",
            )


def _unsharded_parameters(module: nn.Module, ignored: set[nn.Parameter]) -> list[FoundParameter]:
    """The parameters of ``module`` that neither are ignored nor belong to an inner wrapper."""
    return [found for found in find_parameters((module,), ignored) if found.taken is None]


def _parents(root: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every module below ``root`` that has ``module`` as a child, with the child's name."""
    return [
        (parent, name)
        for parent in root.modules()
        for name, child in children_of(parent).items()
        if child is module
    ]


def _assign_modules(plans: list[WrapperPlan], ignored: set[nn.Module]) -> None:
    """Assigns each module to the innermost wrapper around it."""
    taken = set(ignored)
    for plan in plans:
        plan.own_modules = _unwrapped(plan.module, taken)
        taken.update(plan.own_modules)
        precision = plan.options.mixed_precision
        if plan.is_full_precision:
            plan.full_precision_modules = [plan.module]
        elif precision.param_dtype is not None or precision.buffer_dtype is not None:
            classes = tuple(precision._module_classes_to_ignore)
            plan.full_precision_modules = [
                member for member in plan.own_modules if isinstance(member, classes)
            ]


def _check_tied(plans: list[WrapperPlan], ignored: set[nn.Parameter], where: str) -> None:
    """Raises if wrappers that share a parameter would compute with it in different dtypes: it is gathered once."""
    chosen: dict[int, torch.dtype] = {}
    for plan in plans:
        for module in plan.own_modules:
            for name, param in parameters_of(module).items():
                taken = hidden(module, name) if param is None else membership(param)
                tensor = param if taken is None else taken[1].sharded
                if tensor is None or tensor in ignored or module in plan.full_precision_modules:
                    continue
                own = plan.options.mixed_precision.param_dtype or tensor.dtype
                other = own if taken is None else taken[0].settings.precision.param_dtype or tensor.dtype
                other = chosen.setdefault(id(tensor if taken is None else taken[1]), other)
                if own != other:
                    raise ConfigError(
                        f"parameter '{name}' of a {type(module).__name__} is tied to a parameter of another wrapper, "
                        f"which computes in {other}; this wrapper would compute in {own}",
                        where=f"MixedPrecision(param_dtype=...), {where}",
                        fix="give both wrappers the same param_dtype, or put both modules into one wrapper",
                    )


def _prepare_tensors(plans: list[WrapperPlan], ignored_modules: set[nn.Module], where: str) -> None:
    """Initializes tensors on the meta device, then moves and synchronizes everything that is not wrapped yet."""
    outermost = plans[-1]
    module, options, device = outermost.module, outermost.options, outermost.mesh.device
    unwrapped = _unwrapped(module, ignored_modules)
    for plan in plans:
        materialize(plan.own_modules, plan.options.param_init_fn, device, outermost.ignored, where)
    if options.device_id is not None:
        move(unwrapped, device, outermost.ignored)
    if options.sync_module_states:
        params = [local_part(found.param) for found in _unsharded_parameters(module, outermost.ignored)]
        buffers = [buffer for member in unwrapped for buffer in member.buffers(recurse=False)]
        send_from_first_rank([*params, *buffers], outermost.mesh)


def _unwrapped(module: nn.Module, ignored: set[nn.Module]) -> list[nn.Module]:
    """``module`` and the modules below it that are neither ignored nor inside another wrapper."""
    found: dict[nn.Module, None] = {}

    def visit(member: nn.Module) -> None:
        if member not in found and member not in ignored and not is_wrapper(member):
            found[member] = None
            for child in member.children():
                visit(child)

    visit(module)
    return list(found)
