"""Hooks around optimizers: ranks agree before any of them steps, and ``zero_grad`` reaches hidden gradients.

torch calls ``_before`` and ``_after`` around the step of every optimizer in the process; those without parameters of a
unit are left alone. The agreement itself is in ``agreement``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.engine.buffers import make_traceable
from shardwise.engine.unit.membership import is_member, membership, units_of, watched_data
from shardwise.engine.unit.replaced import values_to_swap
from shardwise.errors import StateError
from shardwise.torch_internals import (
    before_functional_call,
    count_foreach_writes,
    is_within_compiled,
    make_freed_tensors_printable,
    on_zero_grad,
    parameters_of,
    redirect_data,
    untraced,
)

if TYPE_CHECKING:
    from shardwise.engine.unit.binding import Slot
    from shardwise.engine.unit.interfaces import RootInterface
    from shardwise.engine.unit.unit import Unit


class OptimizerHooks:
    """The hooks of this process on the steps of all optimizers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_installed = False
        self._of_thread = threading.local()
        self._units: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[weakref.ref[Unit]]]] = (
            weakref.WeakKeyDictionary()
        )

    def install(self) -> None:
        """Installs the hooks on torch's optimizers, once per process."""
        with self._lock:
            if not self._is_installed:
                self._is_installed = True
                register_optimizer_step_pre_hook(self._before)
                register_optimizer_step_post_hook(self._after)
                count_foreach_writes(is_member)
                redirect_data(is_member, watched_data)
                on_zero_grad(optimizer_zeroed, _module_zeroed)
                before_functional_call(values_to_swap)
                make_freed_tensors_printable()

    @contextmanager
    def without_agreement(self) -> Iterator[None]:
        """A context in which this thread's optimizers step by themselves: not to train, and not on every rank."""
        before = getattr(self._of_thread, "agrees", True)
        self._of_thread.agrees = False
        try:
            yield
        finally:
            self._of_thread.agrees = before

    def is_own(self, hook: Callable[..., Any]) -> bool:
        """Whether a hook is one of these two; they do nothing to an optimizer without parameters of a unit."""
        return hook in (self._before, self._after)

    @untraced
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_within_compiled():
            make_traceable(param for group in optimizer.param_groups for param in group["params"])
        units = self._units_of(optimizer)
        if not getattr(self._of_thread, "agrees", True):
            return
        # A closure may still run the backward that reduces the stash.
        if not any(map(callable, (*args, *kwargs.values()))):
            _check_not_all_stashed(optimizer, units)
        for unit in units:
            unit.gradients.hide_stash()
        for root in _roots_of(units):
            root.agreement.before_optimizer(optimizer, root.in_backward)

    @untraced
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        units = self._units_of(optimizer)
        for root in _roots_of(units):
            root.agreement.after_optimizer()
        for unit in units:
            unit.was_stepped()

    def _units_of(self, optimizer: Optimizer) -> list[Unit]:
        units = self.known_units(optimizer)
        if units is None:
            found = _members(optimizer)
            for param, (unit, slot) in found.items():
                _check_is_sharded(optimizer, param, unit, slot)
            units = list(dict.fromkeys(unit for unit, _ in found.values()))
            self._units[optimizer] = (_ids_of_params(optimizer), [weakref.ref(unit) for unit in units])
        return units

    def known_units(self, optimizer: Optimizer) -> list[Unit] | None:
        """The units whose parameters an optimizer holds, as of its last step; None if it has got others since."""
        ids, units = self._units.get(optimizer, (None, []))
        if ids != _ids_of_params(optimizer):
            return None
        return [unit for reference in units if (unit := reference()) is not None]


def _ids_of_params(optimizer: Optimizer) -> list[int]:
    ids: list[int] = []
    for group in optimizer.param_groups:
        ids += map(id, group["params"])
    return ids


def _members(optimizer: Optimizer) -> dict[torch.Tensor, tuple[Unit, Slot]]:
    return {
        param: found
        for group in optimizer.param_groups
        for param in group["params"]
        if (found := membership(param)) is not None
    }


def optimizer_zeroed(optimizer: Optimizer, set_to_none: bool) -> None:
    """Zeroes stashed gradients, too, after an optimizer's ``zero_grad``."""
    units = OPTIMIZER_HOOKS.known_units(optimizer)
    if not units:
        # Its parameters may have become a unit's since it last stepped.
        units = list(dict.fromkeys(unit for unit, _ in _members(optimizer).values()))
    shards = {param for group in optimizer.param_groups for param in group["params"]}
    for unit in units:
        unit.gradients.zero(shards, set_to_none)


def _module_zeroed(module: nn.Module, set_to_none: bool) -> None:
    """Zeroes gradients of shards and of the stash, too, after a module's ``zero_grad``.

    At that time the module may show gathered or summoned parameters.
    """
    shards: dict[torch.Tensor, None] = {}
    units: dict[Unit, None] = {}
    for child in module.modules():
        found = [(unit, slot) for unit in units_of(child) for slot in unit.slots]
        shown = [param for param in parameters_of(child).values() if param is not None]
        found += [member for param in shown if (member := membership(param)) is not None]
        for unit, slot in found:
            units[unit] = None
            shards[slot.sharded] = None
    for shard in shards:
        _zero_gradient(shard, set_to_none)
    for unit in units:
        unit.gradients.zero(shards, set_to_none)


def _zero_gradient(param: torch.Tensor, set_to_none: bool) -> None:
    gradient = param.grad
    if gradient is None or set_to_none:
        param.grad = None
    else:
        # A gradient may be a view, which cannot be detached in place.
        (gradient.requires_grad_(False) if gradient.grad_fn is None else gradient.detach_()).zero_()


def _check_is_sharded(optimizer: Optimizer, param: torch.Tensor, unit: Unit, slot: Slot) -> None:
    """Raises if an optimizer holds a parameter that is not sharded: a step would not reach the shards."""
    is_gathered = param is slot.unsharded
    if param is slot.sharded or (isinstance(param, DTensor) and not is_gathered):
        return
    kind = type(optimizer).__name__
    name = f"{unit.name}.{slot.name}" if unit.name else slot.name
    form, fix = "as it was before it was sharded", "make the optimizer after the model is sharded"
    if is_gathered:
        form = "as it is while gathered"
        fix += ", before a forward or after its backward; after an exception, call reset_iter_state() first"
    raise StateError(
        f"{kind} holds parameter '{name}' {form}, and a step would not reach the shards",
        where=f"{kind}.step(), rank {unit.rank}",
        fix=fix,
    )


def _roots_of(units: list[Unit]) -> list[RootInterface]:
    return list(dict.fromkeys(unit.root for unit in units))


def _check_not_all_stashed(optimizer: Optimizer, units: list[Unit]) -> None:
    """Raises if no unit has reduced its gradients. Some may reduce less often than others, and are not stepped then."""
    trained = [unit for unit in units if unit.gradients.num_trainable and not unit.root.in_backward]
    if trained and all(unit.gradients.has_stash or unit.gradients.wait_for_replicas for unit in trained):
        raise StateError(
            f"{type(optimizer).__name__} would step without the gradients that were kept back for it: no backward has "
            "reduced them yet",
            where=f"{type(optimizer).__name__}.step(), unit '{trained[0].name}', rank {trained[0].rank}",
            fix="run the last backward before a step outside of no_sync(), with set_requires_gradient_sync(True) and "
            "set_requires_all_reduce(True)",
        )


OPTIMIZER_HOOKS = OptimizerHooks()
