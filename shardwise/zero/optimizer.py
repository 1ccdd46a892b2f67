"""ZeroRedundancyOptimizer: each rank keeps the state of, and steps, only the pieces it owns.

    backward       every rank has all reduced gradients
    local step     rank r's optimizer steps rank r's pieces            state: 1/world a rank
    sync           every rank's pieces to every other rank             one exchange a device

`partition` assigns owners, `local_optimizer` steps, `sync` sends; `consolidated_state` and `sharded_state` convert
state to the two forms in which it is saved. This module combines them behind torch's Optimizer interface.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from shardwise.comm.channels.channel import collective_code
from shardwise.errors import ConfigError, StateError
from shardwise.optim.elementwise_classes import is_elementwise
from shardwise.planning.ownership import OwnedPiece
from shardwise.torch_internals import (
    is_inside_join,
    run_after_load_state_dict,
    run_after_state_dict,
    run_before_load_state_dict,
    run_before_state_dict,
)
from shardwise.zero import argument_checks, consolidated_state, sharded_state
from shardwise.zero.consolidated_state import PieceState
from shardwise.zero.copies import CopiedOptimizer, GroupReference
from shardwise.zero.join import ZeroJoinHook, share_gradients
from shardwise.zero.local_optimizer import LocalOptimizer
from shardwise.zero.partition import Partition
from shardwise.zero.sync import OptimizerAgreement, ParameterSync

__all__ = ["ZeroRedundancyOptimizer"]

# Attributes that a copy gets when it is built.
_BUILT = frozenset(
    (
        "_arguments",
        "_consolidated",
        "_element_wise",
        "_join_config",
        "_sync",
        "_under_join",
        "_warned_of_step",
        "agreement",
        "global_rank",
        "is_stepped_in_backward",
        "local",
        "optim",
        "overlap_with_ddp",
        "parameters_as_bucket_view",
        "partition",
        "process_group",
        "rank",
        "world_size",
    )
)


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Shards any optimizer's state over the ranks of a group.

    Args:
        params: tensors, or dicts with a ``params`` key, as for any optimizer; dtypes and devices may be mixed. All
            ranks pass the same parameters, in the same order.
        optimizer_class: the class of each rank's local optimizer, which is the attribute ``optim``.
        process_group: the ranks to shard over; the default group if None.
        parameters_as_bucket_view: make parameters views of buffers that are sent without copies. Moves their
            ``.data``; saves a copy or many small messages per step.
        overlap_with_ddp: step inside DistributedDataParallel's backward, with a hook from ``hook_with_zero_step`` or
            ``hook_with_zero_step_interleaved``; ``step()`` then does nothing.
        balanced: split parameters so that every rank has total/world of the state, even if one parameter dominates.
            For element-wise optimizers; declare a class of your own with ``elementwise = True``.
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
        self._arguments = {
            "optimizer_class": optimizer_class,
            "parameters_as_bucket_view": parameters_as_bucket_view,
            "overlap_with_ddp": overlap_with_ddp,
            "balanced": balanced,
            **defaults,
        }
        self.process_group = argument_checks.group_or_world(process_group)
        self.world_size = self.process_group.size()
        self.rank = self.process_group.rank()
        self.global_rank = dist.get_global_rank(self.process_group, self.rank)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.overlap_with_ddp = overlap_with_ddp
        self.initialized = False
        with argument_checks.reporting_to_peers(self.process_group):
            listed = argument_checks.list_parameters(params)
            argument_checks.check_class(
                optimizer_class, self.world_size, balanced=balanced, overlap=overlap_with_ddp
            )
            # torch's constructor calls add_param_group, which must not partition anything yet.
            Optimizer.__init__(self, listed, defaults)
        Joinable.__init__(self)
        self._element_wise = is_elementwise(optimizer_class)
        groups = [group["params"] for group in self.param_groups]
        options = f"{optimizer_class.__qualname__}, balanced={balanced}, views={parameters_as_bucket_view}"
        # Agreement first: what is refused after it is refused on every rank.
        argument_checks.check_ranks_agree(self.param_groups, options, self.process_group)
        argument_checks.check_parameters([param for group in groups for param in group])

        self.partition = Partition(self.rank, self.world_size, balanced=balanced)
        self.partition.add_groups(groups)
        # Before parameters move: the class may refuse its options.
        self.local = LocalOptimizer(optimizer_class, defaults, self.param_groups, self.partition)
        self.optim = self.local.optim
        self.state = self.optim.state
        # Including the class's own defaults: schedulers look here for a momentum to change.
        self.defaults = self.optim.defaults
        self._sync = ParameterSync(
            self.partition,
            self.process_group,
            as_views=parameters_as_bucket_view and not overlap_with_ddp,
        )

        self.agreement = OptimizerAgreement(self.partition, self.process_group)
        self._consolidated: dict[int | str, Any] | None = None
        self._under_join = False
        self.is_stepped_in_backward = False
        self._warned_of_step = False
        self.initialized = True

    # --- copies ----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        copied = self.__dict__.get("_copied")
        if copied is None:
            self.local.pull_options()
            copied = CopiedOptimizer(self._arguments, GroupReference(self.process_group), self._own_state())
        return {"defaults": self.defaults, "param_groups": self.param_groups, "_copied": copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = defaultdict(dict)
        self.initialized = False
        super().__setstate__(state)

    def __getattr__(self, name: str) -> Any:
        """Builds a copy when something is read that only a built one has."""
        if name not in _BUILT or "_copied" not in self.__dict__:
            raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}")
        self._build_copy()
        return getattr(self, name)

    def _build_copy(self) -> None:
        copied: CopiedOptimizer = self.__dict__.pop("_copied")
        try:
            self.__init__(self.param_groups, process_group=copied.group.group(), **copied.arguments)  # type: ignore[misc]
        except BaseException:
            self.__dict__["_copied"] = copied
            raise
        by_rank: list[Any] = [None] * self.world_size
        dist.all_gather_object(by_rank, copied.own_state, group=self.process_group)
        state = consolidated_state.consolidate(by_rank, self.partition.params)
        self.load_state_dict({"state": state, "param_groups": self.local.saved_groups()})

    def _own_state(self) -> tuple[list[PieceState], dict[str, Any]]:
        """The state of this rank's pieces, and that of no parameter."""
        return (
            consolidated_state.owned_state(self.partition, self.optim.state),
            consolidated_state.global_state(self.optim.state),
        )

    # --- groups ----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, on every rank; its parameters are assigned to the ranks that own the least."""
        if "_copied" in self.__dict__:
            self._build_copy()
        if not self.initialized:
            super().add_param_group(param_group)
            return
        with argument_checks.reporting_to_peers(self.process_group):
            super().add_param_group(param_group)
        added = self.param_groups[-1]["params"]
        first = len(self.partition.params)
        try:
            argument_checks.check_ranks_agree(
                [self.param_groups[-1]], "add_param_group", self.process_group, first=first
            )
            argument_checks.check_parameters(added, first=first)
        except Exception:
            self.param_groups.pop()
            raise
        self.partition.add_groups([added])
        self._sync.refresh()
        self.local.add_group()

    # --- step ------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps the pieces that this rank owns, then exchanges them, so that all ranks have all updates.

        Args:
            closure: passed on to the local optimizer, if given.
            **kwargs: passed on to the local optimizer.
        """
        if self.overlap_with_ddp:
            return self._skip_step()
        return self._step(closure, kwargs, joined=False)

    def _step(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any], *, joined: bool) -> Any:
        if not joined:
            Join.notify_join_context(self)
        # A closure computes the gradients later; ranks that have run out of inputs have none.
        self.agreement.agree(has_gradients=closure is None and not self._under_join)
        if self._under_join and is_inside_join(self):
            share_gradients(self.partition, self.process_group, joined=joined)
        self.partition.check_gradients()
        self._sync.refresh()
        try:
            loss = self.local.step(closure, kwargs, self._sync.buffers)
        except BaseException as error:
            self._finish_torn_step(error, has_closure=closure is not None)
            raise
        if closure is not None or not self.local.runs_torch_alone:
            # User code may have replaced a parameter's memory, or given a frozen one a gradient and stepped it.
            self._sync.refresh()
        self._exchange()
        return loss

    def _exchange(self) -> None:
        with self.agreement.exchanging(polls_failure=self._sync.polls_failure):
            self._sync.run()

    def _finish_torn_step(self, error: BaseException, *, has_closure: bool) -> None:
        """After this rank's step raised: still takes part in the exchange, and tells the other ranks."""
        if not has_closure:
            # All other ranks reach the exchange; with a closure they may be inside it.
            with contextlib.suppress(Exception):
                self._sync.refresh()
                self._exchange()
        self.agreement.report_torn_step(error)

    def _skip_step(self) -> None:
        if not self.is_stepped_in_backward:
            raise StateError(
                "overlap_with_ddp=True, but no hook steps this optimizer, so no parameter is ever updated",
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

    # --- uneven inputs ---------------------------------------------------------------------------------------

    def join_hook(self, **_kwargs: Any) -> ZeroJoinHook:
        """Returns the hook for torch's ``Join`` with which a rank that has run out of inputs keeps stepping."""
        self._under_join = True
        return ZeroJoinHook(step=lambda: self._step(None, {}, joined=True), leave=self._leave_join)

    def _leave_join(self) -> None:
        self._under_join = False

    @property
    def join_device(self) -> torch.device:
        return self.partition.params[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # --- state on one rank -----------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers the full state on rank ``to`` of the group, on the CPU. Call it on every rank."""
        if not 0 <= to < self.world_size:
            raise ConfigError(
                f"there is no rank {to} to consolidate to: the group has {self.world_size}",
                where=f"consolidate_state_dict(to={to}), rank {self.rank}",
                fix=f"use a rank of the group, 0 to {self.world_size - 1}",
            )
        self.local.pull_options()
        gathered: list[Any] | None = [None] * self.world_size if self.rank == to else None
        own = self._own_state()
        code = collective_code(f"consolidate the state of a ZeroRedundancyOptimizer on rank {to}")
        self.agreement.channel.agree(code)
        with self.agreement.channel.watched(code):
            dist.gather_object(own, gathered, group=self.process_group, group_dst=to)
        self._consolidated = None
        if gathered is not None:
            self._consolidated = consolidated_state.consolidate(gathered, self.partition.params)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that was last consolidated on this rank, in the format of an unsharded optimizer."""
        if self._consolidated is None:
            raise StateError(
                f"the state has not been consolidated on rank {self.rank}",
                where=f"ZeroRedundancyOptimizer.state_dict(), rank {self.rank}",
                fix=f"call consolidate_state_dict(to={self.rank}) on all ranks first, or save "
                "sharded_state_dict() with torch.distributed.checkpoint",
            )
        run_before_state_dict(self)
        saved = {"state": dict(self._consolidated), "param_groups": self.local.saved_groups()}
        return run_after_state_dict(self, saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's part of a consolidated state dict; every rank passes the full state dict."""
        state_dict = run_before_load_state_dict(self, state_dict)
        groups = [group["params"] for group in self.param_groups]
        consolidated_state.check_fits(state_dict, groups, element_wise=self._element_wise)
        positions = consolidated_state.saved_positions(state_dict)
        by_param = {
            positions[number]: values
            for number, values in state_dict["state"].items()
            if number in positions and values
        }
        self._load(
            consolidated_state.state_of_own_pieces(self.partition, by_param),
            consolidated_state.saved_global_state(state_dict),
            state_dict["param_groups"],
        )
        run_after_load_state_dict(self)

    # --- state on all ranks ----------------------------------------------------------------------------------

    def sharded_state_dict(self, *, like: Metadata | None = None, prefix: str = "") -> dict[str, Any]:
        """Returns this rank's part of the state, for ``torch.distributed.checkpoint`` to save or to load into.

        Nothing is communicated or copied. A checkpoint can be loaded with any world size, balanced or not.

        Args:
            like: a checkpoint's metadata (``FileSystemReader(path).read_metadata()``); returns empty tensors for what
                that checkpoint holds, instead of the current state.
            prefix: the prefix of these keys in the checkpoint, such as ``"optimizer."``.
        """
        if like is None:
            entries = sharded_state.sharded_entries(self.partition, self.optim.state)
        else:
            entries = sharded_state.load_templates(
                self.partition, like, prefix, element_wise=self._element_wise
            )
        orders = sharded_state.memory_orders(self.partition.params)
        return {"param_groups": self.local.saved_groups(), "memory_orders": orders, **entries}

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a ``sharded_state_dict()`` of this optimizer into which a checkpoint was read."""
        saved = state_dict["param_groups"]
        groups = [group["params"] for group in self.param_groups]
        consolidated_state.check_fits(
            {"state": {}, "param_groups": saved}, groups, element_wise=self._element_wise
        )
        sharded_state.check_memory_orders(state_dict["memory_orders"], self.partition.params)
        self._load(
            sharded_state.state_of_own_pieces(self.partition, state_dict),
            sharded_state.saved_global_state(state_dict),
            saved,
        )

    def _load(
        self,
        states: Mapping[OwnedPiece, dict[str, Any]],
        global_state: Mapping[str, Any],
        saved_groups: list[dict[str, Any]],
    ) -> None:
        self.local.load(states, global_state, saved_groups)
        self.state = self.optim.state
