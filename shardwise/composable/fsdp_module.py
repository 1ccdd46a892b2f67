"""``FSDPModule``: the methods that ``fully_shard`` adds to a module.

The class is mixed into the module's own class. Its methods check their arguments and pass them on to the module's
units; gathers, reduces and frees are the engine's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from shardwise import trace
from shardwise.comm.collectives.custom import (
    AllGather,
    ReduceScatter,
    StagedCollectives,
    group_allocate,
    symmetric_allocate,
)
from shardwise.comm.collectives.group import AllReduceHook, GroupCollectives
from shardwise.composable.state_dicts import check_fits
from shardwise.engine.reduce.exact_sums import ExactCollectives, check_not_exact
from shardwise.engine.step.agreement import forget_torn_steps
from shardwise.engine.step.joint_units import set_joint
from shardwise.engine.unit.binding import not_copied, shallow_copy
from shardwise.engine.unit.membership import UNITS_ATTRIBUTE, units_in, units_of
from shardwise.engine.unit.replaced import move_from_meta
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigAssertionError, ConfigError, ConfigTypeError
from shardwise.planning.lifecycle import FREE, KEEP
from shardwise.planning.sums import is_power_of_two
from shardwise.torch_internals import untraced_itself

if TYPE_CHECKING:
    # A sharded module keeps its class, which Python's types cannot say. A base of ``Any`` is the nearest to it: type
    # checkers see the methods below and nn.Module's, allow every other attribute, and take the result of
    # ``fully_shard(model)`` where the model's own class is expected.
    class _AnyModule(nn.Module, Any):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any: ...
else:
    _AnyModule = object

_FSDP_CLASSES: dict[type, type] = {}
_KNOWN_AS: dict[type, Callable[[nn.Module], None]] = {}


def make_known_as(cls: type, mark: Callable[[nn.Module], None]) -> None:
    """Makes every module that is sharded from now on an instance of ``cls``, too, and calls ``mark`` with it.

    Libraries recognise sharded modules by it. As the last base it does no work: ``FSDPModule`` has all its methods.
    """
    _KNOWN_AS[cls] = mark


def become_fsdp_module(module: nn.Module) -> None:
    """Changes the module's class to a subclass of ``FSDPModule`` and its own, made once for each class."""
    cls = type(module)
    if issubclass(cls, FSDPModule):
        return
    fsdp_cls = _FSDP_CLASSES.get(cls)
    if fsdp_cls is None:
        # Threads may race here and make equal classes: setdefault keeps the first.
        made = type(f"FSDP{cls.__name__}", (FSDPModule, cls, *_KNOWN_AS), {"__module__": cls.__module__})
        fsdp_cls = _FSDP_CLASSES.setdefault(cls, made)
    module.__class__ = fsdp_cls
    for mark in _KNOWN_AS.values():
        mark(module)


class UnshardHandle:
    """Returned by ``unshard(async_op=True)``: call ``wait()`` before using the parameters."""

    def __init__(self, units: tuple[Unit, ...] = ()) -> None:
        self._units = units

    def wait(self) -> None:
        """Waits for the gather and puts the unsharded parameters into the module. A second call does nothing."""
        for unit in self._units:
            unit.wait_gather()
        self._units = ()


class FSDPModule(_AnyModule):
    """The methods that a module has after ``fully_shard``, besides those of its own class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Containers call their own class to make a part of themselves (a slice of a Sequential): it is not sharded.
        plain: Any = next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))
        return plain(*args, **kwargs)

    def __copy__(self) -> Any:
        return shallow_copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise not_copied("deepcopy", type(self).__name__)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copied("pickle", type(self).__name__)

    @untraced_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not registered as forward hooks: ``module.compile()`` would trace those.
        hooks = self.__dict__[UNITS_ATTRIBUTE][0].hooks
        args, kwargs = hooks.pre_forward(self, args, kwargs)
        try:
            return hooks.post_forward(self, args, super().__call__(*args, **kwargs))
        except BaseException as error:
            hooks.forward_raised(self, error)
            raise

    # --- parameters by hand ---------------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Frees this module's unsharded parameters and puts the sharded ones back. Not recursive."""
        for unit in units_of(self):
            unit.reshard(trace.IDLE)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's parameters. Not recursive.

        With ``async_op`` it returns a handle at once; ``handle.wait()`` or the module's forward waits for the gather.
        """
        units = units_of(self)
        for unit in units:
            if unit.root.agreement.is_broken:
                unit.root.recover()
            unit.root.adopt_units()
            if unit.gathered.is_stale():
                unit.reshard(trace.IDLE)
            unit.issue_gather(trace.IDLE)
            unit.gathered.keep()
        handle = UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Cleans up after a step that raised: reshards parameters and drops gradients that are not reduced yet.

        The next forward of the root does the same; call this to free the memory at once.
        """
        for unit in units_of(self):
            unit.root.reset()
            unit.root.agreement.forget_torn_step()

    # --- settings -------------------------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Tells whether the next backward is the last one through this forward."""
        for unit in units_of(self):
            unit.root.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """With False, backward keeps unsharded gradients on this rank: for all micro-batches but the last."""
        units = _units_below(self, recurse)
        if not requires_gradient_sync:
            check_not_exact(units, "set_requires_gradient_sync(False)", "sums micro-batches before ranks")
        for unit in units:
            unit.gradients.are_synced = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Changes whether parameters are freed after forward. Called on the root, it applies to the root as well."""
        if not isinstance(reshard_after_forward, bool):
            raise ConfigTypeError(
                f"set_reshard_after_forward takes a bool, not {reshard_after_forward!r}",
                where=f"{type(self).__name__}.set_reshard_after_forward",
                fix="pass True or False; to reshard to smaller groups, pass an int to fully_shard",
            )
        for unit in _units_below(self, recurse):
            unit.configure(
                after_forward=FREE if reshard_after_forward else KEEP, after_forward_is_explicit=True
            )

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """With False, keeps parameters unsharded after backward: saves the next gather while they do not change."""
        for unit in _units_below(self, recurse):
            unit.configure(frees_after_backward=reshard_after_backward)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With False, backward accumulates reduce-scattered gradients without the all-reduce over replicas."""
        units = _units_below(self, recurse)
        if not requires_all_reduce:
            check_not_exact(units, "set_requires_all_reduce(False)", "sums micro-batches before replicas")
        for unit in units:
            unit.gradients.settings.all_reduces = requires_all_reduce

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """With False, backward does not gather this module's parameters, if it needs none (an embedding)."""
        for unit in units_of(self):
            unit.configure(gathers_in_backward=unshard_in_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides summed gradients by ``factor`` instead of the number of ranks."""
        if not factor > 0:
            raise ConfigError(
                f"gradient divide factor is {factor}, not a positive number",
                where=f"{type(self).__name__}.set_gradient_divide_factor",
                fix="pass a positive number; 1.0 gives the plain sum",
            )
        units = units_of(self)
        if not is_power_of_two(factor):
            check_not_exact(
                units, f"set_gradient_divide_factor({factor})", "rounds: its factor is not a power of two"
            )
        for unit in units:
            unit.gradients.settings.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of ``set_gradient_divide_factor``."""
        warnings.warn("use set_gradient_divide_factor instead", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduces with SUM and divides afterwards, even if the backend can average."""
        for unit in units_of(self):
            unit.gradients.settings.sums_only = enable

    def set_all_reduce_hook(self, hook: AllReduceHook, *, stream: torch.cuda.Stream | None = None) -> None:
        """Calls ``hook`` with the reduced gradients, after any all-reduce over replicas, before the last division."""
        _check_one_mesh(self, "set_all_reduce_hook")
        check_not_exact(units_of(self), "set_all_reduce_hook", "may change them for each micro-batch")
        for unit in units_of(self):
            if stream is not None and unit.mesh.replicate is not None:
                raise ConfigError(
                    "a stream was given for the all-reduce hook of a unit that has replicas",
                    where=f"{type(self).__name__}.set_all_reduce_hook, rank {unit.rank}",
                    fix="leave stream out: with replicas the hook runs on the all-reduce stream",
                )
            unit.gradients.settings.hook = hook
            unit.gradients.settings.hook_stream = stream

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Makes the next gathers wait for ``event`` instead of the current stream. Used once."""
        for unit in units_of(self):
            unit.root.post_optim_event = event

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Reduces zeros for parameters without a gradient, so that ranks may use different parameters.

        Units are then reduced at the end of backward. All ranks must still run the same forwards; a unit that only
        some ranks' backwards reach must not need a gather there (``reshard_after_forward=False``).
        """
        for unit in _units_below(self, recurse):
            unit.gradients.settings.includes_unused = reduce_scatter_unused_params or unit.settings.is_joint

    def set_safe_participation(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Lets ranks run different modules: a rank contributes zeros for modules that it does not run.

        Within the forward of the outermost sharded module each rank may run these modules any number of times, in any
        order, or not at all. All of them are gathered when that forward begins and reduced at the end of backward,
        which takes the memory of their full parameters and gradients. Gradients are averaged over all ranks; a
        parameter that no rank used gets zeros. Call it on every rank, between steps.
        """
        set_joint(_units_below(self, recurse), enable)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Limits how many reduces may hold their input at once: more overlap for more memory."""
        call = f"{type(self).__name__}.set_reduce_scatter_max_input_buffers"
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise ConfigTypeError(
                f"max_input_buffers is {max_input_buffers!r}, not an int", where=call, fix="pass 1 or more"
            )
        if max_input_buffers < 1:
            raise ConfigError(f"max_input_buffers is {max_input_buffers}", where=call, fix="pass 1 or more")
        for unit in _units_below(self, recurse):
            unit.gradients.max_inputs = max_input_buffers

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduces over a separate process group, so that reduces do not queue behind gathers.

        It creates a process group: call it on every rank.
        """
        units = _units_below(self, recurse)
        if enable:
            _check_reduce_is_free(units, "set_separate_reduce_scatter_group")
        for unit in units:
            if enable:
                unit.gradients.settings.calls = unit.mesh.separate_shard_group()
            elif _set_by(unit, unit.gradients.settings.calls) == "set_separate_reduce_scatter_group":
                unit.gradients.settings.calls = unit.mesh.shard

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gathers with ``comm``, in buffers from ``comm.allocate``. Parameters are sent as bytes."""
        setter = "set_custom_all_gather"
        _check_one_mesh(self, setter)
        units = units_of(self)
        _check_gather_is_free(units, setter)
        for unit in units:
            unit.configure(
                gather_calls=StagedCollectives(unit.mesh.shard, comm.allocate, all_gather=comm, set_by=setter)
            )

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduces with ``comm``, in buffers from ``comm.allocate``."""
        setter = "set_custom_reduce_scatter"
        _check_one_mesh(self, setter)
        units = units_of(self)
        _check_reduce_is_free(units, setter)
        for unit in units:
            unit.gradients.settings.calls = StagedCollectives(
                unit.mesh.shard, comm.allocate, reduce_scatter=comm, set_by=setter
            )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Uses buffers that the process group allocates, if its backend can."""
        setter = "set_allocate_memory_from_process_group_for_comm"
        units = units_of(self)
        if enable:
            _check_gather_is_free(units, setter)
            _check_reduce_is_free(units, setter)
        for unit in units:
            shard = unit.mesh.shard
            allocate = group_allocate(shard) if enable else None
            if allocate is not None:
                staged = StagedCollectives(shard, allocate, set_by=setter)
                unit.configure(gather_calls=staged)
                unit.gradients.settings.calls = staged
            elif not enable and _set_by(unit, unit.settings.gather_calls) == setter:
                unit.configure(gather_calls=shard)
                unit.gradients.settings.calls = shard

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Gathers through symmetric memory, which lets NCCL use faster algorithms on hardware that has them."""
        setter = "set_symm_mem_for_comm"
        units = units_of(self)
        _check_gather_is_free(units, setter)
        for unit in units:
            allocate = symmetric_allocate(unit.mesh.shard, backend, f"{type(self).__name__}.{setter}")
            unit.configure(gather_calls=StagedCollectives(unit.mesh.shard, allocate, set_by=setter))

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gathers ``modules`` when this module's forward begins."""
        chosen = _units_of_all(modules, "set_modules_to_forward_prefetch")
        for unit in units_of(self):
            unit.configure(forward_prefetch=chosen)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gathers ``modules`` when this module's backward begins, instead of the module that ran before it."""
        chosen = _units_of_all(modules, "set_modules_to_backward_prefetch")
        for unit in units_of(self):
            unit.configure(backward_prefetch=chosen)

    # --- state ----------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``; accepts full tensors too, and loads nothing if anything does not fit."""
        check_fits(self, state_dict, strict, assign)
        forget_torn_steps(units_of(self))
        return super().load_state_dict(state_dict, strict, assign)

    def share_memory(self) -> NoReturn:
        """Raises: the shards are views of one buffer and cannot be moved to shared memory one by one."""
        raise not_copied("share_memory", type(self).__name__)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # ``.to()`` and the like must be applied to the sharded parameters.
        self.reshard()
        params = [slot.sharded for unit in units_of(self) for slot in unit.slots]
        attributes = [dict(param.__dict__) for param in params]
        applied = super()._apply(*args, **kwargs)
        # torch swaps a DTensor's contents and drops attributes that users have set on the parameter.
        for param, kept in zip(params, attributes, strict=True):
            param.__dict__.update({**kept, **param.__dict__})
        for unit in units_of(self):
            move_from_meta(unit)
        return applied


def _units_below(module: Any, recurse: bool) -> list[Unit]:
    return units_in(module.modules() if recurse else (module,))


def _check_one_mesh(module: Any, setter: str) -> None:
    """Raises if the module's parameters are sharded over several meshes: a user's function may fit only one of them."""
    units = units_of(module)
    if len(units) > 1:
        meshes = ", ".join(str(unit.mesh.mesh) for unit in units)
        raise ConfigError(
            f"{setter} was called on a module with parameters on {len(units)} meshes: {meshes}",
            where=f"{type(module).__name__}.{setter}, rank {units[0].rank}",
            fix="shard the parameters of each mesh in a module of their own",
        )


def _set_by(unit: Unit, calls: GroupCollectives) -> str:
    """The name of the method that set these collectives; empty for the default ones."""
    if calls is unit.mesh.shard:
        return ""
    return (
        calls.set_by
        if isinstance(calls, (StagedCollectives, ExactCollectives))
        else "set_separate_reduce_scatter_group"
    )


def _check_gather_is_free(units: Iterable[Unit], setter: str) -> None:
    for unit in units:
        _check_is_free(unit, "gathers", _set_by(unit, unit.settings.gather_calls), setter)


def _check_reduce_is_free(units: Iterable[Unit], setter: str) -> None:
    for unit in units:
        _check_is_free(unit, "reduces", _set_by(unit, unit.gradients.settings.calls), setter)


def _check_is_free(unit: Unit, collectives: str, other: str, setter: str) -> None:
    """Raises if ``setter`` would silently replace what another method has set."""
    if other not in ("", setter):
        raise ConfigAssertionError(
            f"{setter} conflicts with {other}, which already sets how unit '{unit.name}' {collectives}",
            where=f"{setter}, unit '{unit.name}', rank {unit.rank}",
            fix=f"call {other} or {setter}, not both",
        )


def _units_of_all(modules: list[FSDPModule], call: str) -> tuple[Unit, ...]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigTypeError(
                f"{call} was given a {type(module).__name__}, which is not sharded",
                where=call,
                fix="pass modules on which fully_shard was called",
            )
    return tuple(unit for module in modules for unit in units_of(module))
