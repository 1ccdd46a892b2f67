"""Process groups: their backends, stores, timeouts and the collectives that have no public name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions


def all_gather_call(group: dist.ProcessGroup | type[dist.ProcessGroup]) -> Callable[..., Any]:
    """Returns the all-gather into one tensor of a group, or of a class of groups.

    Groups written in Python only have the newer of its two names.
    """
    return getattr(group, "all_gather_single", None) or group._allgather_base


def reduce_scatter_call(group: dist.ProcessGroup | type[dist.ProcessGroup]) -> Callable[..., Any]:
    return getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns the name of the backend for ``device``; a group written in Python is its own backend."""
    try:
        return str(backend_of(group, device).name())
    except RuntimeError:
        return str(group.name())


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Returns the backend for ``device``; its collectives bypass torch's dispatcher."""
    return group._get_backend(device)


def timeout_seconds_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Returns the group's own timeout."""
    try:
        options = getattr(backend_of(group, device), "options", None)
    except RuntimeError:
        # A group written in Python has no backend; it has torch's default timeout.
        options = None
    timeout: timedelta = getattr(options, "_timeout", dist.constants.default_pg_timeout)
    return timeout.total_seconds()


def num_issued(group: dist.ProcessGroup) -> int | None:
    """Returns how many operations this process has issued on all groups; None if this thread cannot see ``group``."""
    groups = list(dist.distributed_c10d._world.pg_map)
    if group not in groups:
        return None
    try:
        return sum(int(cast(Any, each)._get_sequence_number_for_group()) for each in groups)
    except RuntimeError:
        # A backend without sequence numbers.
        return None


def finished_work() -> Any:
    """Returns the work of a finished collective, as torch's dispatcher expects it."""
    over: torch.futures.Future[list[Any]] = torch.futures.Future()
    over.set_result([])
    return torch._C._distributed_c10d._create_work_from_future(over).boxed()  # type: ignore[attr-defined]


def store_of(group: dist.ProcessGroup, purpose: str) -> Any:
    """Returns the group's store, with a prefix for this purpose.

    It has its own connection: one that a thread waits on blocks all other threads.
    """
    store = dist.PrefixStore(purpose, dist.distributed_c10d._world.pg_map[group][1].clone())  # type: ignore[attr-defined]
    # Callers do not wait for missing keys; the timeout is for a store that is gone.
    store.set_timeout(timedelta(seconds=3))
    return store


def is_destroyed(group: dist.ProcessGroup) -> bool:
    return group not in dist.distributed_c10d._world.pg_map


def name_of(group: dist.ProcessGroup) -> str:
    """Returns the group's unique name, the same on all its ranks."""
    return group.group_name


def debugs_in_detail() -> bool:
    """Returns whether TORCH_DISTRIBUTED_DEBUG=DETAIL is set."""
    return bool(dist.get_debug_level() == dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]


def symmetric_memory(group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """Returns an allocator of NCCL's symmetric memory, which all ranks of ``group`` must call alike."""
    from torch.distributed import _symmetric_memory as memory

    memory.set_backend("NCCL")

    def allocate(size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = memory.empty(*size, dtype=dtype, device=device)
        memory.rendezvous(made, group)
        return made

    return allocate


def issue_grouped_broadcasts(
    group: dist.ProcessGroup, device: torch.device, tensors_by_source: Sequence[Sequence[torch.Tensor]]
) -> dist.Work:
    """Broadcasts each rank's tensors to all others as one operation of the backend (with NCCL, one kernel)."""
    group._start_coalescing(device)
    for source, tensors in enumerate(tensors_by_source):
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.asyncOp = True
        for tensor in tensors:
            # Not torch's wrapper, which repeats the checks made when the exchange was planned.
            group.broadcast([tensor], options)
    return group._end_coalescing(device)
