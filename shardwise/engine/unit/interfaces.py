"""What a unit knows of the objects above it: its root (``engine/step/root``), its position there, and its hooks.

Root and hooks import ``unit``; it reaches them through these protocols, so that the three can be read one after
another. Units, visits and windows are ``Any`` here for the same reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from shardwise.comm.channels.channel import Channel
    from shardwise.comm.streams import SideStreams
    from shardwise.engine.reduce.reduce_in_flight import Lender, ReduceInFlight
    from shardwise.engine.reduce.reduce_plan import ReducePlan
    from shardwise.engine.step.safeguards import NonFiniteGuard
    from shardwise.engine.unit.collective_names import CollectiveNames


class NamedUnit(Protocol):
    """What an error says about a unit."""

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Position:
    """A unit's position in its model; ``Unit.adopt`` replaces it as a whole."""

    number: int
    name: str
    collective_names: CollectiveNames
    # Whether it is the outermost unit, whose forward is the model's.
    is_top: bool
    # The same, or a companion of the outermost unit.
    is_outermost: bool


class AgreementInterface(Protocol):
    """The agreement of a model's ranks on its steps: ``engine/step/agreement.StepAgreement``."""

    channels: list[Channel]
    guard: NonFiniteGuard | None

    @property
    def is_broken(self) -> bool: ...

    def before_optimizer(self, optimizer: torch.optim.Optimizer, in_backward: bool) -> None: ...
    def after_optimizer(self) -> None: ...
    def forget_torn_step(self) -> None: ...


class RootInterface(Protocol):
    """The step that a unit is part of: ``engine/step/root.Root``."""

    streams: SideStreams
    has_adopted: bool
    in_forward: bool
    in_backward: bool
    expects_backward: bool
    ends_backward: bool
    is_last_backward: bool
    window: Any
    reduces: deque[ReduceInFlight]
    reached: Any
    post_optim_event: torch.Event | None

    @property
    def agreement(self) -> AgreementInterface: ...
    @property
    def joint_units(self) -> object | None: ...
    @property
    def units(self) -> Sequence[Any]: ...
    @property
    def is_busy(self) -> bool: ...

    def adopt_units(self) -> None: ...
    def update_joint_units(self) -> None: ...

    def begin_forward(self) -> None: ...
    def begin_unit_alone(self) -> None: ...
    def end_forward(self) -> None: ...
    def begin_backward(self) -> None: ...
    def reduce_stash(self) -> None: ...
    def prefetch_before(self, unit: Any, visit: Any) -> None: ...

    def make_room(self, unit: Any, prefetch: bool) -> None: ...
    def free_after_compute(self, unit: Any) -> None: ...
    def free_before_prefetch(self) -> None: ...
    def lend_freed(self, unit: Any, plan: ReducePlan) -> Lender | None: ...
    def finish_earlier_reduces(self, plan: ReducePlan, max_inputs: int) -> None: ...

    def break_off_forward(self, error: BaseException) -> None: ...
    def recover(self) -> None: ...
    def reset(self, drops_stash: bool = True) -> None: ...


class HooksInterface(Protocol):
    """Where forward and backward touch a unit: ``hooks.UnitHooks``."""

    # Whether the unit has several modules, of which a forward need not run all.
    has_several: bool
    companions: tuple[Any, ...]

    @property
    def is_running(self) -> bool: ...

    def read_settings(self) -> None: ...
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any, input_dtype: Any = None) -> Any: ...
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any: ...
    def forward_raised(self, module: nn.Module, error: BaseException) -> None: ...
    def end_partial_forward(self) -> None: ...
    def flush(self) -> None: ...
    def forget(self) -> None: ...
    def release_partial_forward(self) -> None: ...
