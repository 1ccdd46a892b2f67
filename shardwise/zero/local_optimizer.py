"""What this rank steps: an optimizer of the user's class, over this rank's pieces of each group.

    the user's groups    [ w0 w1 w2 w3 ] lr …    [ b0 b1 ] lr …      every parameter, on every rank
    those of this rank   [    w1    w3 ] lr …    [       ] lr …      the pieces it owns, which may be none

Options such as learning rates go there before each step, and what the local optimizer made of them comes back after
it. Nothing here communicates.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwise.engine.step.optimizer_hooks import OPTIMIZER_HOOKS
from shardwise.optim.elementwise_classes import is_torchs_own
from shardwise.optim.joined_step import JoinedStep
from shardwise.plan.ownership import OwnedPiece
from shardwise.torch_internals import step_hooks
from shardwise.zero.consolidated_state import PieceState, owned_state
from shardwise.zero.partition import Partition

__all__ = ["LocalOptimizer"]

Groups = list[dict[str, Any]]

# What a group says of each parameter, in their order; all else are options.
_MEMBERS = ("params", "param_names")


class LocalOptimizer:
    """Keeps an optimizer of its own in step with groups of which it owns a part."""

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
        self.show_options()

    @property
    def runs_torch_alone(self) -> bool:
        """Whether a step without a closure runs nothing but torch's own code."""
        return self._joined is not None and all(map(OPTIMIZER_HOOKS.is_own, step_hooks(self.optim)))

    # --- groups --------------------------------------------------------------------------------------------------

    def add_group(self) -> None:
        """Takes this rank's pieces of the group that came last."""
        self.optim.add_param_group(self._own_groups()[-1])
        self.show_options()

    def take_options(self) -> None:
        """What the user, or a scheduler, set in the groups holds here too."""
        _copy_options(self._groups, self.optim.param_groups)

    def show_options(self) -> None:
        """What the local optimizer set by itself (defaults, keys of its own) shows in the user's groups too."""
        _copy_options(self.optim.param_groups, self._groups)

    def _own_groups(self) -> Groups:
        partition = self._partition
        own: Groups = [{**_options(group), **{key: [] for key in _members(group)}} for group in self._groups]
        names = [
            dict(zip(group["params"], group.get("param_names", ()), strict=False)) for group in self._groups
        ]
        for piece in partition.owned:
            number = partition.group_of[piece.param]
            own[number]["params"].append(partition.stepped(piece))
            if names[number]:
                own[number]["param_names"].append(names[number][partition.params[piece.param]])
        return own

    # --- steps ---------------------------------------------------------------------------------------------------

    def step(self, closure: Any, kwargs: dict[str, Any], buffers: Sequence[Tensor]) -> Any:
        """Steps this rank's pieces; ``buffers`` are those in which they lie, if there are any."""
        self.take_options()
        self._partition.bind_gradients()
        if closure is not None:
            if callable(closure):
                closure = self._partition.with_gradients(closure)
            loss = self.optim.step(closure=closure, **kwargs)
        elif self._joined is not None and self.runs_torch_alone:
            loss = self._joined(buffers, **kwargs)
        else:
            loss = self.optim.step(**kwargs)
        self._partition.release_gradients()
        self.show_options()
        return loss

    def step_pieces(self, gradients: Mapping[OwnedPiece, Tensor]) -> None:
        """Steps these owned pieces by these gradients, and nothing else."""
        if not gradients:
            return
        self.take_options()
        chosen = {self._partition.stepped(piece): grad for piece, grad in gradients.items()}
        held = [(tensor, tensor.grad) for tensor in chosen]
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
            for tensor, own_grad in held:
                tensor.grad = own_grad
        self.show_options()

    # --- other owners --------------------------------------------------------------------------------------------

    def give_up(self, indices: list[int], owner: int) -> list[PieceState]:
        """Makes another rank the owner of whole parameters; the state this rank had of them."""
        given = owned_state(self._partition, self.optim.state, only=indices)
        for index in indices:
            self.optim.state.pop(self._partition.params[index], None)
            self._partition.give(index, owner)
        for group, own in zip(self.optim.param_groups, self._own_groups(), strict=True):
            group.update(_members(own))
        return given

    def take_over(self, given: list[PieceState]) -> None:
        """Takes the state of parameters that this rank owns from now on."""
        for piece_state in given:
            param = self._partition.params[piece_state.piece.param]
            self.optim.state[param] = piece_state.values_for(param.device)

    # --- saving and loading --------------------------------------------------------------------------------------

    def saved_groups(self) -> Groups:
        """The user's groups with numbers in place of parameters, as a state dict has them."""
        index_of = self._partition.index_of
        return [{**group, "params": [index_of[param] for param in group["params"]]} for group in self._groups]

    def load(
        self, states: Mapping[OwnedPiece, dict[str, Any]], loose: Mapping[str, Any], saved_groups: Groups
    ) -> None:
        """Hands the local optimizer a state dict of its own, so that it casts and places as it always does."""
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
                    **copy.deepcopy(dict(loose)),
                    **{numbers[piece]: values for piece, values in states.items()},
                },
                "param_groups": own_groups,
            }
        )
        self.show_options()

    def _pieces_in_local_order(self) -> list[OwnedPiece]:
        """The order in which a state dict of the local optimizer numbers its tensors: group by group."""
        partition = self._partition
        return sorted(partition.owned, key=lambda piece: (partition.group_of[piece.param], piece))


def _copy_options(source: Groups, target: Groups) -> None:
    """Everything in the groups but the parameters: learning rates, what a scheduler or an optimizer added."""
    for source_group, target_group in zip(source, target, strict=True):
        target_group.update(_options(source_group))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _MEMBERS}


def _members(group: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: group[key] for key in _MEMBERS if key in group}


def _chosen_members(group: Mapping[str, Any], chosen: Container[Tensor]) -> dict[str, list[Any]]:
    # Tensors hash by identity, so this finds the chosen ones without comparing elements.
    kept = [number for number, tensor in enumerate(group["params"]) if tensor in chosen]
    return {key: [values[number] for number in kept] for key, values in _members(group).items()}
