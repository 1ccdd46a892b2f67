"""Step agreement: either all ranks of a model take a step, or none does.

A root calls its agreement when a step begins, before and after an optimizer's step, and when a step raises. Ranks meet
before an optimizer steps; a rank whose step raised tells its peers. Depending on ``TrustPolicy``, gradients and buffers
are restored, and gradients are checked for non-finite values. An optimizer's step that began and did not end has left
this rank's parameters partly updated (a *torn* step): the next forward raises.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING

import torch

from shardwise import policies
from shardwise.comm.channels.channel import Channel
from shardwise.engine.step.safeguards import NonFiniteGuard, Undo
from shardwise.engine.unit.collective_names import STEP
from shardwise.errors import StateError

if TYPE_CHECKING:
    from shardwise.engine.unit.unit import Unit

_NOTE = {"checkpoint": ""}


def note_checkpoint(place: str) -> None:
    """Notes where this process's last complete checkpoint is, for errors that tell users to load it."""
    _NOTE["checkpoint"] = place


def last_checkpoint() -> str:
    return _NOTE["checkpoint"]


def is_inside_step(optimizer: torch.optim.Optimizer) -> bool:
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
        self._stepping: weakref.ref[torch.optim.Optimizer] | None = None
        self._is_torn = False

    def register_units(self, units: Iterable[Unit]) -> int:
        """Finds the groups that units share with other ranks; returns the model's number on its first group."""
        self._units = [weakref.ref(unit) for unit in units]
        self._find_groups()
        if not self.channels:
            return 1
        self.channels[0].num_models += 1
        return self.channels[0].num_models

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

    def before_optimizer(self, optimizer: torch.optim.Optimizer, in_backward: bool) -> None:
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
