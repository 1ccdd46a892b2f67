"""``FullyShardedDataParallel``: the wrapping face. A wrapped module's parameters are sharded as one flat line.

    for i, block in enumerate(model.blocks):
        model.blocks[i] = FullyShardedDataParallel(block)
    model = FullyShardedDataParallel(model)        # or in one call: auto_wrap_policy=ModuleWrapPolicy({Block})

Signatures are torch's. Everything is checked before the first module changes; then the engine takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import trace
from shardwise.engine.exact.exact_sums import check_not_exact
from shardwise.engine.gather.full_tensors import is_flat
from shardwise.engine.step.joint_units import set_joint
from shardwise.engine.unit.binding import WRAPPED_NAME, clean_name, not_copied
from shardwise.engine.unit.factory import make_unit
from shardwise.engine.unit.flat_form import FlatForm
from shardwise.engine.unit.membership import units_of
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError, StateError
from shardwise.torch_internals import debugs_in_detail, inside_backward, untraced, untraced_itself
from shardwise.training_step.clip_grad_norm import clip_grad_norm_, dtype_of_gradients
from shardwise.wrapper.execution_order import watchers_of
from shardwise.wrapper.model_methods import ModelMethods
from shardwise.wrapper.model_state import LoadHooks
from shardwise.wrapper.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from shardwise.wrapper.summon_full_params import (
    WHOLE_ATTRIBUTE,
    check_shows_whole,
    is_shown_whole,
    shown_whole,
)
from shardwise.wrapper.torch_state_dicts import names_in
from shardwise.wrapper.wrapper_options import WrapperOptions
from shardwise.wrapper.wrapper_plan import WrapperPlan, plan_wrappers


class FullyShardedDataParallel(WrapperOptions, ModelMethods):
    """Shards a module's parameters, gradients and optimizer state over ranks, behind torch's FSDP1 interface.

    Args:
        module: the module to wrap; nested wrappers take their parameters first.
        process_group: the ranks to shard over; for the hybrid strategies a pair (shard, replicate). Default: all.
        sharding_strategy: see ``ShardingStrategy``. Default: FULL_SHARD.
        cpu_offload: ``CPUOffload(offload_params=True)`` keeps shards in host memory.
        auto_wrap_policy: which modules below are wrapped first.
        backward_prefetch: when backward gathers the next unit, or None for not before it is needed.
        mixed_precision: dtypes to compute and reduce in.
        ignored_modules: modules whose parameters are left alone.
        param_init_fn: gives a module on the meta device memory and values.
        device_id: the device to compute on. Default: the process group's.
        sync_module_states: start from the first rank's parameters and buffers on every rank.
        forward_prefetch: gather the next unit before the forward of the present one, in the order of the last forward.
        limit_all_gathers: taken for compatibility; memory in flight is always bounded.
        use_orig_params: show shards under the original names, instead of one flat parameter for each dtype and
            ``requires_grad``.
        ignored_states: parameters or modules to leave alone.
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
        super().__init__()
        wrappings = plan_wrappers(
            module,
            {
                "process_group": process_group,
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "device_id": device_id,
                "forward_prefetch": forward_prefetch,
                "use_orig_params": use_orig_params,
                "device_mesh": device_mesh,
                "param_init_fn": param_init_fn,
                "sync_module_states": sync_module_states,
                "exact": exact,
            },
            auto_wrap_policy,
            ignored_modules,
            ignored_states,
        )
        for wrapping in wrappings[:-1]:
            inner = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
            nn.Module.__init__(inner)
            inner._wrap(wrapping)
            for parent, name in wrapping.places:
                setattr(parent, name, inner)
        self._wrap(wrappings[-1])

    def _wrap(self, wrapping: WrapperPlan) -> None:
        module = wrapping.module
        setattr(self, WRAPPED_NAME, module)
        for inner in module.modules():
            if isinstance(inner, FullyShardedDataParallel):
                inner.__dict__["_is_inner"] = True
        self.__dict__["_is_inner"] = False
        self.__dict__["_watchers"] = ()
        self.__dict__["_wrapping"] = wrapping
        unit = make_unit(
            type(module).__name__,
            (self,),
            wrapping.mesh,
            wrapping.strategy.after_forward,
            FlatForm(
                None if wrapping.use_orig_params else self,
                wrapping.as_stored,
                wrapping.precision.keep_low_precision_grads,
            ),
            wrapping.precision.policy(),
            wrapping.offload,
            wrapping.ignored,
            wrapping.sums,
        )
        wrapping.set_up(unit)
        self.__dict__["_unit"] = unit
        precision = wrapping.precision
        self.__dict__["_root_dtype"] = precision.param_dtype if precision.cast_root_forward_inputs else None
        hooks = LoadHooks()
        self.register_load_state_dict_pre_hook(hooks.before)
        self.register_load_state_dict_post_hook(hooks.after)
        self.__dict__["_load_hooks"] = hooks

    # --- the module inside ----------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        wrapped: nn.Module = self._modules[WRAPPED_NAME]  # type: ignore[assignment]
        return wrapped

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED_NAME:
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise not_copied("deepcopy", type(self).__name__)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copied("pickle", type(self).__name__)

    @property
    def _units(self) -> list[Unit]:
        """The units of this wrapper and of those below it."""
        return list(dict.fromkeys(unit for module in self.modules() for unit in units_of(module)))

    @untraced_itself
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        attributes = self.__dict__
        unit: Unit = attributes["_unit"]
        if WHOLE_ATTRIBUTE in attributes:
            check_shows_whole(unit)
            return attributes["_modules"][WRAPPED_NAME](*args, **kwargs)
        root, hooks = unit.root, unit.hooks
        is_top = unit.is_top and not hooks.is_running
        if is_top:
            self._begin()
        # Run alone, it is the outermost for once.
        dtype = attributes["_root_dtype"] if is_top or not root.is_busy else None
        watchers = attributes["_watchers"]
        if watchers and (is_top or root.in_forward):
            for watcher in watchers:
                watcher.passes(unit)
        args, kwargs = hooks.pre_forward(self, args, kwargs, dtype)
        try:
            output = attributes["_modules"][WRAPPED_NAME](*args, **kwargs)
            if watchers and is_top:
                for watcher in watchers:
                    watcher.end()
            return hooks.post_forward(self, args, output)
        except BaseException as error:
            hooks.forward_raised(self, error)
            raise

    def _enter_method(self, args: Any, kwargs: Any) -> Any:
        """What a method of the wrapped module that counts as a forward does first, with its inputs."""
        unit: Unit = self.__dict__["_unit"]
        is_outermost = unit.is_top or not unit.root.is_busy
        return unit.hooks.pre_forward(
            self, args, kwargs, self.__dict__["_root_dtype"] if is_outermost else None
        )

    @untraced
    def _begin(self) -> None:
        """What the outermost wrapper does before its forward."""
        if debugs_in_detail() or self.__dict__["_wrapping"].forward_prefetch:
            self._begin_watching()

    def _begin_watching(self) -> None:
        """Gives all wrappers of this model what watches their order, and begins a forward of it."""
        if inside_backward():
            return
        watchers = self.__dict__["_watchers"]
        if not watchers:
            wrapping: WrapperPlan = self.__dict__["_wrapping"]
            watchers = watchers_of(self.__dict__["_unit"], wrapping.forward_prefetch)
            for module in self.fsdp_modules(self):
                module.__dict__["_watchers"] = watchers
        for watcher in watchers:
            watcher.begin()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module, with names as if nothing were wrapped; shards, also while a unit is unsharded."""
        shown = {
            id(slot.unsharded): slot.sharded if slot.is_shown else None
            for unit in self._units
            for slot in unit.slots
        }
        for name, param in super().named_parameters(*args, **kwargs):
            sharded = shown.get(id(param), param)
            if sharded is not None:
                yield clean_name(name), sharded

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean_name(name), buffer

    def _fqn_modifiers(self) -> dict[str, str]:
        return names_in(self.__dict__["_unit"])

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # ``.to()`` and the like must find the shards, not the unsharded parameters.
        for unit in units_of(self):
            unit.reshard(trace.IDLE)
        return super()._apply(*args, **kwargs)

    def reset_iter_state(self) -> None:
        """Forgets a step that raised, as ``FSDPModule.reset_iter_state``; the next forward does so by itself."""
        for unit in units_of(self):
            unit.root.reset()
            unit.root.agreement.forget_torn_step()

    # --- accumulation ---------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, gradients stay whole on this rank; the first backward after it reduces their sum.

        They take the memory of full gradients. Without ``no_sync`` gradients accumulate in their shards.
        """
        self._check_outermost("no_sync")
        units = self._units
        check_not_exact(units, "no_sync", "sums micro-batches before ranks")
        before = [(unit.gradients.are_synced, unit.settings.frees_after_backward) for unit in units]
        for unit in units:
            unit.gradients.are_synced = False
            # What is kept after forward is kept for the next micro-batch too: nothing changes it in between.
            unit.configure(frees_after_backward=unit.settings.after_forward.frees)
        try:
            yield
        finally:
            for unit, (syncs, frees) in zip(units, before, strict=True):
                unit.gradients.are_synced = syncs
                unit.configure(frees_after_backward=frees)

    def set_safe_participation(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Lets ranks run different wrapped modules: what a rank does not run, it joins in with zeros.

        As ``FSDPModule.set_safe_participation``.
        """
        set_joint(self._units if recurse else units_of(self), enable)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients of the model down to a norm of at most ``max_norm``; returns the norm before.

        As of the unsharded model, whatever mix of strategies and ignored parameters it has; every rank must call it.
        The norm is computed in float32 or wider, and returned in the dtype that holds all gradients, as torch has it.
        """
        self._check_outermost("clip_grad_norm_")
        params = list(self.parameters())
        total = clip_grad_norm_(params, max_norm, norm_type)
        return total.to(dtype_of_gradients(params) or total.dtype)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduces with ``hook`` instead: ``hook(state, full_gradients, own_shard)``, which fills the last.

        With NO_SHARD ``hook(state, gradients)``, in place. It averages too: nothing is divided after it.
        """
        self._check_outermost("register_comm_hook")
        check_not_exact(self._units, "register_comm_hook", "sums them in an order of its own")
        reduce_with_hook(self._units, state, hook)

    def _check_outermost(self, call: str) -> None:
        if self.__dict__["_is_inner"]:
            raise StateError(
                f"{call} was called on a wrapper inside another one",
                where=f"{type(self).__name__}.{call}, rank {self.__dict__['_unit'].rank}",
                fix=f"call {call} on the outermost wrapper: it is for the whole model",
            )

    # --- whole parameters and state -------------------------------------------------------------------------------

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """As ``nn.Module.apply``, with whole parameters; what ``fn`` changes is written back to the shards."""
        if any(is_shown_whole(unit) for unit in self._units if is_flat(unit)):
            return super().apply(fn)
        with shown_whole(self):
            return super().apply(fn)


def reduce_with_hook(units: Iterable[Unit], state: object, hook: Callable[..., object]) -> None:
    """Has ``hook`` reduce the gradients of all these units; checked before the first one changes."""
    flat_units = [unit for unit in units if is_flat(unit)]
    for unit in flat_units:
        where = f"register_comm_hook, unit '{unit.name}', rank {unit.rank}"
        if unit.mesh.replicate is not None and unit.mesh.shard.world > 1:
            raise ConfigError(
                "hybrid strategies reduce in two stages, and a communication hook is one",
                where=where,
                fix="use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD",
            )
        if unit.gradients.settings.is_hooked:
            raise StateError(
                "a communication hook is registered already", where=where, fix="register one hook, once"
            )
    for unit in flat_units:
        unit.gradients.settings.use_hook(unit.mesh.shard, unit.mesh.replicate, state, hook)
