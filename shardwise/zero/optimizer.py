"""ZeroRedundancyOptimizer: each rank keeps the state of, and steps, only the pieces it owns.

    backward       every rank has all reduced gradients
    local step     rank r's optimizer steps rank r's pieces            state: 1/world a rank
    sync           every rank's pieces to every other rank             one exchange a device

Sharing out is `partition`'s work, sending is `sync`'s, saving is `state`'s; here they meet torch's Optimizer.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from shardwise.comm.collectives import wire_of
from shardwise.comm.path import code_of
from shardwise.comm.wire import Wire
from shardwise.engine.stepping import last_checkpoint
from shardwise.errors import ConfigError, StateError
from shardwise.optim.elementwise import is_elementwise, is_torchs_own
from shardwise.optim.joined import JoinedStep
from shardwise.plan.ownership import Piece
from shardwise.torch_internals import (
    has_step_hooks,
    join_is_watching,
    run_after_load_state_dict,
    run_after_state_dict,
    run_before_load_state_dict,
    run_before_state_dict,
)
from shardwise.zero import admission, state
from shardwise.zero.join import ZeroJoinHook, share_gradients
from shardwise.zero.partition import Partition
from shardwise.zero.sync import ParameterSync

__all__ = ["ZeroRedundancyOptimizer"]

_EXCHANGE = code_of("exchange the parameters that a ZeroRedundancyOptimizer has stepped")
_CONSOLIDATE = code_of("consolidate the state of a ZeroRedundancyOptimizer")


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Shards any optimizer's state over the ranks of a group.

    Args:
        params: tensors, or dicts with a ``params`` key, as for any optimizer; dtypes and devices may be mixed. All
            ranks pass the same ones, in the same order.
        optimizer_class: the class each rank makes its local optimizer of, found at ``.optim``.
        process_group: the ranks to share over; the default group if None.
        parameters_as_bucket_view: keep parameters in buffers from which they travel without copies. Their
            ``.data`` moves there; it saves a copy or many small messages a step.
        overlap_with_ddp: step inside DistributedDataParallel's backward, by a hook of ``hook_with_zero_step`` or
            ``hook_with_zero_step_interleaved``; ``step()`` then does nothing.
        balanced: cut parameters where a fair share ends, so that state a rank is total/world even if one
            parameter dominates. For element-wise optimizers; a class of your own says so by
            ``elementwise = True``.
        **defaults: passed on to ``optimizer_class``.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        balanced: bool = False,
        **defaults: Any,
    ) -> None:
        listed = admission.list_parameters(params)
        self.process_group = admission.group_or_world(process_group)
        self.world_size = self.process_group.size()
        self.rank = self.process_group.rank()
        self.global_rank = dist.get_global_rank(self.process_group, self.rank)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.overlap_with_ddp = overlap_with_ddp
        self._element_wise = is_elementwise(optimizer_class)
        _check_options(optimizer_class, balanced=balanced, overlap=overlap_with_ddp)

        # torch's constructor adds the groups one by one, when there is nobody yet to share them out.
        self.initialized = False
        Optimizer.__init__(self, listed, defaults)
        Joinable.__init__(self)
        groups = [group["params"] for group in self.param_groups]
        options = f"{optimizer_class.__qualname__}, balanced={balanced}, views={parameters_as_bucket_view}"
        # Agreement comes first: what is refused after it is refused on every rank.
        admission.check_ranks_agree(groups, options, self.process_group)
        admission.check_parameters([param for group in groups for param in group])

        self.partition = Partition(self.rank, self.world_size, balanced=balanced)
        self.partition.add_groups(groups)
        self._sync = ParameterSync(
            self.partition,
            self.process_group,
            as_views=parameters_as_bucket_view and not overlap_with_ddp,
        )
        self.optim = optimizer_class(self._local_groups(), **defaults)
        self._joined = JoinedStep(self.optim) if is_torchs_own(optimizer_class) else None

        self._show_local_optimizer()
        self._step_codes: dict[tuple[int, ...] | None, int] = {}
        # Watched from here on: ranks that wait in their first step can see where this one is.
        self._known_wire = self._find_wire()
        self._consolidated: dict[int, dict[str, Any]] | None = None
        self._under_join = False
        self._hooked = False
        self._warned_of_step = False
        self.initialized = True

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "a ZeroRedundancyOptimizer cannot be copied or pickled: it belongs to a process group",
            where=f"rank {self.rank}",
            fix="build a new one and load state_dict() or sharded_state_dict() into it",
        )

    # --- groups ----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, on every rank; its parameters go to the ranks that have the least."""
        super().add_param_group(param_group)
        if not self.initialized:
            return
        added = self.param_groups[-1]["params"]
        first = len(self.partition.params)
        try:
            admission.check_ranks_agree([added], "add_param_group", self.process_group, first=first)
            admission.check_parameters(added, first=first)
        except Exception:
            self.param_groups.pop()
            raise
        self.partition.add_groups([added])
        self._sync.refresh()
        self.optim.add_param_group(self._local_groups()[-1])
        self._show_local_optimizer()

    def _local_groups(self) -> list[dict[str, Any]]:
        """The groups with this rank's tensors in place of all; some may be empty."""
        partition = self.partition
        stepped: list[list[Tensor]] = [[] for _ in self.param_groups]
        for piece in partition.owned:
            stepped[partition.group_of[piece.param]].append(partition.stepped(piece))
        return [
            {**_options(group), "params": tensors}
            for group, tensors in zip(self.param_groups, stepped, strict=True)
        ]

    def _show_local_optimizer(self) -> None:
        """What the local optimizer set by itself (defaults, keys of its own, state) shows here too."""
        _copy_options(self.optim.param_groups, self.param_groups)
        self.state = self.optim.state

    # --- step ------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps what this rank owns, then brings all parameters up to date on all ranks.

        Args:
            closure: handed to the local optimizer, if given.
            **kwargs: handed to the local optimizer.
        """
        if self.overlap_with_ddp:
            return self._skip_step()
        return self._step(closure, kwargs, joined=False)

    def _step(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any], *, joined: bool) -> Any:
        if not joined:
            Join.notify_join_context(self)
        self._agree(has_closure=closure is not None)
        if self._under_join and join_is_watching(self):
            share_gradients(self.partition, self.process_group, joined=joined)
        self._sync.refresh()
        try:
            loss = self._step_own(closure, kwargs)
        except BaseException as error:
            self._tear(error, has_closure=closure is not None)
            raise
        if closure is not None or self._joined is None or has_step_hooks(self.optim):
            # They may have replaced a parameter's memory, or stepped a frozen one by a gradient of theirs.
            self._sync.refresh()
        self._exchange()
        return loss

    def _step_own(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        _copy_options(self.param_groups, self.optim.param_groups)
        self.partition.bind_gradients()
        if closure is not None:
            if callable(closure):
                closure = self.partition.with_gradients(closure)
            loss = self.optim.step(closure=closure, **kwargs)
        elif self._joined is not None:
            loss = self._joined(self._sync.buffers, **kwargs)
        else:
            loss = self.optim.step(**kwargs)
        self.partition.release_gradients()
        _copy_options(self.optim.param_groups, self.param_groups)
        return loss

    def _exchange(self) -> None:
        with self._wire.watched(_EXCHANGE, looks_itself=self._sync.looks_for_verdicts):
            self._sync.run()

    def _tear(self, error: BaseException, *, has_closure: bool) -> None:
        """This rank's step raised: peers are not left waiting for its pieces, and are told."""
        if not has_closure:
            # All of them come to the exchange; inside a closure they may be anywhere.
            with contextlib.suppress(Exception):
                self._sync.refresh()
                self._exchange()
        checkpoint = f" ({last_checkpoint()})" if last_checkpoint() else ""
        self._wire.break_off(
            f"{type(error).__name__} in the step of a ZeroRedundancyOptimizer, which is torn: some parameters are "
            f"updated and some are not; load the last checkpoint{checkpoint}"
        )

    @property
    def _wire(self) -> Wire:
        if self._known_wire.device.type != self.partition.params[0].device.type:
            self._known_wire = self._find_wire()
        return self._known_wire

    def _find_wire(self) -> Wire:
        return wire_of(self.process_group, self.partition.params[0].device)

    def _agree(self, has_closure: bool) -> None:
        """Lets no rank step before all have come here, with gradients of the same parameters."""
        params = self.partition.params
        if has_closure or self._under_join:
            # The closure brings the gradients; ranks that have run out of inputs have none.
            absent = None
        else:
            absent = tuple([number for number, param in enumerate(params) if param.grad is None])
        code = self._step_codes.get(absent)
        if code is None:
            words = "step a ZeroRedundancyOptimizer"
            if absent is not None:
                words += f" of {len(params)} parameters"
            if absent:
                words += f", without gradients of {[*absent]}"
            code = self._step_codes[absent] = code_of(words)
        self._wire.agree(code)

    def _skip_step(self) -> None:
        if not self._hooked:
            raise StateError(
                "overlap_with_ddp=True, but no hook steps this optimizer, so nothing would ever be updated",
                where=f"ZeroRedundancyOptimizer.step(), rank {self.rank}",
                fix="ddp.register_comm_hook(state, hook_with_zero_step(hook, ddp, optimizer)), "
                "or overlap_with_ddp=False",
            )
        if not self._warned_of_step:
            self._warned_of_step = True
            warnings.warn(
                "step() does nothing with overlap_with_ddp=True: the parameters were updated in backward",
                stacklevel=3,
            )

    # --- steps in backward -----------------------------------------------------------------------------------

    def expect_steps_in_backward(self) -> None:
        """Says that a hook of DistributedDataParallel steps this optimizer."""
        self._hooked = True

    def step_pieces(self, gradients: Mapping[Piece, Tensor]) -> None:
        """Steps these owned pieces by these gradients, and nothing else; sends nothing."""
        if not gradients:
            return
        _copy_options(self.param_groups, self.optim.param_groups)
        chosen = {self.partition.stepped(piece): grad for piece, grad in gradients.items()}
        held = [(tensor, tensor.grad) for tensor in chosen]
        all_tensors = [group["params"] for group in self.optim.param_groups]
        try:
            for tensor, grad in chosen.items():
                tensor.grad = grad
            # Tensors hash by identity, so this finds the chosen ones without comparing elements.
            for group in self.optim.param_groups:
                group["params"] = [tensor for tensor in group["params"] if tensor in chosen]
            self.optim.step()
        finally:
            for group, tensors in zip(self.optim.param_groups, all_tensors, strict=True):
                group["params"] = tensors
            for tensor, own_grad in held:
                tensor.grad = own_grad
        _copy_options(self.optim.param_groups, self.param_groups)

    def give_up(self, indices: list[int], owner: int) -> list[state.PieceState]:
        """Makes another rank the owner of whole parameters; the state this rank had of them."""
        given = state.owned_state(self.partition, self.optim.state, only=indices)
        for index in indices:
            self.optim.state.pop(self.partition.params[index], None)
            self.partition.give(index, owner)
        for group, local in zip(self.optim.param_groups, self._local_groups(), strict=True):
            group["params"] = local["params"]
        return given

    def take_over(self, given: list[state.PieceState]) -> None:
        """Takes the state of parameters that this rank owns from now on."""
        for piece_state in given:
            param = self.partition.params[piece_state.piece.param]
            self.optim.state[param] = piece_state.values_for(param.device)

    # --- uneven inputs ---------------------------------------------------------------------------------------

    def join_hook(self, **_kwargs: Any) -> ZeroJoinHook:
        """The hook with which a rank that has run out of inputs steps along; for torch's ``Join``."""
        self._under_join = True
        return ZeroJoinHook(self)

    def step_joined(self) -> None:
        """The step of a rank that has no inputs any more."""
        self._step(None, {}, joined=True)

    def leave_join(self) -> None:
        self._under_join = False

    @property
    def join_device(self) -> torch.device:
        return self.partition.params[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # --- state on one rank -----------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collects the whole state on rank ``to`` of the group, on the CPU. Called on every rank."""
        if not 0 <= to < self.world_size:
            raise ConfigError(
                f"there is no rank {to} to consolidate to: the group has {self.world_size}",
                where=f"consolidate_state_dict(to={to}), rank {self.rank}",
                fix=f"use a rank of the group, 0 to {self.world_size - 1}",
            )
        _copy_options(self.param_groups, self.optim.param_groups)
        gathered: list[Any] | None = [None] * self.world_size if self.rank == to else None
        own = state.owned_state(self.partition, self.optim.state)
        self._wire.agree(_CONSOLIDATE)
        with self._wire.watched(_CONSOLIDATE):
            dist.gather_object(own, gathered, group=self.process_group, group_dst=to)
        self._consolidated = None
        if gathered is not None:
            states = (piece_state for of_rank in gathered for piece_state in of_rank)
            self._consolidated = state.consolidate(states, self.partition.params)

    def state_dict(self) -> dict[str, Any]:
        """The state as last consolidated on this rank, in the form of an unsharded optimizer's."""
        if self._consolidated is None:
            raise StateError(
                f"the state has not been consolidated on rank {self.rank}",
                where=f"ZeroRedundancyOptimizer.state_dict(), rank {self.rank}",
                fix=f"call consolidate_state_dict(to={self.rank}) on all ranks first, or save "
                "sharded_state_dict() with torch.distributed.checkpoint",
            )
        run_before_state_dict(self)
        saved = {"state": dict(self._consolidated), "param_groups": self._saved_groups()}
        return run_after_state_dict(self, saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's part of a consolidated state dict; each rank passes the whole of it."""
        state_dict = run_before_load_state_dict(self, state_dict)
        groups = [group["params"] for group in self.param_groups]
        state.check_fits(state_dict, groups, element_wise=self._element_wise)
        positions = state.saved_positions(state_dict)
        by_param = {positions[number]: values for number, values in state_dict["state"].items() if values}
        self._load_local(state.state_of_own_pieces(self.partition, by_param), state_dict["param_groups"])
        run_after_load_state_dict(self)

    # --- state on all ranks ----------------------------------------------------------------------------------

    def sharded_state_dict(self, *, like: Metadata | None = None, prefix: str = "") -> dict[str, Any]:
        """This rank's part of the state, for ``torch.distributed.checkpoint`` to save or to load into.

        Nothing is communicated or copied. What one world size saved, any other loads, balanced or not.

        Args:
            like: a checkpoint's metadata (``FileSystemReader(path).read_metadata()``); gives room for what that
                checkpoint holds, instead of the present state.
            prefix: what comes before these keys in the checkpoint, such as ``"optimizer."``.
        """
        if like is None:
            entries = state.sharded_entries(self.partition, self.optim.state)
        else:
            entries = state.templates(self.partition, like, prefix, element_wise=self._element_wise)
        orders = state.memory_orders(self.partition.params)
        return {**entries, "param_groups": self._saved_groups(), "memory_orders": orders}

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what a checkpoint was loaded into: a ``sharded_state_dict()`` of this optimizer."""
        saved = state_dict["param_groups"]
        groups = [group["params"] for group in self.param_groups]
        state.check_fits({"state": {}, "param_groups": saved}, groups, element_wise=self._element_wise)
        state.check_memory_orders(state_dict["memory_orders"], self.partition.params)
        self._load_local(state.state_of_sharded(self.partition, state_dict), saved)

    def _saved_groups(self) -> list[dict[str, Any]]:
        index_of = self.partition.index_of
        return [
            {**group, "params": [index_of[param] for param in group["params"]]} for group in self.param_groups
        ]

    def _load_local(self, states: Mapping[Piece, dict[str, Any]], saved_groups: list[dict[str, Any]]) -> None:
        """Hands the local optimizer a state dict of its own, so that it casts and places as it always does."""
        numbers = {piece: number for number, piece in enumerate(self._pieces_in_local_order())}
        local_groups = []
        for group_number, saved in enumerate(saved_groups):
            ours = [
                numbers[piece] for piece in numbers if self.partition.group_of[piece.param] == group_number
            ]
            local_groups.append({**copy.deepcopy(_options(saved)), "params": ours})
        self.optim.load_state_dict(
            {
                "state": {numbers[piece]: values for piece, values in states.items()},
                "param_groups": local_groups,
            }
        )
        self._show_local_optimizer()

    def _pieces_in_local_order(self) -> list[Piece]:
        """The order in which a state dict of the local optimizer numbers its tensors: group by group."""
        return sorted(self.partition.owned, key=lambda piece: (self.partition.group_of[piece.param], piece))


def _check_options(optimizer_class: type[Optimizer], *, balanced: bool, overlap: bool) -> None:
    name = optimizer_class.__name__
    if balanced and not is_elementwise(optimizer_class):
        raise ConfigError(
            f"balanced=True splits parameters, and {name} is not known to update each element by itself",
            where="ZeroRedundancyOptimizer()",
            fix=f"use balanced=False, or set {name}.elementwise = True if it does",
        )
    if overlap and admission.needs_closure(optimizer_class):
        raise ConfigError(
            f"overlap_with_ddp=True steps during backward, and {name}.step() needs a closure",
            where="ZeroRedundancyOptimizer()",
            fix="use overlap_with_ddp=False, or an optimizer that needs no closure",
        )


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Everything in the groups but the parameters: learning rates, what a scheduler or an optimizer added."""
    for source_group, target_group in zip(source, target, strict=True):
        target_group.update(_options(source_group))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
