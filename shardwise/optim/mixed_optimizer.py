"""``mixed``: several optimizer classes, each for parameters of its own, as one optimizer.

Parameter groups, state and state dict are those of all parts, one after the other. A step either steps all parts or,
if one that steps matrices whole raises, none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from shardwise.engine.unit.membership import membership
from shardwise.errors import ConfigError, ConfigTypeError
from shardwise.optim.elementwise_classes import is_elementwise, rows_together
from shardwise.optim.flat_optimizer import banded, flat
from shardwise.optim.quantized_states import quantizes_state
from shardwise.optim.step_gradients import Agreed
from shardwise.optim.whole_optimizer import WholeOptimizer, check_class, whole
from shardwise.planning.matrix_owners import rows_fit
from shardwise.torch_internals import (
    run_after_load_state_dict,
    run_after_state_dict,
    run_before_load_state_dict,
    run_before_state_dict,
)

_WHERE = "shardwise.optim.mixed"


def mixed(
    parts: Mapping[type[Optimizer], Iterable[Any]] | Iterable[Optimizer], **options: Any
) -> MixedOptimizer:
    """Returns one optimizer of several classes: to schedulers, clipping and checkpoints it is like any other.

    Args:
        parts: by optimizer class, its parameters or groups of them with options of their own, such as
            ``{Muon: [{"params": matrices, "lr": 0.02}], AdamW: rest}``. Element-wise classes step a unit's shards as
            one tensor (``flat``); row-wise and block-wise ones step shards of whole rows or blocks as they are; all
            others step whole matrices (``whole``). Or optimizers that you have made.
        options: arguments of all classes, e.g. ``lr=1e-3``.
    """
    if not isinstance(parts, Mapping):
        made = list(parts)
    else:
        made = [part for kind, params in parts.items() for part in _make_parts(kind, params, dict(options))]
    if not made or not all(isinstance(part, Optimizer) for part in made):
        raise ConfigTypeError(
            f"the parts are {made}",
            where=_WHERE,
            fix="pass a dict from optimizer classes to parameters, or a list of optimizers",
        )
    return MixedOptimizer(made)


def _make_parts(
    optimizer_class: type[Optimizer], params: Any, options: dict[str, Any]
) -> Iterator[Optimizer]:
    listed = [params] if isinstance(params, Mapping) else list(params)
    check_class(optimizer_class)
    if is_elementwise(optimizer_class) or quantizes_state(optimizer_class):
        yield flat(listed, optimizer_class, **options)
    elif (rows := rows_together(optimizer_class)) is not None:
        groups = _as_groups(listed)
        as_they_are = _split(groups, lambda param: _holds_bands(param, rows))
        others = _split(groups, lambda param: not _holds_bands(param, rows))
        if as_they_are:
            yield banded(as_they_are, optimizer_class, **options)
        if others:
            yield whole(optimizer_class, others, **options)
    else:
        yield whole(optimizer_class, listed, **options)


def _as_groups(listed: list[Any]) -> list[dict[str, Any]]:
    return listed if listed and isinstance(listed[0], Mapping) else [{"params": listed}]


def _split(groups: list[dict[str, Any]], is_chosen: Callable[[torch.Tensor], bool]) -> list[dict[str, Any]]:
    """Returns the groups with only the chosen parameters, without those that have none."""
    chosen = [{**group, "params": list(filter(is_chosen, group["params"]))} for group in groups]
    return [group for group in chosen if group["params"]]


def _holds_bands(param: torch.Tensor, rows: int) -> bool:
    """Whether every rank holds whole bands of so many rows."""
    if not isinstance(param, DTensor):
        # A plain tensor is whole; the wrapper cuts anywhere.
        return membership(param) is None
    sharded = [axis for axis, place in enumerate(param.placements) if not place.is_replicate()]
    if not sharded:
        return True
    place = param.placements[sharded[0]]
    return (
        len(sharded) == 1
        and type(place) is Shard
        and place.dim == 0
        and rows_fit(param.shape[0], param.device_mesh.size(sharded[0]), rows)
    )


class MixedOptimizer(Optimizer):
    """What ``mixed`` returns; ``parts`` are its optimizers."""

    parts: tuple[Optimizer, ...] = ()

    def __init__(self, parts: list[Optimizer]) -> None:
        # torch checks that no parameter comes twice.
        super().__init__([{"params": group["params"]} for part in parts for group in part.param_groups], {})
        self.parts = tuple(parts)
        self.defaults = {key: value for part in reversed(parts) for key, value in part.defaults.items()}

    # Of the parts, as they are now: a part's load_state_dict replaces them.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        if not self.parts:
            return self._groups
        return [group for part in self.parts for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        found = {param: state for part in self.parts for param, state in part.state.items()}
        return defaultdict(dict, found)

    @state.setter
    def state(self, state: Any) -> None:
        """Torch's constructor sets an empty one."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.parts:
            raise ConfigError(
                "a group was added without saying which class steps it",
                where=f"{_WHERE}(...).add_param_group",
                fix="add it to the part of that class: optimizer.parts[0].add_param_group(...)",
            )
        super().add_param_group(param_group)

    def owned_parameters(self) -> list[torch.Tensor]:
        """The parameters of which this rank has state."""
        owned: list[torch.Tensor] = []
        for part in self.parts:
            if isinstance(part, WholeOptimizer):
                owned += part.owned_parameters()
            else:
                owned += [param for group in part.param_groups for param in group["params"]]
        return owned

    # --- a step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parts.

        Args:
            closure: computes the loss and the gradients, if given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            prepared: list[tuple[WholeOptimizer, Agreed]] = []
            try:
                for part in self.parts:
                    if isinstance(part, WholeOptimizer):
                        prepared.append((part, part.prepare_step()))
            except BaseException:
                for part, agreed in prepared:
                    part.cancel_step(agreed)
                raise
            for part, agreed in prepared:
                part.finish_step(agreed)
        for other in self.parts:
            if not isinstance(other, WholeOptimizer):
                _step_alone(other)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    # --- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all parts, as if one optimizer had all groups. Called on every rank."""
        run_before_state_dict(self)
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for part in self.parts:
            first = sum(len(group["params"]) for group in groups)
            saved = part.state_dict()
            state.update({first + number: values for number, values in saved["state"].items()})
            groups += [
                {**group, "params": [first + number for number in group["params"]]}
                for group in saved["param_groups"]
            ]
        return run_after_state_dict(self, {"state": state, "param_groups": groups})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of all parts. Called on every rank."""
        state_dict = run_before_load_state_dict(self, state_dict)
        state, groups = state_dict["state"], state_dict["param_groups"]
        lengths = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in groups] != lengths:
            raise ConfigError(
                f"the state dict has parameter groups of {[len(group['params']) for group in groups]} parameters, this "
                f"optimizer of {lengths}",
                where=f"{_WHERE}(...).load_state_dict",
                fix="make the optimizer with the groups that were saved",
            )
        start = 0
        for part in self.parts:
            own = groups[start : start + len(part.param_groups)]
            start += len(own)
            ids = {number for group in own for number in group["params"]}
            part.load_state_dict(
                {
                    "state": {number: values for number, values in state.items() if number in ids},
                    "param_groups": own,
                }
            )
        run_after_load_state_dict(self)


def _step_alone(optimizer: Optimizer) -> None:
    """Steps a part without its step hooks: those of the whole have run."""
    step: Any = optimizer.step
    if getattr(step, "hooked", False):
        step.__func__.__wrapped__(optimizer)
    else:
        step()


# torch does this in the first constructor call, where ranks that are threads would race.
MixedOptimizer.step = Optimizer.profile_hook_step(MixedOptimizer.step)  # type: ignore[method-assign]
MixedOptimizer.step.hooked = True  # type: ignore[attr-defined]
