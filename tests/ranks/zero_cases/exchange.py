"""Exchanges of tensors that know nothing of optimizers."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm import exchange as tensor_exchange
from shardwise.comm.channels.registry import channel_of
from shardwise.comm.exchange import plan_exchange, process_vm_peers_of
from shardwise.comm.shared_memory import process_vm
from shardwise.comm.shared_memory.process_vm import DirectReads, ProcessVMPeers
from shardwise.errors import PeerFailure
from shardwise.policies import set_trust
from shardwise.zero import ZeroRedundancyOptimizer
from tests.ranks.zero_cases.models import device

LONG = timedelta(seconds=120)
"""What nobody waits for where all is well, however busy the machine is."""


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def local_peers_here() -> ProcessVMPeers | None:
    return process_vm_peers_of(group(), channel_of(group(), torch.device("cpu")))


def fill_own(sections: Sequence[Sequence[Tensor]], step: int) -> None:
    for number, tensor in enumerate(sections[dist.get_rank()]):
        tensor.fill_((100 * step + 10 * dist.get_rank() + number) % 251)


def assert_everyones(sections: Sequence[Sequence[Tensor]], step: int) -> None:
    for source, section in enumerate(sections):
        for number, tensor in enumerate(section):
            assert (tensor == (100 * step + 10 * source + number) % 251).all(), (
                f"tensor {number} of rank {source} in step {step}"
            )


def moves_everyones_tensors(numels: list[list[int]], *, reads: bool, rounds: int = 3) -> None:
    """Tensors of two dtypes and any sizes, some of them empty, some ranks with none."""
    dtypes = (torch.float32, torch.uint8)
    sections = [
        [torch.zeros(numel, dtype=dtypes[i % 2], device=device()) for i, numel in enumerate(section)]
        for section in numels
    ]
    exchange = plan_exchange(sections, group(), local_peers=local_peers_here() if reads else None)
    assert isinstance(exchange, DirectReads) == reads
    for step in range(rounds):
        fill_own(sections, step)
        exchange.issue().wait()
        assert_everyones(sections, step)


def packs_small_tensors_into_one_broadcast_a_rank() -> None:
    """NCCL's way, on a group that can be had everywhere: only how broadcasts are grouped is left out."""
    num_broadcasts = []

    def broadcast_all(of_group: Any, device: Any, tensors_by_source: Any) -> Any:
        num_broadcasts.append(sum(map(len, tensors_by_source)))
        works = [
            dist.broadcast(tensor, group=of_group, group_src=source, async_op=True)
            for source, tensors in enumerate(tensors_by_source)
            for tensor in tensors
        ]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    numels = [[3, 70_000, 5, 1, 40_000], [7], [1, 200_000, 2, 0]]
    dtypes = (torch.float32, torch.uint8)
    sections = [
        [torch.zeros(numel, dtype=dtypes[i % 2]) for i, numel in enumerate(section)] for section in numels
    ]
    channels = [[tensor.view(torch.uint8) for tensor in section if tensor.numel()] for section in sections]
    grouped, tensor_exchange.issue_grouped_broadcasts = (
        tensor_exchange.issue_grouped_broadcasts,
        broadcast_all,
    )
    try:
        exchange = tensor_exchange._GroupedBroadcasts(channels, group())
        for step in range(3):
            fill_own(sections, step)
            exchange.issue().wait()
            assert_everyones(sections, step)
    finally:
        tensor_exchange.issue_grouped_broadcasts = grouped
    # A pack and a large tensor, one tensor, a pack and a large tensor.
    assert num_broadcasts == [5] * 3, num_broadcasts


def keeps_exchanges_apart_that_are_under_way_together(*, reads: bool = False) -> None:
    """Two exchanges issued one after the other, waited for in the other order."""
    local_peers = local_peers_here() if reads else None
    sections = [
        [[torch.zeros(40_000 + 7 * i), torch.zeros(3 + i)] for _ in range(dist.get_world_size())]
        for i in (0, 1)
    ]
    exchanges = [plan_exchange(of_one, group(), local_peers=local_peers) for of_one in sections]
    assert all(isinstance(exchange, DirectReads) == reads for exchange in exchanges)
    for step in range(3):
        for number, of_one in enumerate(sections):
            fill_own(of_one, step + number)
        under_way = [exchange.issue() for exchange in exchanges]
        for pending in reversed(under_way):
            pending.wait()
        for number, of_one in enumerate(sections):
            assert_everyones(of_one, step + number)


def reads_where_a_peers_tensors_have_moved_to() -> None:
    """Only rank 0's memory is replaced, and only rank 0 plans again; what says where it lies may lie where it did."""
    sections = [[torch.zeros(1_500_000)] for _ in range(dist.get_world_size())]
    local_peers = local_peers_here()
    make_table, place = process_vm._address_table, torch.empty(1, 2, dtype=torch.int64)

    def table_in_one_place(section: Sequence[Tensor]) -> Tensor:
        is_moving = section[0].data_ptr() == sections[0][0].data_ptr()
        return place.copy_(make_table(section)) if is_moving else make_table(section)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_vm, "_address_table", table_in_one_place)
        exchange = plan_exchange(sections, group(), local_peers=local_peers)
        for step in range(3):
            if dist.get_rank() == 0 and step == 1:
                # The first one is held until the other has its place.
                held, sections[0][0] = sections[0][0], torch.full((1_500_000,), -1.0)
                exchange = plan_exchange(sections, group(), local_peers=local_peers)
                del held
            fill_own(sections, step)
            exchange.issue().wait()
            assert_everyones(sections, step)


def may_write_as_soon_as_the_exchange_is_over() -> None:
    """A rank that goes on at once never changes what a slow peer has not read yet."""
    sections = [[torch.zeros(2_000_000)] for _ in range(dist.get_world_size())]
    exchange = plan_exchange(sections, group(), local_peers=local_peers_here())
    for step in range(20):
        fill_own(sections, step)
        exchange.issue().wait()
        others = [section if rank != dist.get_rank() else [] for rank, section in enumerate(sections)]
        sections[dist.get_rank()][0].fill_(-1.0)
        assert_everyones(others, step)


def ends_waits_for_ranks_that_stall_or_raise_and_goes_on_with_them() -> None:
    """Of a model so large that ranks read each other's memory: all raise, and step together again."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(2_000_000))
    optimizer = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0)
    first = param.detach().clone()
    own_step = optimizer.optim.step

    def stall(**_kwargs: Any) -> None:
        """Until all others have been told."""
        store.set("stalled", "1")
        store.wait([f"told {other}" for other in range(1, dist.get_world_size())], LONG)

    def give_little_time() -> None:
        """Once it is clear that rank 0 will not come."""
        store.wait(["stalled"], LONG)
        set_trust(timeout_seconds=0.5, late_seconds=0.5)

    def raise_it() -> None:
        raise ArithmeticError("a closure of its own")

    def step(*closure: Any) -> None:
        with torch.no_grad():
            param.copy_(first)
        param.grad = torch.ones_like(param)
        optimizer.step(*closure)
        assert torch.equal(param, first - 1)

    before = set_trust()
    try:
        step()
        # The owner is rank 0: the others wait for what it steps.
        if rank == 0:
            optimizer._joined, optimizer.optim.step = None, stall  # type: ignore[method-assign]
        else:
            threading.Thread(target=give_little_time).start()
        # On a busy machine others may be late, too.
        with (
            pytest.raises(PeerFailure, match=r"ranks? 0")
            if rank
            else pytest.raises((PeerFailure, AssertionError))
        ):
            step()
        store.set(f"told {rank}", "1")
        # From here on ranks come, sooner or later.
        set_trust(timeout_seconds=before.timeout_seconds, late_seconds=before.late_seconds)
        optimizer.optim.step = own_step  # type: ignore[method-assign]
        step()
        with pytest.raises(ArithmeticError if rank == 0 else PeerFailure):
            step(raise_it if rank == 0 else (lambda: None))
        step()
        step()
    finally:
        set_trust(timeout_seconds=before.timeout_seconds, late_seconds=before.late_seconds)
