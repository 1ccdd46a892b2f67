"""The local optimizer: an optimizer of the user's class over the pieces that this rank owns.

    the user's groups    [ w0 w1 w2 w3 ] lr …    [ b0 b1 ] lr …      every parameter, on every rank
    the local groups     [    w1    w3 ] lr …    [       ] lr …      the pieces this rank owns, which may be none

Options such as learning rates are copied to the local groups before each step, and back after it. Nothing here
communicates.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwise.engine.step.agreement import OPTIMIZER_HOOKS
from shardwise.optim.elementwise_classes import is_torchs_own
from shardwise.optim.joined_step import JoinedStep
from shardwise.planning.ownership import OwnedPiece
from shardwise.torch_internals import step_hooks
from shardwise.zero.consolidated_state import PieceState, owned_state
from shardwise.zero.partition import Partition

__all__ = ["LocalOptimizer"]

Groups = list[dict[str, Any]]

# A group's lists with one entry per parameter; everything else in a group is an option.
_MEMBERS = ("params", "param_names")


class LocalOptimizer:
    """Owns the local optimizer (``optim``), and keeps its groups in line with the user's."""

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        defaults: Mapping[str, Any],
        groups: Groups,
        partition: Partition,
    ) -> None:
        self._groups = groups
        self._partition = partition
        self.optim = optimizer_class(self._own_groups(), **defaults)
        self._joined = JoinedStep(self.optim) if is_torchs_own(optimizer_class) else None
        self.push_options()

    @property
    def runs_torch_alone(self) -> bool:
        """Whether a step without a closure runs only torch's code: a class of torch's, and no hooks of the user's."""
        return self._joined is not None and all(map(OPTIMIZER_HOOKS.is_own, step_hooks(self.optim)))

    # --- groups --------------------------------------------------------------------------------------------------

    def add_group(self) -> None:
        """Adds this rank's pieces of the group that was added last."""
        self.optim.add_param_group(self._own_groups()[-1])
        self.push_options()

    def pull_options(self) -> None:
        """Copies options from the user's groups, where a scheduler may have changed them, to the local groups."""
        _copy_options(self._groups, self.optim.param_groups)

    def push_options(self) -> None:
        """Copies options that the local optimizer set (defaults, keys of its own) to the user's groups."""
        _copy_options(self.optim.param_groups, self._groups)

    def _own_groups(self) -> Groups:
        partition = self._partition
        own: Groups = [{**_options(group), **{key: [] for key in _members(group)}} for group in self._groups]
        names = [
            dict(zip(group["params"], group.get("param_names", ()), strict=False)) for group in self._groups
        ]
        for piece in partition.owned:
            number = partition.group_of[piece.param]
            own[number]["params"].append(partition.stepped_tensor(piece))
            if names[number]:
                own[number]["param_names"].append(names[number][partition.params[piece.param]])
        return own

    # --- steps ---------------------------------------------------------------------------------------------------

    def step(self, closure: Any, kwargs: dict[str, Any], buffers: Sequence[Tensor]) -> Any:
        """Steps this rank's pieces; ``buffers`` is their memory if they are bucket views."""
        self.pull_options()
        self._partition.bind_gradients()
        if closure is not None:
            if callable(closure):
                closure = self._partition.wrap_closure(closure)
            loss = self.optim.step(closure=closure, **kwargs)
        elif self._joined is not None and self.runs_torch_alone:
            loss = self._joined(buffers, **kwargs)
        else:
            loss = self.optim.step(**kwargs)
        self._partition.release_gradients()
        self.push_options()
        return loss

    def step_pieces(self, gradients: Mapping[OwnedPiece, Tensor]) -> None:
        """Steps only these owned pieces, with these gradients."""
        if not gradients:
            return
        self.pull_options()
        chosen = {self._partition.stepped_tensor(piece): grad for piece, grad in gradients.items()}
        previous = [(tensor, tensor.grad) for tensor in chosen]
        all_members = [_members(group) for group in self.optim.param_groups]
        try:
            for tensor, grad in chosen.items():
                tensor.grad = grad
            for group in self.optim.param_groups:
                group.update(_chosen_members(group, chosen))
            self.optim.step()
        finally:
            for group, members in zip(self.optim.param_groups, all_members, strict=True):
                group.update(members)
            for tensor, previous_grad in previous:
                tensor.grad = previous_grad
        self.push_options()

    # --- changes of owner ----------------------------------------------------------------------------------------

    def transfer_to(self, owner: int, indices: list[int]) -> list[PieceState]:
        """Makes a rank the owner of whole parameters; returns the state that this rank has of them."""
        states = owned_state(self._partition, self.optim.state, only=indices)
        for index in indices:
            self.optim.state.pop(self._partition.params[index], None)
            self._partition.set_owner(index, owner)
        for group, own in zip(self.optim.param_groups, self._own_groups(), strict=True):
            group.update(_members(own))
        return states

    def receive(self, states: list[PieceState]) -> None:
        """Sets the state of parameters that were transferred to this rank."""
        for piece_state in states:
            param = self._partition.params[piece_state.piece.param]
            self.optim.state[param] = piece_state.values_for(param.device)

    # --- saving and loading --------------------------------------------------------------------------------------

    def saved_groups(self) -> Groups:
        """Returns the user's groups with numbers instead of parameters, as in a state dict."""
        index_of = self._partition.index_of
        return [{**group, "params": [index_of[param] for param in group["params"]]} for group in self._groups]

    def load(
        self,
        states: Mapping[OwnedPiece, dict[str, Any]],
        global_state: Mapping[str, Any],
        saved_groups: Groups,
    ) -> None:
        """Loads state through the local optimizer's ``load_state_dict``, which casts it and moves it to its device."""
        numbers = {piece: number for number, piece in enumerate(self._pieces_in_local_order())}
        own_groups = []
        for group_number, saved in enumerate(saved_groups):
            own = [
                numbers[piece] for piece in numbers if self._partition.group_of[piece.param] == group_number
            ]
            own_groups.append({**copy.deepcopy(_options(saved)), "params": own})
        self.optim.load_state_dict(
            {
                "state": {
                    **copy.deepcopy(dict(global_state)),
                    **{numbers[piece]: values for piece, values in states.items()},
                },
                "param_groups": own_groups,
            }
        )
        self.push_options()

    def _pieces_in_local_order(self) -> list[OwnedPiece]:
        """Sorts the owned pieces group by group, as a state dict of the local optimizer numbers them."""
        partition = self._partition
        return sorted(partition.owned, key=lambda piece: (partition.group_of[piece.param], piece))


def _copy_options(source: Groups, target: Groups) -> None:
    """Copies everything but the parameters and their names."""
    for source_group, target_group in zip(source, target, strict=True):
        target_group.update(_options(source_group))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _MEMBERS}


def _members(group: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: group[key] for key in _MEMBERS if key in group}


def _chosen_members(group: Mapping[str, Any], chosen: Container[Tensor]) -> dict[str, list[Any]]:
    # Tensors hash by identity, so `in` does not compare elements.
    kept = [number for number, tensor in enumerate(group["params"]) if tensor in chosen]
    return {key: [values[number] for number in kept] for key, values in _members(group).items()}
