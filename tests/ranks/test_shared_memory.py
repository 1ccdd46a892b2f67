"""Ranks of one host read what they send each other where it lies: the same bits as by messages, whoever is late."""

from __future__ import annotations

import gc
import os
import platform
import random
import signal
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import MixedPrecisionPolicy, PeerFailure, fully_shard
from shardwise.comm.channels.channel import UNNAMED
from shardwise.comm.channels.registry import channel_of
from shardwise.comm.shared_memory import peers as shared_memory_peers
from shardwise.testing import run_ranks
from tests.ranks.divergence import LONG_SECONDS, timeouts_of
from tests.ranks.models import full
from tests.ranks.subject import beyond_torch
from tests.ranks.tables import slow

pytestmark = beyond_torch

CPU = torch.device("cpu")

# Which ranks are near each other, whatever the machine says.
SIGHTS = {
    "all near": lambda one, other: True,
    "all far": lambda one, other: False,
    "two hosts": lambda one, other: one // 2 == other // 2,
    "one sees nobody": lambda one, other: one != 0,
    "one has no memory to lend": lambda one, other: 0 not in (one, other),
    "another machine": lambda one, other: False,
}


def group_with(sight):
    """A group anew, in which a rank finds only those that ``sight`` lets it."""
    rank = dist.get_rank()
    peers = iter([(rank + step) % dist.get_world_size() for step in range(1, dist.get_world_size())])
    visit = shared_memory_peers._open_peer

    def visit_some(card, table):
        return visit(card, table) if SIGHTS[sight](rank, next(peers)) else None

    def no_arena(world):
        raise OSError("Too many open files")

    with pytest.MonkeyPatch.context() as patch:
        if sight == "another machine":
            patch.setattr(platform, "machine", lambda: "aarch64")
        elif sight == "one has no memory to lend":
            # Nobody has a card of rank 0's to visit it by.
            if rank == 0:
                patch.setattr(shared_memory_peers, "Arena", no_arena)
        else:
            patch.setattr(shared_memory_peers, "_open_peer", visit_some)
        group = dist.new_group()
        channel_of(group, CPU).agree(UNNAMED)
    return group


def near_of(group):
    return set(channel_of(group, CPU)._local_peers.peers)


def sees(sight):
    """Whom this rank should find near: those who find it, too."""
    rank, can_see = dist.get_rank(), SIGHTS[sight]
    others = set(range(dist.get_world_size())) - {rank}
    return {other for other in others if can_see(rank, other) and can_see(other, rank)}


class Odd(nn.Module):
    """Sizes that no number of ranks divides, one smaller than the world, and a parameter that is not used."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(7, 13), nn.Linear(13, 5)
        self.scale, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        return self.second(self.first(x).relu()) * self.scale


OPTIONS = {
    "float32": {},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "exact": {"exact": True},
    "kept": {"reshard_after_forward": False},
}


def trained(group, options):
    torch.manual_seed(0)
    model = nn.Sequential(Odd(), nn.Linear(5, 7), Odd())
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **options)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(3, 7, generator=generator)).square().sum().backward()
        optim.step()
        optim.zero_grad()
    return [full(param.detach()) for param in model.parameters()]


def train_in(sights, options_of):
    results = {}
    for sight in sights:
        group = group_with(sight)
        assert near_of(group) == sees(sight), sight
        before = channel_of(group, CPU).bytes_read
        for name in options_of:
            if name == "exact" and dist.get_world_size() == 3:
                continue  # Exact sums are made in pairs.
            results.setdefault(name, []).append(trained(group, OPTIONS[name]))
        assert (channel_of(group, CPU).bytes_read > before) == bool(sees(sight)), sight
        shuffled(group)
    for name, (first, *others) in results.items():
        for other in others:
            assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True)), name


def shuffled(group):
    """Collectives of all kinds and sizes, waited for late and in an order of each rank's own; what was sent changes."""
    calls, rank, world = channel_of(group, CPU), dist.get_rank(), dist.get_world_size()
    order = random.Random(rank)
    under_way = []
    for number in range(40):
        numel = (0, 1, 3, 1000, 70_000)[number % 5]
        dtype = (torch.float32, torch.uint8, torch.bfloat16, torch.float64)[number % 4]
        of = [torch.full((numel,), number + other, dtype=dtype) for other in range(world)]
        if number % 3 == 0:
            output, sent = torch.empty(numel * world, dtype=dtype), of[rank].clone()
            work, expected = calls.issue_all_gather(output, sent), torch.cat(of)
        else:
            # To rank k, rank i sends i + k.
            sent = torch.cat([of[rank] + other for other in range(world)])
            terms = [each + rank for each in of]
            if number % 3 == 1:
                output, expected = torch.empty(numel, dtype=dtype), sum(terms[1:], start=terms[0])
                work = calls.issue_reduce_scatter(output, sent, average=False)
            else:
                output, expected = torch.empty(numel * world, dtype=dtype), torch.cat(terms)
                work = calls.issue_exchange(output, sent)
        under_way.append((work, output, expected, sent))
        while len(under_way) > order.randrange(1, 8):
            work, output, expected, sent = under_way.pop(order.randrange(len(under_way)))
            work.wait()
            sent.zero_()
            assert torch.equal(output, expected), (number, numel, dtype)
            if order.random() < 0.1:
                time.sleep(0.005)
    for work, output, expected, _ in under_way:
        work.wait()
        assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, OPTIONS), (3, ["bfloat16"]), slow(3, OPTIONS), slow(4, OPTIONS)],
    ids=["2", "3", "3-all", "4-all"],
)
def test_the_same_bits_wherever_ranks_are(world_size, options):
    sights = ["all near", "all far", "another machine"] if world_size == 2 else list(SIGHTS)
    run_ranks(train_in, world_size, sights, list(options), kind="gloo")


def late_on_an_old_log():
    """Rank 0 sends, leaves, and uses its memory for something else; then rank 1 comes."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    channel = channel_of(dist.group.WORLD, CPU)
    with timeouts_of(timeout_seconds=LONG_SECONDS):
        channel.agree(UNNAMED)
        gathered, own = torch.zeros(2000), torch.full((1000,), rank + 1.0)
        lent_there = weakref.ref(channel._local_peers._borrowers[rank].memory)
        seen = None
        if rank == 0:
            channel.issue_all_gather(gathered, own)
            channel.abort_step("it does not like this log")
            own.zero_()
            store.set("left", "1")
        else:
            store.wait(["left"])
            try:
                channel.issue_all_gather(gathered, own).wait()
                seen = set(gathered.tolist())
                channel.agree(UNNAMED)
            except PeerFailure as error:
                seen = (seen, str(error))
        channel.issue_all_gather(gathered, torch.full((1000,), rank + 3.0)).wait()
        assert set(gathered.tolist()) == {3.0, 4.0}
        while lent_there() is not None:
            # The watch may be looking at it just now. What is still there for good ends in a timeout here.
            gc.collect()
    return seen


def test_a_rank_that_is_late_on_an_old_log_reads_what_was_sent_there_and_is_told():
    _, (seen, reported) = run_ranks(late_on_an_old_log, 2, kind="gloo")
    assert seen in (None, {1.0, 2.0})
    assert "rank 0 aborted its step: it does not like this log" in reported


def say_much():
    """More words than a pipe holds by default, before the other listens."""
    channel, rank = channel_of(dist.group.WORLD, CPU), dist.get_rank()
    channel.agree(UNNAMED)
    near = channel._local_peers
    for number in range(10_000):
        near.notify(1 - rank, number, 7, 2 * number)
    dist.barrier()
    return all(near.wait_for(1 - rank, number, 7) == 2 * number for number in range(10_000))


def test_thousands_of_collectives_may_be_in_flight():
    assert all(run_ranks(say_much, 2, kind="gloo"))


def read_from_a_stopped_rank(folder):
    """Rank 1 sends and is stopped before rank 0 has read; it goes on when that has."""
    calls, rank = channel_of(dist.group.WORLD, CPU), dist.get_rank()
    calls.agree(UNNAMED)
    gathered = torch.empty(2000)
    work = calls.issue_all_gather(gathered, torch.full((1000,), float(rank)))
    if rank == 1:
        (folder / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        while not (folder / "pid").exists() or not (folder / "pid").read_text():
            time.sleep(0.01)
        pid = int((folder / "pid").read_text())
        while "State:\tT" not in Path(f"/proc/{pid}/status").read_text():
            time.sleep(0.01)
    work.wait()
    if rank == 0:
        os.kill(pid, signal.SIGCONT)
    calls.agree(UNNAMED)
    return gathered.view(2, -1).mean(1).tolist()


def test_rows_that_a_stopped_rank_has_sent_are_read(tmp_path):
    assert run_ranks(read_from_a_stopped_rank, 2, tmp_path, kind="gloo") == [[0, 1]] * 2
