"""``FSDPModule``: what a sharded module can do besides being the module it was.

The class is mixed into the module's own when it is sharded. Its methods translate: a module's settings become those of
its units, and what happens is the engine's business.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NoReturn, cast

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
from shardwise.engine.exact.exact_collectives import ExactCollectives
from shardwise.engine.exact.exact_sums import check_not_exact
from shardwise.engine.step.agreement import forget_torn_steps
from shardwise.engine.step.joint_units import set_joint
from shardwise.engine.unit.binding import not_copied
from shardwise.engine.unit.membership import UNITS_ATTRIBUTE, units_of
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError, ConfigTypeError
from shardwise.plan.schedule import FREE, KEEP
from shardwise.plan.sums import is_power_of_two
from shardwise.torch_internals import untraced_itself

_FSDP_CLASSES: dict[type, type] = {}


def become_fsdp_module(module: nn.Module) -> None:
    cls = type(module)
    if issubclass(cls, FSDPModule):
        return
    fsdp_cls = _FSDP_CLASSES.get(cls)
    if fsdp_cls is None:
        # Threads that race here make equal classes; one of them stays.
        made = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
        fsdp_cls = _FSDP_CLASSES.setdefault(cls, made)
    module.__class__ = fsdp_cls


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns: wait on it before using the parameters."""

    def __init__(self, units: tuple[Unit, ...] = ()) -> None:
        self._units = units

    def wait(self) -> None:
        """Makes the unsharded parameters usable and shows them in the module. Waiting twice does no harm."""
        for unit in self._units:
            unit.wait_gather()
        self._units = ()


class FSDPModule:
    """What a sharded module can do besides being the module it was."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Containers build parts of themselves by calling their class (slicing a Sequential): those are plain.
        plain: Any = cls.__mro__[2]
        return plain(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise not_copied("deepcopy", type(self).__name__)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copied("pickle", type(self).__name__)

    @untraced_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Around all of the module's call, not as hooks inside it: ``module.compile()`` traces hooks too.
        hooks = self.__dict__[UNITS_ATTRIBUTE][0].hooks
        args, kwargs = hooks.pre_forward(self, args, kwargs)
        try:
            return hooks.post_forward(self, args, super().__call__(*args, **kwargs))  # type: ignore[misc]
        except BaseException as error:
            hooks.forward_raised(self, error)
            raise

    # --- parameters by hand ---------------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Frees this module's unsharded parameters, if it has any, and shows the sharded ones. Not recursive."""
        for unit in _own_units(self):
            unit.reshard(trace.IDLE)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's parameters. Not recursive.

        With ``async_op`` the gather runs in the background: the handle's ``wait()``, or the module's own forward,
        waits for it.
        """
        units = _own_units(self)
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
        """Forgets a step that raised: parameters are sharded again, gradients half way are dropped.

        The next forward of the root does this by itself; call it to have the memory back at once.
        """
        for unit in _own_units(self):
            unit.root.reset()
            unit.root.agreement.forget_torn_step()

    # --- settings -------------------------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Says whether the next backward is the last one through this forward."""
        for unit in _own_units(self):
            unit.root.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Without sync, gradients stay unsharded on this rank: for micro-batches before the last one."""
        units = _units_below(self, recurse)
        if not requires_gradient_sync:
            check_not_exact(units, "set_requires_gradient_sync(False)", "sums micro-batches before ranks")
        for unit in units:
            unit.gradients.are_synced = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Changes what is kept after forward; said to the root itself, it holds for the root too."""
        if not isinstance(reshard_after_forward, bool):
            raise ConfigTypeError(
                f"set_reshard_after_forward takes a bool, not {reshard_after_forward!r}",
                where=f"{type(self).__name__}.set_reshard_after_forward",
                fix="pass True or False; an int is given to fully_shard, which makes its groups",
            )
        for unit in _units_below(self, recurse):
            unit.configure(
                after_forward=FREE if reshard_after_forward else KEEP, after_forward_is_explicit=True
            )

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Keeps parameters unsharded after backward, to save the next forward's gather while they do not change."""
        for unit in _units_below(self, recurse):
            unit.configure(frees_after_backward=reshard_after_backward)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With replicas: puts the sum over them off, while the sum over shards goes on and accumulates."""
        units = _units_below(self, recurse)
        if not requires_all_reduce:
            check_not_exact(units, "set_requires_all_reduce(False)", "sums micro-batches before replicas")
        for unit in units:
            unit.gradients.settings.all_reduces = requires_all_reduce

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Says that backward does not need this module's parameters (an embedding's, say), so none are gathered."""
        for unit in _own_units(self):
            unit.configure(gathers_in_backward=unshard_in_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides summed gradients by ``factor`` instead of the number of ranks."""
        if not factor > 0:
            raise ConfigError(
                f"a gradient divide factor of {factor} divides nothing",
                where=f"{type(self).__name__}.set_gradient_divide_factor",
                fix="pass a number above zero; 1.0 gives the plain sum",
            )
        units = _own_units(self)
        if not is_power_of_two(factor):
            check_not_exact(
                units, f"set_gradient_divide_factor({factor})", "rounds: its factor is no power of two"
            )
        for unit in units:
            unit.gradients.settings.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of ``set_gradient_divide_factor``."""
        warnings.warn("use set_gradient_divide_factor instead", FutureWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Uses plain sums on the wire, divided here, even where the group could average."""
        for unit in _own_units(self):
            unit.gradients.settings.sums_only = enable

    def set_all_reduce_hook(self, hook: AllReduceHook, *, stream: torch.cuda.Stream | None = None) -> None:
        """Calls ``hook`` with the reduced row (summed over replicas, if there are any) before its last division."""
        check_not_exact(_own_units(self), "set_all_reduce_hook", "may change them for each micro-batch")
        for unit in _own_units(self):
            if stream is not None and unit.mesh.replicate is not None:
                raise ConfigError(
                    "a stream was given for the all-reduce hook of a unit that has replicas",
                    where=f"{type(self).__name__}.set_all_reduce_hook, rank {unit.rank}",
                    fix="leave the stream out: with replicas the hook runs on the engine's own",
                )
            unit.gradients.settings.hook = hook
            unit.gradients.settings.hook_stream = stream

    def set_post_optim_event(self, event: torch.Event) -> None:
        """The next gathers wait for ``event`` instead of everything on the current stream; used once."""
        for unit in _own_units(self):
            unit.root.post_optim_event = event

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Counts parameters without a gradient as zero, for ranks that use different ones.

        Reduces then wait for the end of backward, where ranks know what came in. Ranks still run the same forwards; a
        unit that only some backwards reach must not be gathered for them (``reshard_after_forward=False``).
        """
        for unit in _units_below(self, recurse):
            unit.gradients.settings.includes_unused = reduce_scatter_unused_params or unit.settings.is_joint

    def set_safe_participation(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Lets ranks run different modules: what a rank does not run, it joins in with zeros.

        Within the forward of the outermost sharded module, a rank may then run these modules or not, in any order and
        as often as it likes. They are gathered together when that forward begins, kept to the end of backward and
        reduced there: it takes the memory of their full parameters and gradients. Gradients are averages over all
        ranks; a parameter that no rank has used gets zeros. Call it on all ranks alike, between steps.
        """
        set_joint(_units_below(self, recurse), enable)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reduces may have their input in memory at once; more overlap for more memory."""
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
        """Reduces over a process group of their own, so that they need not queue up behind gathers.

        Call it on all ranks alike: it makes a group.
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
        """Gathers with ``comm`` and in buffers from its ``allocate``. Parameters travel as bytes."""
        setter = "set_custom_all_gather"
        units = _own_units(self)
        _check_gather_is_free(units, setter)
        for unit in units:
            unit.configure(
                gather_calls=StagedCollectives(unit.mesh.shard, comm.allocate, all_gather=comm, set_by=setter)
            )

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduces with ``comm`` and in buffers from its ``allocate``."""
        setter = "set_custom_reduce_scatter"
        units = _own_units(self)
        _check_reduce_is_free(units, setter)
        for unit in units:
            unit.gradients.settings.calls = StagedCollectives(
                unit.mesh.shard, comm.allocate, reduce_scatter=comm, set_by=setter
            )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Sends and receives through memory of the process group's own, where its backend offers any."""
        setter = "set_allocate_memory_from_process_group_for_comm"
        units = _own_units(self)
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
        """Gathers through symmetric memory, for NCCL's faster ways where the hardware has them."""
        setter = "set_symm_mem_for_comm"
        units = _own_units(self)
        _check_gather_is_free(units, setter)
        for unit in units:
            allocate = symmetric_allocate(unit.mesh.shard, backend, f"{type(self).__name__}.{setter}")
            unit.configure(gather_calls=StagedCollectives(unit.mesh.shard, allocate, set_by=setter))

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gathers these modules when this one's forward begins."""
        chosen = _units_of_all(modules, "set_modules_to_forward_prefetch")
        for unit in _own_units(self):
            unit.configure(forward_prefetch=chosen)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gathers these modules when this one's backward begins, instead of the one that ran before it."""
        chosen = _units_of_all(modules, "set_modules_to_backward_prefetch")
        for unit in _own_units(self):
            unit.configure(backward_prefetch=chosen)

    # --- state ----------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``; takes whole tensors too, and loads nothing from what does not fit."""
        check_fits(cast(nn.Module, self), state_dict, strict, assign)
        forget_torn_steps(_own_units(self))
        return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]

    def share_memory(self) -> NoReturn:
        """Refused: parts of one buffer cannot be moved to shared memory one by one."""
        raise not_copied("share_memory", type(self).__name__)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # ``.to()`` and the like must find the sharded parameters, not the unsharded ones.
        self.reshard()
        params = [slot.sharded for unit in _own_units(self) for slot in unit.slots]
        attributes = [dict(param.__dict__) for param in params]
        applied = super()._apply(*args, **kwargs)  # type: ignore[misc]
        # torch gives a DTensor a new body and drops what users have set on the old one.
        for param, kept in zip(params, attributes, strict=True):
            param.__dict__.update({**kept, **param.__dict__})
        for unit in _own_units(self):
            unit.move_from_meta()
        return applied


def _own_units(module: Any) -> tuple[Unit, ...]:
    return units_of(module)


def _units_below(module: Any, recurse: bool) -> list[Unit]:
    modules = module.modules() if recurse else (module,)
    return list(dict.fromkeys(unit for member in modules for unit in units_of(member)))


def _set_by(unit: Unit, calls: GroupCollectives) -> str:
    """The setting that chose these calls; empty for those that a unit is born with."""
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


def _check_is_free(unit: Unit, does: str, other: str, setter: str) -> None:
    """One setting would silently put the other aside."""
    if other not in ("", setter):
        raise ConfigError(
            f"unit '{unit.name}' {does} the way {other} says, and {setter} says another",
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
    return tuple(unit for module in modules for unit in _own_units(module))
