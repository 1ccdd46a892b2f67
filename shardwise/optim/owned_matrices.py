"""The matrices that this rank owns: a whole copy of each, and the user's optimizer over the copies."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.optim.held_parameters import HeldParameter
from shardwise.torch_internals import copy_all, map_tree

_MEMBERS = ("params", "param_names")
State = dict[str, Any]
Groups = list[dict[str, Any]]


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Everything in a parameter group but its parameters."""
    return {key: value for key, value in group.items() if key not in _MEMBERS}


class OwnedMatrices:
    """A rank's optimizer of the class that the user chose, over the matrices that the rank owns."""

    def __init__(self, optimizer_class: type[Optimizer], options: dict[str, Any], rank: int) -> None:
        self._class, self._options, self._rank = optimizer_class, options, rank
        self._optim: Optimizer | None = None
        self.copies: dict[int, torch.Tensor] = {}
        self._group_of: dict[int, int] = {}
        # By matrix, its state from before the step; None if it had none.
        self._undo: dict[int, State | None] = {}
        self._undo_groups: Groups = []
        self._counters: dict[str, Any] = {}
        self._has_stepped = False

    @property
    def optim(self) -> Optimizer:
        assert self._optim is not None
        return self._optim

    def options_for(self, held: Sequence[HeldParameter], options: dict[str, Any]) -> dict[str, Any]:
        """Returns a group's options as the class completes them; raises what the class raises of its parameters.

        Every rank asks with all parameters of the group, so that all raise alike. They take no memory.
        """
        asked = self._class([{**options, "params": list(map(_without_memory, held))}], **self._options)
        return group_options(asked.param_groups[0])

    def add_group(self, options: dict[str, Any], owned: Sequence[HeldParameter]) -> None:
        number = 0 if self._optim is None else len(self._optim.param_groups)
        for held in owned:
            self.copies[held.index] = _without_memory(held)
            self._group_of[held.index] = number
        group = {**options, "params": [self.copies[held.index] for held in owned]}
        if self._optim is None:
            self._optim = self._class([group], **self._options)
        else:
            self._optim.add_param_group(group)

    def allocate(self, index: int) -> torch.Tensor | None:
        """Returns this rank's copy of a matrix, to be filled; None if another rank owns it."""
        found = self.copies.get(index)
        if found is not None and not found.is_contiguous():
            found.data = torch.empty(found.shape, dtype=found.dtype, device=found.device)
        return found

    def state_of(self, index: int) -> State:
        """The state of a matrix, empty if another rank owns it."""
        found = self.copies.get(index)
        return {} if found is None else self.optim.state[found]

    # --- options --------------------------------------------------------------------------------------------------

    def pull_options(self, groups: Groups) -> None:
        """Takes over options that the user or a scheduler may have changed."""
        for own, given in zip(self.optim.param_groups, groups, strict=True):
            own.update(group_options(given))

    def push_options(self, groups: Groups) -> None:
        """Shows options that the class may have changed."""
        for own, given in zip(self.optim.param_groups, groups, strict=True):
            given.update(group_options(own))

    # --- steps ----------------------------------------------------------------------------------------------------

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Makes the calls of the class's ``step`` within it count as one: each finds the counters of the first."""
        self._undo_groups = [copy.copy(group_options(group)) for group in self.optim.param_groups]
        self._counters = {
            name: value
            for name, value in vars(self.optim).items()
            if isinstance(value, (bool, int, float, str))
        }
        self._has_stepped = False
        yield

    def try_keep(self, indices: Iterable[int]) -> Exception | None:
        """Copies the state of those matrices that are here, for ``undo``; returns what was raised, such as no memory.

        All at once, before any is stepped: a GPU copies them while the host sends the first gradients.
        """
        found = {
            index: self.optim.state.get(param)
            for index in indices
            if (param := self.copies.get(index)) is not None
        }
        try:
            self._undo = _cloned(found)
        except Exception as error:  # noqa: BLE001  all ranks raise, once all know
            return error
        return None

    def try_step(self, gradients: Mapping[int, torch.Tensor], kwargs: dict[str, Any]) -> Exception | None:
        """Steps the matrices that have a gradient here; returns what the class raised."""
        if not gradients and self._has_stepped:
            return None
        try:
            self._step(gradients, kwargs)
        except Exception as error:  # noqa: BLE001  all ranks raise, once all know
            return error
        return None

    def _step(self, gradients: Mapping[int, torch.Tensor], kwargs: dict[str, Any]) -> None:
        optim = self.optim
        everything = [group["params"] for group in optim.param_groups]
        if self._has_stepped:
            self._restore_counters()
        self._has_stepped = True
        try:
            for number, group in enumerate(optim.param_groups):
                group["params"] = [
                    self.copies[index] for index in gradients if self._group_of[index] == number
                ]
            for index, gradient in gradients.items():
                self.copies[index].grad = gradient
            optim.step(**kwargs)
        finally:
            for group, params in zip(optim.param_groups, everything, strict=True):
                group["params"] = params
            for index in gradients:
                self.copies[index].grad = None

    def _restore_counters(self) -> None:
        for group, before in zip(self.optim.param_groups, self._undo_groups, strict=True):
            group.update(before)
        vars(self.optim).update(self._counters)

    def undo(self) -> None:
        """Goes back to before the step, as far as copies were kept."""
        if self._undo_groups:
            self._restore_counters()
        for index, state in self._undo.items():
            if state is None:
                self.optim.state.pop(self.copies[index], None)
            else:
                self.optim.state[self.copies[index]] = state
        self.forget_undo()

    def forget_undo(self) -> None:
        self._undo = {}
        self._undo_groups = []

    # --- loading --------------------------------------------------------------------------------------------------

    def load(self, states: Mapping[int, State], groups: Groups) -> None:
        """Loads state through the class's own ``load_state_dict``, which casts it and moves it to its device."""
        numbers: dict[int, int] = {}
        saved: Groups = []
        for number, group in enumerate(groups):
            members = [index for index in self.copies if self._group_of[index] == number]
            for index in members:
                numbers[index] = len(numbers)
            saved.append({**group_options(group), "params": [numbers[index] for index in members]})
        self.optim.load_state_dict(
            {"state": {numbers[index]: state for index, state in states.items()}, "param_groups": saved}
        )


def _cloned(states: Mapping[int, State | None]) -> dict[int, State | None]:
    """Copies states; plain tensors in one call."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []

    def clone(value: torch.Tensor) -> torch.Tensor:
        if type(value) is not torch.Tensor or not value.dim():
            return value.clone()
        sources.append(value)
        targets.append(torch.empty_like(value))
        return targets[-1]

    cloned: dict[int, State | None] = {}
    for index, state in states.items():
        if state is not None and all(isinstance(value, torch.Tensor) for value in state.values()):
            cloned[index] = {key: clone(value) for key, value in state.items()}
        else:
            cloned[index] = map_tree(clone, state)
    if targets:
        copy_all(targets, sources)
    return cloned


def _without_memory(held: HeldParameter) -> nn.Parameter:
    """A parameter of the full shape; all its elements are the same one."""
    single = torch.zeros((), dtype=held.param.dtype, device=held.param.device)
    return nn.Parameter(single.expand(held.shape), requires_grad=held.param.requires_grad)
