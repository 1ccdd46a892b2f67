"""Steps small tensors that are neighbours in ZeRO's buffers as one tensor: the same arithmetic, in far fewer calls.

    separate [ w ][b][ w ][b][ w ][b]      an optimizer makes a dozen calls for each
    joined   [                      ]      and a dozen for all of them

During a step, the optimizer's groups hold one tensor over the memory of several. Its gradient is a copy of theirs, and
their states are views of its state. The authoritative state is per tensor, in the optimizer's ``state``, where it can
be read, saved, loaded or stepped one by one as usual. Large tensors are stepped in blocks (`cache_blocks`).

A kernel processes whole vectors first and the rest of a tensor element by element. In a joined tensor, that rest is in
the middle. So only those tensors are joined for which both ways give the same bits; `tests/unit/test_positions.py`
shows which, for every instruction set of the machine.
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

__all__ = ["JoinedStep", "State", "have_same_history"]

State = dict[str, Any]

# Copying a larger tensor's gradient costs as much as separate calls.
_SMALL_BYTES = 32 * 1024
# Vector and element-wise code give the same bits for these dtypes; for shorter floats the last bit may differ.
_EXACT_DTYPES = (torch.float32, torch.float64)
# In fused kernels it may differ for these too, so there only tensors of whole vectors are joined. No vector is longer.
_VECTOR_BYTES = 64
# Neighbours may be this far apart, for alignment; only padding is in between.
_GAP_BYTES = 128


class JoinedStep:
    """Steps one of torch's optimizers: small neighbours joined, large tensors in blocks, all others as they are."""

    def __init__(self, optim: Optimizer) -> None:
        self._optim = optim
        self._in_blocks = BlockedStep(optim)
        self._buffers: Sequence[Tensor] = ()
        self._kernels: list[tuple[Any, ...]] = []
        self._runs: list[_JoinedRun] | None = None
        self._others: list[list[Tensor]] = []
        # Tensors that are not joined with the one before: in some step, only one of the two had a gradient.
        self._seams: set[Tensor] = set()

    def __call__(self, buffers: Sequence[Tensor], **kwargs: Any) -> Any:
        """Steps the optimizer.

        Args:
            buffers: the memory of its tensors, with only padding between them; the same object until they move.
            **kwargs: passed on to the optimizer.
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
        while not all(run.copy_gradients() for run in self._runs):
            self._seams |= {after for run in self._runs for after in run.seams()}
            self._runs = self._join()
        return self._step(self._runs, kwargs)

    def _step(self, runs: list[_JoinedRun], kwargs: dict[str, Any]) -> Any:
        groups, states = self._optim.param_groups, self._optim.state
        params = [group["params"] for group in groups]
        try:
            for number, (group, others) in enumerate(zip(groups, self._others, strict=True)):
                group["params"] = [run.tensor for run in runs if run.group == number] + others
            for run in runs:
                states[run.tensor] = run.state
            return self._in_blocks(**kwargs)
        finally:
            for group, tensors in zip(groups, params, strict=True):
                group["params"] = tensors
            for run in runs:
                states.pop(run.tensor, None)
                run.publish_step(states)

    def _join(self) -> list[_JoinedRun]:
        """Makes all runs from the per-tensor state."""
        groups, states = self._optim.param_groups, self._optim.state
        by_address = [
            (tensor.data_ptr(), number, tensor)
            for number, group in enumerate(groups)
            for tensor in group["params"]
            if tensor.numel()
        ]
        by_address.sort(key=operator.itemgetter(0))
        runs = []
        for buffer in self._buffers:
            begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
            inside = [(number, tensor) for address, number, tensor in by_address if begin <= address < end]
            runs += [_JoinedRun(number, buffer, members) for number, members in self._neighbours(inside)]
        for run in runs:
            run.adopt_state(states)
        joined = {member for run in runs for member in run.members}
        self._others = [[tensor for tensor in group["params"] if tensor not in joined] for group in groups]
        # The old one caches blocks of the old runs.
        self._in_blocks = BlockedStep(self._optim)
        return runs

    def _neighbours(self, inside: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yields two or more neighbours that can be joined, with the number of their group."""
        groups, states = self._optim.param_groups, self._optim.state
        members: list[Tensor] = []
        members_group = -1
        for number, tensor in inside:
            may_join = _may_join(tensor, groups[number])
            last = members[-1] if members else None
            if (
                may_join
                and last is not None
                and tensor not in self._seams
                and number == members_group
                and tensor.dtype is last.dtype
                and tensor.data_ptr() - last.data_ptr() - last.nbytes < _GAP_BYTES
                and have_same_history(states.get(last), states.get(tensor))
            ):
                members.append(tensor)
                continue
            if len(members) > 1:
                yield members_group, members
            members, members_group = [tensor] if may_join else [], number
        if len(members) > 1:
            yield members_group, members


def _may_join(tensor: Tensor, group: dict[str, Any]) -> bool:
    return (
        tensor.device.type == "cpu"
        # State of a 0-dim parameter could not be told from a step count.
        and tensor.dim() > 0
        and tensor.nbytes < _SMALL_BYTES
        and tensor.dtype in _EXACT_DTYPES
        and not (group.get("fused") and tensor.nbytes % _VECTOR_BYTES)
        and not group.get("differentiable")
    )


def have_same_history(one: State | None, other: State | None) -> bool:
    """Whether two tensors' states differ only in what is kept per element."""
    if not one or not other:
        return not one and not other
    return one.keys() == other.keys() and all(_are_alike(one[name], other[name]) for name in one)


def _are_alike(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor) and value.dtype is other.dtype:
        is_count = not value.dim() and not other.dim()
        return value is other or bool(value == other) if is_count else bool(value.dim() and other.dim())
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
        # The padding stays zero.
        self._gradient = torch.zeros_like(self.tensor)
        self._gradients = self._views_of(self._gradient)
        self.state: State = {}
        # The values of `state` of which the members have views.
        self._published: State = {}
        # For each step count or the like: the members' own copies, in one tensor.
        self._counts: dict[str, Tensor] = {}
        # The members' states and their values after the last step, to notice replacements.
        self._states: list[State | None] = []
        self._values: list[Any] = []

    def _views_of(self, value: Tensor) -> list[Tensor]:
        """Returns each member's part of a tensor that is laid out like the run's, with a storage of its own."""
        return [
            from_dlpack(value[start : start + member.numel()]).as_strided(member.size(), member.stride())
            for start, member in zip(self._starts, self.members, strict=True)
        ]

    # --- gradients ------------------------------------------------------------------------------------------------

    def copy_gradients(self) -> bool:
        """Copies the members' gradients into the run's; returns False if only some have one that can be copied."""
        gradients = [member.grad for member in self.members]
        plain = self._plain(gradients)
        if len(plain) == len(gradients):
            copy_all(self._gradients, plain)
            self.tensor.grad = self._gradient
            return True
        # Tensors without a gradient are not stepped.
        self.tensor.grad = None
        return all(gradient is None for gradient in gradients)

    def _plain(self, gradients: Iterable[Tensor | None]) -> list[Tensor]:
        dtype, layout = self.tensor.dtype, torch.strided
        return [
            grad for grad in gradients if grad is not None and grad.dtype is dtype and grad.layout is layout
        ]

    def seams(self) -> Iterator[Tensor]:
        """Yields members that cannot be joined with the member before."""
        for before, member in pairwise(self.members):
            gradients = (before.grad, member.grad)
            if len(self._plain(gradients)) < 2 and any(gradient is not None for gradient in gradients):
                yield member

    # --- state ----------------------------------------------------------------------------------------------------

    def holds(self, states: dict[Tensor, State]) -> bool:
        """Whether the run is still valid: no member's state was replaced, and none was stepped alone."""
        return (
            all(map(operator.is_, map(states.get, self.members), self._states))
            and all(map(operator.is_, _values_of(self._states), self._values))
            and all(torch.equal(counts, counts[0].expand_as(counts)) for counts in self._counts.values())
        )

    def adopt_state(self, states: dict[Tensor, State]) -> None:
        """Makes the run's state from the members'; theirs become views of it."""
        given = [states.get(member) or {} for member in self.members]
        for name, value in given[0].items():
            if isinstance(value, Tensor) and value.dim():
                joined = torch.zeros_like(self.tensor, dtype=value.dtype)
                copy_all(self._views_of(joined), [state[name] for state in given])
                value = joined
            self.state[name] = value
        self._publish(self.state, states)

    def publish_step(self, states: dict[Tensor, State]) -> None:
        """After a step: marks the members as modified, and updates their states."""
        # The step wrote through another tensor over the same memory, which autograd does not see.
        increment_version(self.members)
        for name, counts in self._counts.items():
            counts.fill_(self.state[name])
        new = {name: value for name, value in self.state.items() if self._published.get(name) is not value}
        if new:
            self._publish(new, states)

    def _publish(self, new: State, states: dict[Tensor, State]) -> None:
        """Gives each member its view of new values of the run's state."""
        for name, value in list(new.items()):
            parts = [value] * len(self.members)
            if isinstance(value, Tensor) and value.dim():
                parts = self._views_of(value)
            elif isinstance(value, Tensor):
                # A step count or the like: each member has its own copy, and the run uses the first member's.
                self._counts[name] = counts = value.repeat(len(self.members))
                parts = [from_dlpack(count).view(()) for count in counts.split(1)]
                self.state[name] = parts[0]
            self._published[name] = self.state[name]
            for member, part in zip(self.members, parts, strict=True):
                states.setdefault(member, {})[name] = part
        self._states = [states.get(member) for member in self.members]
        self._values = list(_values_of(self._states))


def _values_of(states: Iterable[State | None]) -> Iterator[Any]:
    return chain.from_iterable([state.values() for state in states if state is not None])
