"""Stepping small neighbours in memory as one tensor: the same arithmetic, in far fewer calls.

    given    [ w ][b][ w ][b][ w ][b]      an optimizer makes a dozen calls for each
    joined   [                      ]      and a dozen for all of them

For the time of a step the optimizer is shown one tensor over the memory of several, with one gradient, into which
theirs are copied, and one state, of which theirs are parts. The truth is per tensor, in the optimizer's ``state``:
whoever looks there, saves it, loads it, or steps tensors one by one sees nothing else. Large tensors are stepped in
blocks (`blocks`), joined or not.

A kernel takes memory vector by vector, and what is left at a tensor's end one by one; joined, that end lies in the
middle. So only such tensors are joined of which a kernel makes the same either way: `tests/unit/test_positions.py` says
which, with the instructions of every processor at hand.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.dlpack import from_dlpack

from shardwise.optim.cache_blocks import BlockedStep
from shardwise.torch_internals import copy_all

__all__ = ["JoinedStep"]

State = dict[str, Any]

# To copy the gradient of a larger one costs what its own calls do.
_SMALL_BYTES = 32 * 1024
# What kernels make of these does not depend on the way; of shorter ones, the last bit does.
_ALIKE = (torch.float32, torch.float64)
# Of those that fused kernels step it does: there, whole vectors alone are joined. None is longer than this.
_VECTOR_BYTES = 64
# Neighbours may lie this far apart, each where memory is read best, with nothing in between.
_GAP_BYTES = 128


class JoinedStep:
    """Steps an optimizer of torch's own: small neighbours together, large tensors in blocks, all others as they are."""

    def __init__(self, optim: Optimizer) -> None:
        self._optim = optim
        self._in_blocks = BlockedStep(optim)
        self._buffers: Sequence[Tensor] = ()
        self._kernels: list[tuple[Any, ...]] = []
        self._runs: list[_JoinedRun] | None = None
        self._others: list[list[Tensor]] = []
        # Those that had a gradient in a step in which the one before had none, or the other way round.
        self._seams: set[Tensor] = set()

    def __call__(self, buffers: Sequence[Tensor], **kwargs: Any) -> Any:
        """Steps the optimizer.

        Args:
            buffers: where its tensors lie, with nothing but each other between them; the same object until they move.
            **kwargs: handed to the optimizer.
        """
        kernels = [(group.get("fused"), group.get("differentiable")) for group in self._optim.param_groups]
        if buffers is not self._buffers or kernels != self._kernels:
            self._buffers, self._kernels, self._runs = buffers, kernels, None
            self._seams.clear()
        if not buffers:
            return self._in_blocks(**kwargs)
        states = self._optim.state
        if self._runs is None or not all(run.holds(states) for run in self._runs):
            self._runs = self._join()
        while not all(run.take_gradients() for run in self._runs):
            self._seams |= {after for run in self._runs for after in run.seams()}
            self._runs = self._join()
        return self._step(self._runs, kwargs)

    def _step(self, runs: list[_JoinedRun], kwargs: dict[str, Any]) -> Any:
        groups, states = self._optim.param_groups, self._optim.state
        given = [group["params"] for group in groups]
        try:
            for number, (group, others) in enumerate(zip(groups, self._others, strict=True)):
                group["params"] = [run.tensor for run in runs if run.group == number] + others
            for run in runs:
                states[run.tensor] = run.state
            return self._in_blocks(**kwargs)
        finally:
            for group, tensors in zip(groups, given, strict=True):
                group["params"] = tensors
            for run in runs:
                states.pop(run.tensor, None)
                run.publish_step(states)

    def _join(self) -> list[_JoinedRun]:
        """Makes runs anew, out of the state as it is per tensor."""
        groups, states = self._optim.param_groups, self._optim.state
        lying = [
            (tensor.data_ptr(), number, tensor)
            for number, group in enumerate(groups)
            for tensor in group["params"]
            if tensor.numel()
        ]
        lying.sort(key=operator.itemgetter(0))
        runs = []
        for buffer in self._buffers:
            begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
            inside = [(number, tensor) for address, number, tensor in lying if begin <= address < end]
            runs += [_JoinedRun(number, buffer, members) for number, members in self._neighbours(inside)]
        for run in runs:
            run.adopt_state(states)
        joined = {member for run in runs for member in run.members}
        self._others = [[tensor for tensor in group["params"] if tensor not in joined] for group in groups]
        # Blocks of tensors that were joined otherwise are of no use any more.
        self._in_blocks = BlockedStep(self._optim)
        return runs

    def _neighbours(self, inside: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, list[Tensor]]]:
        """Two or more of one group, next to each other, that differ in their elements alone."""
        groups, states = self._optim.param_groups, self._optim.state
        members: list[Tensor] = []
        of_group = -1
        for number, tensor in inside:
            may_join = _may_join(tensor, groups[number])
            last = members[-1] if members else None
            if (
                may_join
                and last is not None
                and tensor not in self._seams
                and number == of_group
                and tensor.dtype is last.dtype
                and tensor.data_ptr() - last.data_ptr() - last.nbytes < _GAP_BYTES
                and _have_one_history(states.get(last), states.get(tensor))
            ):
                members.append(tensor)
                continue
            if len(members) > 1:
                yield of_group, members
            members, of_group = [tensor] if may_join else [], number
        if len(members) > 1:
            yield of_group, members


def _may_join(tensor: Tensor, group: dict[str, Any]) -> bool:
    return (
        tensor.device.type == "cpu"
        # State of its own that has no dims would be taken for a count.
        and tensor.dim() > 0
        and tensor.nbytes < _SMALL_BYTES
        and tensor.dtype in _ALIKE
        and not (group.get("fused") and tensor.nbytes % _VECTOR_BYTES)
        and not group.get("differentiable")
    )


def _have_one_history(one: State | None, other: State | None) -> bool:
    if not one or not other:
        return not one and not other
    return one.keys() == other.keys() and all(_are_alike(one[name], other[name]) for name in one)


def _are_alike(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor) and value.dtype is other.dtype:
        is_count = not value.dim() and not other.dim()
        return bool(value == other) if is_count else bool(value.dim() and other.dim())
    return not isinstance(value, Tensor) and not isinstance(other, Tensor) and bool(value == other)


class _JoinedRun:
    """Neighbours that are stepped as one tensor."""

    def __init__(self, group: int, buffer: Tensor, members: Sequence[Tensor]) -> None:
        self.group = group
        self.members = members
        first, last = members[0], members[-1]
        address, itemsize = first.data_ptr(), first.itemsize
        self._starts = [(member.data_ptr() - address) // itemsize for member in members]
        begin, num_bytes = address - buffer.data_ptr(), last.data_ptr() + last.nbytes - address
        self.tensor = buffer[begin : begin + num_bytes].view(first.dtype)
        # Zero where there is no member, for good.
        self._gradient = torch.zeros_like(self.tensor)
        self._gradients = self._parts_of(self._gradient)
        self.state: State = {}
        # What of it the members have been shown, and what those have that is not per element, end to end.
        self._shown: State = {}
        self._counts: dict[str, Tensor] = {}
        # The members' state as it was left.
        self._states: list[State | None] = []
        self._values: list[Any] = []

    def _parts_of(self, value: Tensor) -> list[Tensor]:
        """Each member's part of a tensor like the run's, as a tensor that owns just that, as far as torch can see."""
        return [
            from_dlpack(value[start : start + member.numel()]).as_strided(member.size(), member.stride())
            for start, member in zip(self._starts, self.members, strict=True)
        ]

    # --- gradients ------------------------------------------------------------------------------------------------

    def take_gradients(self) -> bool:
        """Copies the members' gradients to where the run's lies; False if only some have one that can be copied."""
        gradients = [member.grad for member in self.members]
        plain = self._plain(gradients)
        if len(plain) == len(gradients):
            copy_all(self._gradients, plain)
            self.tensor.grad = self._gradient
            return True
        # Without a gradient it is not stepped.
        self.tensor.grad = None
        return all(gradient is None for gradient in gradients)

    def _plain(self, gradients: Iterable[Tensor | None]) -> list[Tensor]:
        dtype, layout = self.tensor.dtype, torch.strided
        return [
            grad for grad in gradients if grad is not None and grad.dtype is dtype and grad.layout is layout
        ]

    def seams(self) -> Iterator[Tensor]:
        """Members that cannot be stepped as one tensor with the member before."""
        for before, member in pairwise(self.members):
            gradients = (before.grad, member.grad)
            if len(self._plain(gradients)) < 2 and any(gradient is not None for gradient in gradients):
                yield member

    # --- state ----------------------------------------------------------------------------------------------------

    def holds(self, states: dict[Tensor, State]) -> bool:
        """Whether the members' state is as it was left: nobody replaced it, or stepped some of them alone."""
        return (
            all(map(operator.is_, map(states.get, self.members), self._states))
            and all(map(operator.is_, _values_of(self._states), self._values))
            and all(torch.equal(counts, counts[0].expand_as(counts)) for counts in self._counts.values())
        )

    def adopt_state(self, states: dict[Tensor, State]) -> None:
        """Makes the run's state out of the members'; theirs is then part of it."""
        given = [states.get(member) or {} for member in self.members]
        for name, value in given[0].items():
            if isinstance(value, Tensor) and value.dim():
                together = torch.zeros_like(self.tensor, dtype=value.dtype)
                copy_all(self._parts_of(together), [state[name] for state in given])
                value = together
            self.state[name] = value
        self._show(self.state, states)

    def publish_step(self, states: dict[Tensor, State]) -> None:
        """After a step: lets everybody see what became of the members."""
        # Written through another tensor over their memory: to whoever asks, they have changed.
        increment_version(self.members)
        for name, counts in self._counts.items():
            counts.fill_(self.state[name])
        made = {name: value for name, value in self.state.items() if self._shown.get(name) is not value}
        if made:
            self._show(made, states)

    def _show(self, made: State, states: dict[Tensor, State]) -> None:
        """Gives each member its part of what is new in the run's state."""
        for name, value in list(made.items()):
            parts = [value] * len(self.members)
            if isinstance(value, Tensor) and value.dim():
                parts = self._parts_of(value)
            elif isinstance(value, Tensor):
                # A count of steps, say: each member has its own, and that of the first is the run's.
                self._counts[name] = counts = value.repeat(len(self.members))
                parts = [from_dlpack(count).view(()) for count in counts.split(1)]
                self.state[name] = parts[0]
            self._shown[name] = self.state[name]
            for member, part in zip(self.members, parts, strict=True):
                states.setdefault(member, {})[name] = part
        self._states = [states.get(member) for member in self.members]
        self._values = list(_values_of(self._states))


def _values_of(states: Iterable[State | None]) -> Iterator[Any]:
    return chain.from_iterable([state.values() for state in states if state is not None])
