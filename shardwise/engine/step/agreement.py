"""The accord of a model's ranks on its steps: taken alike by all, or by none.

A root tells its accord when a step begins, when an optimizer wants to use it, and when it breaks off. The accord has
ranks meet before an optimizer steps, tells peers of a step that broke off, and puts back or guards what it was asked to
(``TrustPolicy``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from shardwise import policies
from shardwise.comm.channels.channel import Channel
from shardwise.comm.collectives.group import GroupCollectives
from shardwise.engine.step.non_finite import NonFiniteGuard
from shardwise.engine.step.optimizer_hooks import is_inside_step, last_checkpoint
from shardwise.engine.step.undo import Undo
from shardwise.engine.unit.collective_names import STEP
from shardwise.errors import StateError

if TYPE_CHECKING:
    from shardwise.engine.unit.unit import Unit


def forget_torn_steps(units: Iterable[Unit]) -> None:
    """Parameters are loaded anew: a step that broke off or was torn before that is no matter any more."""
    for unit in units:
        if unit.root.agreement.is_broken:
            unit.root.reset()
        unit.root.agreement.forget_torn_step()


class StepAgreement:
    """What this rank has agreed on with those it shares a model with."""

    def __init__(self, top: Unit) -> None:
        self._rank = top.rank
        self._groups: list[GroupCollectives] = []
        # Weak: the models' modules own them.
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
        """Finds the groups that units share with other ranks; the model's number among those on its first group."""
        self._units = [weakref.ref(unit) for unit in units]
        self._find_groups()
        if not self.channels:
            return 1
        self.channels[0].num_models += 1
        return self.channels[0].num_models

    def _alive(self) -> list[Unit]:
        return [unit for reference in self._units if (unit := reference()) is not None]

    def _find_groups(self) -> None:
        found = {
            calls.channel: calls for unit in self._alive() for calls in unit.all_calls() if calls.world > 1
        }
        self._groups, self.channels = list(found.values()), list(found)
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
        """Lets an optimizer use the step once all ranks have taken it alike."""
        if self._stepping is not None and self._stepping() is optimizer and is_inside_step(optimizer):
            # A class whose step calls that of the class it derives from.
            return
        try:
            self._meet(in_backward)
        except BaseException:
            self._put_back()
            raise
        policy = policies.trust().non_finite
        if self.guard is not None and policy is not None:
            self.guard.check(policy, optimizer, self._groups)
        if self._undo is not None and not in_backward:
            self._undo.forget()
        self._stepping = weakref.ref(optimizer)

    def _meet(self, in_backward: bool) -> None:
        if not self.channels:
            # An optimizer that steps before the first forward.
            self._find_groups()
        for index, channel in enumerate(self.channels):
            if in_backward and channel.log.num_events == self._num_agreed[index]:
                # An optimizer for each parameter, run by its hook: nothing was done since the last of them.
                channel.record(STEP)
            else:
                channel.agree(STEP)
            self._num_agreed[index] = channel.log.num_events

    def after_optimizer(self) -> None:
        self._stepping = None

    # --- breaking off ---------------------------------------------------------------------------------------------

    @property
    def is_broken(self) -> bool:
        """Whether a step raised, here or on another rank, and nothing was done about it yet."""
        return self._has_broken_off or any(
            channel.log.epoch != epoch for channel, epoch in zip(self.channels, self._epochs, strict=True)
        )

    def break_off(self, what: str) -> None:
        """Tells peers, which may be waiting for this rank, that it has left the step; once a step."""
        if self._has_broken_off:
            return
        for channel, epoch in zip(self.channels, self._epochs, strict=True):
            # A wire that has begun a new path by itself has told them.
            if channel.log.epoch == epoch:
                channel.abort_step(what)
        self._has_broken_off = True
        self._put_back()

    def _put_back(self) -> None:
        if self._undo is not None:
            self._undo.put_back()

    def mend(self) -> None:
        """The broken-off step is forgotten, and the next one may begin."""
        self._has_broken_off = False
        self._note_epochs()
        if self.guard is not None:
            self.guard.forget()

    # --- torn steps -----------------------------------------------------------------------------------------------

    def check_not_torn(self) -> None:
        """Raises if an optimizer's step began and did not end: this rank's parameters are half updated."""
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
        """Parameters were loaded anew."""
        self._stepping = None
        self._is_torn = False
