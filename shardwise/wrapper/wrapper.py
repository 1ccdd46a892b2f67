"""``FullyShardedDataParallel``: the wrapper API. The parameters of each wrapped module are flattened and sharded.

    for i, block in enumerate(model.blocks):
        model.blocks[i] = FullyShardedDataParallel(block)
    model = FullyShardedDataParallel(model)        # or in one call: auto_wrap_policy=ModuleWrapPolicy({Block})

Signatures are torch's FSDP1's. ``wrapper_plan`` checks all arguments before the first module changes; gathers and
reduces are the engine's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.gather.full_tensors import is_flat
from shardwise.engine.reduce.exact_sums import check_not_exact
from shardwise.engine.step.joint_units import set_joint
from shardwise.engine.unit.binding import (
    CHECKPOINTED_NAME,
    WRAPPED_NAME,
    clean_name,
    not_copied,
    shallow_copy,
)
from shardwise.engine.unit.membership import membership, units_in, units_of
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigAssertionError, ConfigError, StateAssertionError, StateError
from shardwise.torch_internals import (
    children_of,
    debugs_in_detail,
    inside_backward,
    untraced,
    untraced_itself,
)
from shardwise.training_step.clip_grad_norm import clip_grad_norm_, dtype_of_gradients
from shardwise.wrapper.execution_order import ForwardPrefetch, OrderCheck, order_observers
from shardwise.wrapper.flat_handle import step_in_backward
from shardwise.wrapper.mixed_precision import EvalPrecision, full_in_eval
from shardwise.wrapper.model_methods import names_for_torch
from shardwise.wrapper.model_state import LoadHooks
from shardwise.wrapper.options import (
    OPTION_NAMES,
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from shardwise.wrapper.read_attributes import ReadAttributes
from shardwise.wrapper.summon_full_params import (
    SUMMONED_ATTRIBUTE,
    check_has_full_parameters,
    flat_parameters_shown,
    idle_units,
    is_summoned,
    summoned,
)
from shardwise.wrapper.wrapper_plan import WrapperPlan, plan_wrappers


class FullyShardedDataParallel(ReadAttributes):
    """Shards a module's parameters, gradients and optimizer state over ranks, behind torch's FSDP1 interface.

    Args:
        module: the module to wrap; parameters of wrappers inside it stay with those.
        process_group: the ranks to shard over; for the hybrid strategies a pair (shard, replicate). Default: all.
        sharding_strategy: see ``ShardingStrategy``. Default: FULL_SHARD.
        cpu_offload: ``CPUOffload(offload_params=True)`` keeps shards in host memory.
        auto_wrap_policy: which submodules are wrapped first.
        backward_prefetch: when backward gathers the next unit; None: when the unit is needed.
        mixed_precision: dtypes to compute and reduce in.
        ignored_modules: modules whose parameters are not sharded.
        param_init_fn: allocates and initializes a module that is on the meta device.
        device_id: the device to compute on. Default: the process group's.
        sync_module_states: broadcast the first rank's parameters and buffers to all ranks.
        forward_prefetch: gather the next unit before the forward of the current one, in the order of the last forward.
        limit_all_gathers: accepted for compatibility; memory in flight is always bounded.
        use_orig_params: keep the original parameter names, instead of one flat parameter for each dtype and
            ``requires_grad``.
        ignored_states: parameters or modules that are not sharded.
        device_mesh: one axis, or two (replicate, shard) for the hybrid strategies; instead of ``process_group``.
        exact: sum gradients in one fixed order over micro-batches, as ``fully_shard(exact=True)`` does.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        exact: bool = False,
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        given = {name: arguments[name] for name in OPTION_NAMES}
        plans = plan_wrappers(module, given, auto_wrap_policy, ignored_modules, ignored_states)
        for plan in plans[:-1]:
            inner = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
            nn.Module.__init__(inner)
            inner._wrap(plan)
            for parent, name in plan.parents:
                setattr(parent, name, inner)
        self._wrap(plans[-1])

    def _wrap(self, plan: WrapperPlan) -> None:
        setattr(self, WRAPPED_NAME, plan.module)
        for inner in self.fsdp_modules(plan.module):
            inner._is_inner = True
        self._is_inner = False
        # Whether the wrapper around this one has been asked whether it is the root.
        self._has_root = False
        self._has_run = False
        self._is_called_by_wrapper = False
        self._observers: tuple[OrderCheck | ForwardPrefetch, ...] = ()
        self._plan = plan
        self._unit = plan.make_unit(self)
        precision = plan.options.mixed_precision
        self._root_dtype = precision.param_dtype if precision.cast_root_forward_inputs else None
        self._eval_precision = (
            EvalPrecision(self._unit, plan.own_modules, precision) if full_in_eval() else None
        )
        self._load_hooks = LoadHooks()
        self.register_load_state_dict_pre_hook(self._load_hooks.before)
        self.register_load_state_dict_post_hook(self._load_hooks.after)

    # --- the module inside ----------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module; of one wrapped for activation checkpointing, the module inside."""
        wrapped: nn.Module = self._modules[WRAPPED_NAME]  # type: ignore[assignment]
        inside = children_of(wrapped).get(CHECKPOINTED_NAME)
        return wrapped if inside is None else inside

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED_NAME:
                raise
            return getattr(self._modules[WRAPPED_NAME], name)

    def __getitem__(self, key: Any) -> Any:
        return self.module.__getitem__(key)  # type: ignore[operator]

    def __copy__(self) -> Any:
        return shallow_copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise not_copied("deepcopy", type(self).__name__)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copied("pickle", type(self).__name__)

    @property
    def _units(self) -> list[Unit]:
        """The units of this wrapper and of the wrappers inside it."""
        return units_in(self.modules())

    @untraced_itself
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        attributes = self.__dict__
        unit: Unit = attributes["_unit"]
        if SUMMONED_ATTRIBUTE in attributes:
            check_has_full_parameters(unit)
            return attributes["_modules"][WRAPPED_NAME](*args, **kwargs)
        root, hooks = unit.root, unit.hooks
        is_top = unit.position.is_top and not hooks.is_running
        if is_top:
            self._begin_forward()
        # An inner wrapper that is called by itself casts its inputs as the outermost one does.
        dtype = attributes["_root_dtype"] if is_top or not root.is_busy else None
        if dtype is not None and attributes["_eval_precision"] is not None and not self.module.training:
            dtype = None
        observers = attributes["_observers"]
        if observers and (is_top or root.in_forward):
            for observer in observers:
                observer.before_unit(unit)
        args, kwargs = hooks.pre_forward(self, args, kwargs, dtype)
        try:
            output = attributes["_modules"][WRAPPED_NAME](*args, **kwargs)
            if observers and is_top:
                for observer in observers:
                    observer.end_forward()
            return hooks.post_forward(self, args, output)
        except BaseException as error:
            hooks.forward_raised(self, error)
            raise

    def _enter_method(self, args: Any, kwargs: Any) -> Any:
        """Gathers before a method that ``register_fsdp_forward_method`` has registered; returns its inputs, cast."""
        is_outermost = self._unit.position.is_top or not self._unit.root.is_busy
        return self._unit.hooks.pre_forward(self, args, kwargs, self._root_dtype if is_outermost else None)

    @untraced
    def _begin_forward(self) -> None:
        """Before the outermost forward: follows eval mode, and tells observers of the execution order, if any.

        Before the first one, finds optimizers that torch gave parameters to be stepped in backward.
        """
        if not self._has_run:
            for wrapper in self.fsdp_modules(self):
                if not wrapper._has_run:
                    step_in_backward(wrapper._unit)
                    wrapper._has_run = True
        if self._eval_precision is not None and not inside_backward():
            for wrapper in self.fsdp_modules(self):
                if wrapper._eval_precision is not None:
                    wrapper._eval_precision.follow(wrapper.module.training)
        forward_prefetch = self._plan.options.forward_prefetch
        if not (debugs_in_detail() or forward_prefetch) or inside_backward():
            return
        if not self._observers:
            observers = order_observers(self._unit, forward_prefetch)
            for module in self.fsdp_modules(self):
                module._observers = observers
        for observer in self._observers:
            observer.begin_forward()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module.named_parameters``, but always shards.

        Names are those of the unwrapped model, unless there are flat parameters: these have no names there.
        """
        for unit in self._units:
            # What a user froze or thawed as gathered comes before what happens to the shards; modules show those, too.
            if unit.gathered.kept_version is not None:
                unit.gathered.keep(is_hidden=True)
        with flat_parameters_shown(self._units):
            found = list(super().named_parameters(*args, **kwargs))
        removes_duplicates = kwargs.get("remove_duplicate", args[2] if len(args) > 2 else True)
        given: set[int] = set()
        for name, param in found:
            sharded: nn.Parameter | None = param
            own = membership(param)
            if own is not None and own[1].unsharded is param:
                sharded = own[1].sharded if own[1].is_shown else None
            # Of a parameter and its shard, modules may show both: under a name that has just been tied, and its own.
            if sharded is not None and not (removes_duplicates and id(sharded) in given):
                given.add(id(sharded))
                yield self._shown_name(name), sharded

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As ``nn.Module.named_buffers``, under names like those of parameters."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._shown_name(name), buffer

    def _shown_name(self, name: str) -> str:
        return clean_name(name) if self._use_orig_params or is_summoned(self._unit) else name

    def _fqn_modifiers(self) -> dict[str, str]:
        return names_for_torch(self)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # ``.to()`` and the like must be applied to the sharded parameters.
        with self._calls_inner_wrappers() as by_user:
            if by_user:
                # All of them at once: from now on, units are converted parameter by parameter.
                idle_units(self.modules(), "a conversion")
            return super()._apply(*args, **kwargs)

    @contextmanager
    def _calls_inner_wrappers(self) -> Iterator[bool]:
        """For a method that calls itself on the wrappers inside; yields whether no wrapper has called it."""
        by_user = not self._is_called_by_wrapper
        wrappers = self.fsdp_modules(self) if by_user else []
        for wrapper in wrappers:
            wrapper._is_called_by_wrapper = True
        try:
            yield by_user
        finally:
            for wrapper in wrappers:
                wrapper._is_called_by_wrapper = False

    def reset_iter_state(self) -> None:
        """Cleans up after a step that raised, as ``FSDPModule.reset_iter_state``; the next forward does the same."""
        for unit in units_of(self):
            unit.root.reset()
            unit.root.agreement.forget_torn_step()

    # --- accumulation ---------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates unsharded gradients on this rank; the first backward after it reduces their sum.

        It needs the memory of full gradients. Without ``no_sync``, sharded gradients accumulate.
        """
        self._check_outermost("no_sync")
        units = self._units
        check_not_exact(units, "no_sync", "sums micro-batches before ranks")
        before = [(unit.gradients.are_synced, unit.settings.frees_after_backward) for unit in units]
        for unit in units:
            unit.gradients.are_synced = False
            # Parameters that are kept after forward are kept for the next micro-batch too: no optimizer steps between.
            unit.configure(frees_after_backward=unit.settings.after_forward.frees)
        try:
            yield
        finally:
            for unit, (syncs, frees) in zip(units, before, strict=True):
                unit.gradients.are_synced = syncs
                unit.configure(frees_after_backward=frees)

    def set_safe_participation(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Lets ranks run different wrapped modules, as ``FSDPModule.set_safe_participation`` does."""
        set_joint(self._units if recurse else units_of(self), enable)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their total norm is at most ``max_norm``; returns the norm before scaling.

        The norm is that of the unsharded model, for any mix of strategies and ignored parameters; every rank must call
        it. It is computed in float32 or wider and returned in the promoted dtype of all gradients, as in torch.
        """
        self._check_outermost("clip_grad_norm_")
        params = list(self.parameters())
        total = clip_grad_norm_(params, float(max_norm), float(norm_type))
        own = [param for param in params if param.numel()]
        if own and all(param.grad is None for param in own):
            warnings.warn(
                f"clip_grad_norm_ found no gradients on rank {self.rank}: the norm is in {total.dtype}",
                stacklevel=2,
            )
        return total.to(dtype_of_gradients(params) or total.dtype)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Calls ``hook(state, full_gradients, own_shard)`` to reduce gradients; the hook must fill ``own_shard``.

        With NO_SHARD it is ``hook(state, gradients)``, in place. The hook must average: nothing is divided after it.
        """
        self._check_outermost("register_comm_hook", error=StateAssertionError)
        check_not_exact(self._units, "register_comm_hook", "sums them in an order of its own")
        if not callable(hook):
            raise ConfigError(
                f"the communication hook is a {type(hook).__name__}",
                where="register_comm_hook",
                fix="pass a function hook(state, full_gradients, own_shard)",
            )
        reduce_with_hook(self._units, state, hook)

    def _check_outermost(self, call: str, error: type[StateError] = StateError) -> None:
        """Raises on a wrapper inside another one, once that one is used as a whole."""
        is_alone = self._unit.position.is_top and not self._has_root
        if not self.check_is_root() and not is_alone:
            raise error(
                f"{call} was called on a wrapper inside another one",
                where=f"{type(self).__name__}.{call}, rank {self._unit.rank}",
                fix=f"call {call} on the outermost wrapper: it works on the whole model",
            )

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """As ``nn.Module.apply``, with full parameters; what ``fn`` changes is written back to the shards."""
        with self._calls_inner_wrappers() as by_user:
            is_full = is_summoned(self._unit)
            if is_full and by_user:
                raise ConfigError(
                    "apply was called inside summon_full_params",
                    where=f"{type(self).__name__}.apply, rank {self._unit.rank}",
                    fix="call apply outside: it gathers full parameters itself, and writes changes back",
                )
            with nullcontext() if is_full else summoned(self, recurse=False):
                return super().apply(fn)


def reduce_with_hook(units: Iterable[Unit], state: object, hook: Callable[..., object]) -> None:
    """Makes ``hook`` reduce the gradients of all ``units``; checks all of them before it changes the first."""
    flat_units = [unit for unit in units if is_flat(unit)]
    for unit in flat_units:
        where = f"register_comm_hook, unit '{unit.name}', rank {unit.rank}"
        if unit.mesh.replicate is not None and unit.mesh.shard.world > 1:
            raise ConfigAssertionError(
                "hybrid strategies reduce in two stages, a communication hook only in one",
                where=where,
                fix="use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD",
            )
        if unit.gradients.settings.comm_hook is not None:
            raise StateAssertionError(
                "a communication hook is registered already", where=where, fix="register only one hook"
            )
    for unit in flat_units:
        unit.gradients.settings.use_hook(unit.mesh.shard, unit.mesh.replicate, state, hook)
