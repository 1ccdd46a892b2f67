"""``fully_shard``: the composable API. Modules keep their names and methods; their parameters become DTensors.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)                 # or, in one call: fully_shard(model, wrap=Block)

All arguments are checked before anything changes; then the engine makes the units.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.mesh import (
    DataMesh,
    data_mesh,
    default_device_type,
    default_mesh,
    join_launched_ranks,
    mesh_of_info,
)
from shardwise.composable.fsdp_module import FSDPModule, become_fsdp_module
from shardwise.composable.planned import shard_as_planned
from shardwise.composable.state_dicts import keep_state_dicts_sharded
from shardwise.engine.reduce.exact_sums import EXACT_SUMMATION, check_mesh
from shardwise.engine.reduce.reduce_plan import DEFAULT_SUMMATION
from shardwise.engine.unit.dtensor_form import DTensorForm, PlacementFn, chosen_placement
from shardwise.engine.unit.factory import check_unit, find_parameters, make_unit
from shardwise.engine.unit.joining import join_units
from shardwise.engine.unit.membership import UNITS_ATTRIBUTE, membership, units_of
from shardwise.engine.unit.module_selection import Wrap, choose_modules, is_container, join_neighbors
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigAssertionError, ConfigError, ConfigTypeError
from shardwise.planning.lifecycle import AfterForward, plan_after_forward
from shardwise.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    as_record,
    is_record_named,
)
from shardwise.torch_internals import register_as_fully_sharded

if TYPE_CHECKING:
    from typing_extensions import Unpack

M = TypeVar("M", bound=nn.Module)

_DEFAULT_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


class UnitOptions(TypedDict, total=False):
    """The keywords of ``fully_shard`` that may differ between the units of one model."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: PlacementFn | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    dp_mesh_dims: DataParallelMeshDims | None
    device_type: str | None
    exact: bool


@overload
def fully_shard(
    module: nn.Module,
    *,
    ignored_params: set[nn.Parameter] | None = ...,
    wrap: Wrap | None = ...,
    group_bytes: int = ...,
    plan: Any = ...,
    inputs: Any = ...,
    loss: Callable[[Any], torch.Tensor] | None = ...,
    budget_gb: float | None = ...,
    **options: Unpack[UnitOptions],
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[M], *, ignored_params: set[nn.Parameter] | None = ..., **options: Unpack[UnitOptions]
) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = _DEFAULT_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    device_type: str | None = None,
    wrap: Wrap | None = None,
    group_bytes: int = 0,
    exact: bool = False,
    plan: Any = None,
    inputs: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    budget_gb: float | None = None,
) -> FSDPModule | list[FSDPModule]:
    """Shards a module's parameters, gradients and optimizer state over the ranks of a mesh.

    The parameters of ``module`` that no earlier call has sharded become one *unit*: gathered together before forward,
    freed after it, gathered again for backward, their gradients reduced together. So call it bottom-up, on the blocks
    of a model and then on the model; or let ``wrap`` do that.

    Args:
        module: the module to shard, in place; or a list of modules that become one unit.
        mesh: one axis (shard) or two (replicate, shard). Default: all ranks.
        reshard_after_forward: ``True`` frees parameters after forward and gathers them again in backward; ``False``
            keeps them; an int reshards them to groups of that many neighbouring ranks; ``None`` means ``True``. The
            outermost unit always keeps its parameters until backward, unless ``set_reshard_after_forward`` is called.
        shard_placement_fn: takes a parameter and returns the ``Shard(dim)`` to shard it along, or ``None`` for dim 0.
            The dimension need not be divisible by the number of ranks. A ``ShardPlacementResult`` gives the parameter
            a mesh of its own, as experts need it; its gradient is then averaged over the ranks of that mesh.
        mp_policy: dtypes to compute and reduce in.
        offload_policy: where shards are kept.
        ignored_params: parameters that are not sharded.
        dp_mesh_dims: which axes of a larger mesh shard and replicate.
        device_type: ``"cuda"`` or ``"cpu"``, without ``mesh``. Default: ``"cuda"`` if parameters are there or the
            process group uses NCCL or names no backend, else ``"cpu"``: with gloo a GPU is used only if you say so.
        wrap: which submodules become units of their own first: a class, several classes, a minimum number of elements,
            or a callable that takes a module and returns a bool or a mapping of keywords for that module.
        group_bytes: modules chosen by ``wrap`` that follow each other become one unit while their parameters together
            are at most this large: fewer and larger collectives for models of many small blocks. Without ``wrap``, so
            do units below ``module`` that were made by hand, if they are sharded alike and have not run yet.
        exact: sum gradients in one fixed order over micro-batches, in float32, so that the same micro-batches give the
            same bits on 1, 2, 4, 8, ... ranks, however the model is sharded. Use it for all units of a model or none.
        plan: ``"auto"`` chooses units, what is freed after forward, what is recomputed and offloaded, and replicas: the
            fastest step that fits, by prediction; the ``shardwise`` logger says what, and why, at level INFO. Or what
            ``shardwise.choose`` or ``shardwise.plan`` returned.
        inputs: with ``plan="auto"``, a rank's inputs of a micro-batch, of which only shapes count.
        loss: with ``plan="auto"``, takes the model's output and returns the loss. Default: as ``shardwise.plan``.
        budget_gb: with ``plan="auto"``, GiB that torch's allocator may reserve. Default: all that the device has.

    Returns:
        ``module`` itself, whose class is now a subclass of its own class and ``FSDPModule``.
    """
    modules = _as_modules(module)
    options: UnitOptions = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": shard_placement_fn,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "dp_mesh_dims": dp_mesh_dims,
        "device_type": device_type,
        "exact": exact,
    }
    if plan is not None:
        beside = {**options, "ignored_params": ignored_params, "wrap": wrap, "group_bytes": group_bytes}
        planned: FSDPModule = shard_as_planned(
            module, plan, beside, inputs=inputs, loss=loss, budget_gb=budget_gb
        )
        return planned
    ignored = _checked_ignored(ignored_params)
    chosen = _chosen_by(wrap, group_bytes, modules, ignored, options)
    chosen.append((modules, options))
    # All units are checked before the first one is made: an error leaves the whole model unchanged.
    plans = []
    for members, unit_options in chosen:
        # Not a comprehension, which would be a frame of its own: warnings name the caller's line.
        plans.append(_UnitPlan(members, ignored, unit_options))
    if group_bytes and wrap is None:
        # Before their places are looked up: the outer unit may show some of their parameters, too.
        for module in modules:
            for unit in join_units(module, group_bytes):
                keep_state_dicts_sharded((unit,))
    for plan in plans:
        plan.make_unit()
    sharded: FSDPModule | list[FSDPModule] = module
    return sharded


def _chosen_by(
    wrap: Wrap | None,
    group_bytes: int,
    modules: tuple[nn.Module, ...],
    ignored: set[nn.Parameter],
    options: UnitOptions,
) -> list[tuple[tuple[nn.Module, ...], UnitOptions]]:
    """Returns the modules below that become units first, each unit's with its options."""
    if not isinstance(group_bytes, int) or isinstance(group_bytes, bool) or group_bytes < 0:
        raise ConfigError(
            f"group_bytes={group_bytes!r} is not a size",
            where="fully_shard(model, group_bytes=...)",
            fix="pass the most bytes of parameters of a unit of several modules, e.g. 16 * 2**20, or 0",
        )
    if wrap is None:
        if group_bytes and not any(
            units_of(below) for module in modules for below in module.modules() if below is not module
        ):
            raise ConfigError(
                "group_bytes joins small units below a module, and there are none",
                where="fully_shard(model, group_bytes=...)",
                fix="shard blocks first, with fully_shard(block) for each or with wrap=Block in this call; or shard "
                "several modules as one unit with fully_shard([a, b])",
            )
        return []
    if len(modules) != 1:
        raise ConfigError(
            "wrap selects units inside one module, but a list of modules was given",
            where="fully_shard([...], wrap=...)",
            fix="call fully_shard once for each module",
        )
    (model,) = modules
    chosen = [each for each in choose_modules(model, wrap, ignored) if not units_of(each[0])]
    return [
        (members, {**options, **overrides})  # type: ignore[typeddict-item]
        for members, overrides in join_neighbors(model, chosen, group_bytes, ignored)
    ]


class _UnitPlan:
    """One unit to be made, with its arguments checked; and one beside it for each other mesh that
    ``shard_placement_fn`` chose. Making the plan changes nothing.
    """

    def __init__(
        self, modules: tuple[nn.Module, ...], ignored: set[nn.Parameter], options: UnitOptions
    ) -> None:
        exact, reshard_after_forward = options["exact"], options["reshard_after_forward"]
        self.modules = modules
        self.ignored = ignored
        self.placement_fn = options["shard_placement_fn"]
        self.name = type(modules[0]).__name__
        call = f"fully_shard({self.name})"
        _check_modules(modules, call)
        self.precision = as_record(MixedPrecisionPolicy, options["mp_policy"], f"mp_policy of {call}")
        self.offload = _as_offload_policy(options["offload_policy"], f"offload_policy of {call}")
        self.mesh = _chosen_mesh(modules, options, call)
        self.where = f"{call}, rank {self.mesh.rank}"
        self.reshard_after_forward = reshard_after_forward
        self.params = _parameters_by_mesh(modules, ignored, self.placement_fn, self.mesh, self.where)
        if reshard_after_forward == 1 and reshard_after_forward is not True:
            warnings.warn(
                "reshard_after_forward=1 keeps full parameters on every rank, as False does; True frees them",
                stacklevel=3,
            )
        self.sums = EXACT_SUMMATION if exact else DEFAULT_SUMMATION
        for mesh in self.params:
            self._after_forward(mesh)
            if exact:
                check_mesh(mesh, self.where)
            check_unit(modules, self._left_out_by(mesh), self.placement_fn, mesh, self.where)
        _check_precision_fits(modules, ignored, self.precision, self.where)

    def make_unit(self) -> None:
        """Shards the modules' parameters as one unit and adds ``FSDPModule``'s methods to the modules."""
        companions = tuple(
            self._make(mesh, self._left_out_by(mesh)) for mesh in self.params if mesh is not self.mesh
        )
        # It finds the companions' parameters in its modules, and so gathers them together with its own.
        unit = self._make(self.mesh, self.ignored, companions)
        for module in self.modules:
            module.__dict__[UNITS_ATTRIBUTE] = (unit, *companions)
            become_fsdp_module(module)
            register_as_fully_sharded(module)
        keep_state_dicts_sharded((unit, *unit.needs))

    def _make(self, mesh: DataMesh, ignored: set[nn.Parameter], companions: tuple[Unit, ...] = ()) -> Unit:
        return make_unit(
            self.name,
            self.modules,
            mesh,
            self._after_forward(mesh),
            DTensorForm(self.placement_fn),
            self.precision,
            self.offload,
            ignored,
            self.sums,
            companions,
        )

    def _after_forward(self, mesh: DataMesh) -> AfterForward:
        asked = self.reshard_after_forward
        return plan_after_forward(
            asked,
            mesh.shard.world,
            self.name,
            f"fully_shard({self.name}, reshard_after_forward={asked!r}), rank {mesh.rank}",
        )

    def _left_out_by(self, mesh: DataMesh) -> set[nn.Parameter]:
        """The parameters that are ignored, or sharded over another mesh."""
        others = (params for other, params in self.params.items() if other is not mesh)
        return self.ignored.union(*others)


def _chosen_mesh(modules: tuple[nn.Module, ...], options: UnitOptions, where: str) -> DataMesh:
    mesh, device_type, dims = options["mesh"], options["device_type"], options["dp_mesh_dims"]
    if mesh is None:
        join_launched_ranks()
        params = (param for module in modules for param in module.parameters())
        mesh = default_mesh(device_type or default_device_type(params), where)
    elif not isinstance(mesh, DeviceMesh):
        raise ConfigTypeError(
            f"mesh is a {type(mesh).__name__}, not a DeviceMesh",
            where=where,
            fix="make one with torch.distributed.device_mesh.init_device_mesh",
        )
    elif device_type not in (None, mesh.device_type):
        raise ConfigError(
            f"device_type is '{device_type}', but the mesh is one of {mesh.device_type} devices",
            where=where,
            fix="pass one of mesh and device_type",
        )
    return data_mesh(
        mesh,
        None if dims is None else as_record(DataParallelMeshDims, dims, f"dp_mesh_dims of {where}"),
        where,
    )


def _parameters_by_mesh(
    modules: tuple[nn.Module, ...],
    ignored: set[nn.Parameter],
    placement_fn: PlacementFn | None,
    mesh: DataMesh,
    where: str,
) -> dict[DataMesh, set[nn.Parameter]]:
    """Returns the parameters that belong to no unit yet by the mesh to shard them over, ``mesh`` first."""
    found = [each for each in find_parameters(modules, ignored) if each.taken is None]
    by_mesh: dict[DataMesh, set[nn.Parameter]] = {mesh: set()}
    for each in found:
        _, info = chosen_placement(each, placement_fn, where)
        chosen = mesh if info is None else mesh_of_info(info, f"parameter '{each.name}', {where}")
        if chosen.device != mesh.device:
            raise ConfigError(
                f"shard_placement_fn gives parameter '{each.name}' a mesh of {chosen.mesh.device_type} devices in a "
                f"unit on {mesh.device}",
                where=where,
                fix="use meshes of one device type in one call",
            )
        chosen = next((known for known in by_mesh if known.mesh == chosen.mesh), chosen)
        by_mesh.setdefault(chosen, set()).add(each.param)
    return by_mesh


def _as_modules(module: Any) -> tuple[nn.Module, ...]:
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    for member in modules:
        if not isinstance(member, nn.Module):
            raise ConfigTypeError(
                f"fully_shard was given a {type(member).__name__}, not a module",
                where=f"fully_shard({type(module).__name__})",
                fix="pass an nn.Module or a list of them",
            )
    if not modules:
        raise ConfigError(
            "fully_shard was given an empty list", where="fully_shard([])", fix="pass at least one module"
        )
    # A module inside another one of the list is sharded with that one.
    inside = {child for member in modules for child in member.modules() if child is not member}
    return tuple(member for member in modules if member not in inside)


def _checked_ignored(ignored: Iterable[nn.Parameter] | None) -> set[nn.Parameter]:
    result = set(ignored or ())
    for param in result:
        taken = membership(param) if isinstance(param, torch.Tensor) else None
        if taken is not None:
            raise ConfigError(
                f"ignored parameter '{taken[1].name}' is already sharded, by unit '{taken[0].name}'",
                where=f"fully_shard(ignored_params=...), rank {taken[0].rank}",
                fix="pass the same ignored_params to every call of fully_shard on this model, from the first one on",
            )
        if not isinstance(param, torch.Tensor):
            raise ConfigTypeError(
                f"ignored_params contains a {type(param).__name__}",
                where="fully_shard(ignored_params=...)",
                fix="pass the parameters themselves, e.g. set(model.adapter.parameters())",
            )
    return result


def _check_modules(modules: tuple[nn.Module, ...], where: str) -> None:
    if len(set(modules)) != len(modules):
        raise ConfigAssertionError("a module is in the list twice", where=where, fix="pass each module once")
    for module in modules:
        name = type(module).__name__
        if units_of(module):
            raise ConfigAssertionError(
                f"{name} is sharded already", where=where, fix="call fully_shard once for each module"
            )
        if is_container(module):
            raise ConfigError(
                f"{name} has no forward: it is never called, so its parameters would never be gathered",
                where=where,
                fix=f"shard the modules inside the {name}, or the module that contains it",
            )


def _as_offload_policy(policy: Any, where: str) -> OffloadPolicy:
    if policy is None:
        return _NO_OFFLOAD
    is_offloaded = is_record_named(CPUOffloadPolicy.__name__, policy)
    return as_record(CPUOffloadPolicy if is_offloaded else OffloadPolicy, policy, where)


def _check_precision_fits(
    modules: tuple[nn.Module, ...], ignored: set[nn.Parameter], precision: MixedPrecisionPolicy, where: str
) -> None:
    for found in find_parameters(modules, ignored):
        taken = found.taken
        if taken is not None and taken[0].settings.precision.param_dtype != precision.param_dtype:
            raise ConfigError(
                f"parameter '{found.name}' is tied to unit '{taken[0].name}', which computes in "
                f"{taken[0].settings.precision.param_dtype or 'its own dtype'}; this unit would compute in "
                f"{precision.param_dtype or 'its own dtype'}",
                where=f"MixedPrecisionPolicy(param_dtype=...), parameter '{found.name}', {where}",
                fix="give both units the same param_dtype",
            )
        if precision.reduce_dtype is not None and found.param.is_complex() and found.param.requires_grad:
            raise ConfigError(
                f"parameter '{found.name}' is {found.param.dtype}: reducing its gradient in {precision.reduce_dtype} "
                f"would drop the imaginary part",
                where=f"MixedPrecisionPolicy(reduce_dtype=...), parameter '{found.name}', {where}",
                fix="leave reduce_dtype out for the unit of this parameter",
            )
