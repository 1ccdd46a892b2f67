"""Step agreement: either all ranks of a model take a step, or none does; and the hooks on optimizers that ask for it.

A root calls its agreement when a step begins, before and after an optimizer's step, and when a step raises. Ranks meet
before an optimizer steps; a rank whose step raised tells its peers. Depending on ``TrustPolicy``, gradients and buffers
are restored, and gradients are checked for non-finite values (``safeguards``). An optimizer's step that began and did
not end has left this rank's parameters partly updated (a *torn* step): the next forward raises.

torch calls ``OptimizerHooks`` around the step of every optimizer in the process; those without parameters of a unit are
left alone. Another hook lets ``zero_grad`` reach hidden gradients.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise import policies
from shardwise.comm.channels.channel import Channel
from shardwise.comm.collectives.agreement import check_same_model
from shardwise.engine.buffers import make_traceable
from shardwise.engine.step.safeguards import NonFiniteGuard, Undo
from shardwise.engine.unit.collective_names import STEP
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

_NOTE = {"checkpoint": ""}


def note_checkpoint(place: str) -> None:
    """Notes where this process's last complete checkpoint is, for errors that tell users to load it."""
    _NOTE["checkpoint"] = place


def last_checkpoint() -> str:
    return _NOTE["checkpoint"]


def is_inside_step(optimizer: Optimizer) -> bool:
    """Whether this thread is inside ``optimizer.step()``, for example in a closure."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def forget_torn_steps(units: Iterable[Unit]) -> None:
    """Forgets steps that raised or were torn, because parameters are being loaded."""
    for unit in units:
        if unit.root.agreement.is_broken:
            unit.root.recover()
        unit.root.agreement.forget_torn_step()


class StepAgreement:
    """The agreement of one root with its peers."""

    def __init__(self, top: Unit) -> None:
        self._rank = top.rank
        # Weak: modules own them.
        self._units = [weakref.ref(top)]
        self.channels: list[Channel] = []
        self._epochs: list[int] = []
        self._num_agreed: list[int] = []
        self._has_broken_off = False
        self.guard: NonFiniteGuard | None = None
        self._undo: Undo | None = None
        self._stepping: weakref.ref[Optimizer] | None = None
        self._is_torn = False

    def register_units(self, units: Iterable[Unit]) -> int:
        """Finds the groups that units share with other ranks; returns the model's number on its first group."""
        self._units = [weakref.ref(unit) for unit in units]
        self._find_groups()
        if not self.channels:
            return 1
        self.channels[0].num_models += 1
        return self.channels[0].num_models

    def check_units(self) -> None:
        """Raises unless the ranks of each mesh hold the same units."""
        lines_of_mesh: dict[int, list[str]] = {}
        meshes = {id(unit.mesh): unit.mesh for unit in self._alive()}
        for unit in self._alive():
            lines = lines_of_mesh.setdefault(id(unit.mesh), [])
            lines.extend(unit.descriptions())
        for key, mesh in meshes.items():
            for calls in (mesh.shard, mesh.replicate):
                if calls is not None:
                    check_same_model(lines_of_mesh[key], calls, mesh.device)

    def _alive(self) -> list[Unit]:
        return [unit for reference in self._units if (unit := reference()) is not None]

    def _find_groups(self) -> None:
        used = (calls for unit in self._alive() for calls in unit.all_calls())
        self.channels = list(dict.fromkeys(calls.channel for calls in used if calls.world > 1))
        self._num_agreed = [0] * len(self.channels)
        self._note_epochs()

    def _note_epochs(self) -> None:
        self._epochs = [channel.log.epoch for channel in self.channels]

    # --- a step ---------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        self._note_epochs()
        if policies.trust().undoes_steps:
            self._undo = self._undo or Undo()
            self._undo.keep_buffers(self._alive()[0].modules)
        else:
            self._undo = None

    def begin_backward(self) -> None:
        self._note_epochs()
        if (policies.trust().non_finite is None) != (self.guard is None):
            self.guard = NonFiniteGuard(self._rank) if self.guard is None else None
        if self._undo is not None:
            self._undo.keep_gradients(slot for unit in self._alive() for slot in unit.slots)

    def before_optimizer(self, optimizer: Optimizer, in_backward: bool) -> None:
        """Returns once all ranks have completed the step that the optimizer is about to use."""
        if self._stepping is not None and self._stepping() is optimizer and is_inside_step(optimizer):
            # A step that calls the step of its base class.
            return
        try:
            self._meet(in_backward)
        except BaseException:
            self._restore()
            raise
        policy = policies.trust().non_finite
        if self.guard is not None and policy is not None:
            self.guard.check(policy, optimizer, self.channels)
        if self._undo is not None and not in_backward:
            self._undo.forget()
        self._stepping = weakref.ref(optimizer)

    def _meet(self, in_backward: bool) -> None:
        if not self.channels:
            # An optimizer that steps before the first forward.
            self._find_groups()
        for index, channel in enumerate(self.channels):
            if in_backward and channel.log.num_events == self._num_agreed[index]:
                # One of many optimizers, each run by a parameter's hook: nothing was issued since the last one.
                channel.record(STEP)
            else:
                channel.agree(STEP)
            self._num_agreed[index] = channel.log.num_events

    def after_optimizer(self) -> None:
        self._stepping = None

    # --- breaking off ---------------------------------------------------------------------------------------------

    @property
    def is_broken(self) -> bool:
        """Whether a step raised, here or on another rank, and the root has not been reset since."""
        return self._has_broken_off or any(
            channel.log.epoch != epoch for channel, epoch in zip(self.channels, self._epochs, strict=True)
        )

    def break_off(self, what: str) -> None:
        """Tells peers, which may wait for this rank, that it has left the step; once per step."""
        if self._has_broken_off:
            return
        for channel, epoch in zip(self.channels, self._epochs, strict=True):
            # A channel that has already begun a new epoch has told them.
            if channel.log.epoch == epoch:
                channel.abort_step(what)
        self._has_broken_off = True
        self._restore()

    def _restore(self) -> None:
        if self._undo is not None:
            self._undo.restore()

    def clear_failure(self) -> None:
        """Clears the failure, so that the next step may begin."""
        self._has_broken_off = False
        self._note_epochs()
        if self.guard is not None:
            self.guard.forget()

    # --- torn steps -----------------------------------------------------------------------------------------------

    def check_not_torn(self) -> None:
        """Raises if an optimizer's step began and did not end: this rank's parameters are partly updated."""
        optimizer = self._stepping() if self._stepping is not None else None
        if optimizer is None or is_inside_step(optimizer):
            return
        what = f"the step of {type(optimizer).__name__} on rank {self._rank} raised, and is torn"
        if not self._is_torn:
            self._is_torn = True
            for channel in self.channels:
                channel.abort_step(what)
        checkpoint = f" ({last_checkpoint()})" if last_checkpoint() else ""
        raise StateError(
            f"{what}: some of its parameters are updated and some are not",
            where=f"next forward, rank {self._rank}",
            fix=f"on all ranks load the last checkpoint{checkpoint}; after loading by other means than "
            "load_state_dict, call reset_iter_state()",
        )

    def forget_torn_step(self) -> None:
        """Forgets a torn step, because parameters were loaded."""
        self._stepping = None
        self._is_torn = False


# --- hooks on optimizers ----------------------------------------------------------------------------------------------


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
