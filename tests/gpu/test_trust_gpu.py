"""Ranks that part, die or stall with NCCL: all that live are told, before torch's own watchdog ends them."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from shardwise import FullyShardedDataParallel, PeerFailure, RankDisagreement, fully_shard, set_trust
from shardwise.comm.watchdog.stacks import stack_of
from shardwise.testing import RankFailure, pool_call, run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.divergence import WIDTH, Model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
worlds = pytest.mark.parametrize(
    ("api", "world_size"), [("fully_shard", 2), ("fully_shard", 4), ("wrapper", 2)]
)


def strike(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def stall(*_):
    time.sleep(60)


def diverges_by_order(model):
    model.order = (0, 2, 1, 3)


def diverges_by_size(model):
    model.order = (0, 3, 1, 2)


def killed(model):
    model.blocks[2].register_forward_pre_hook(strike)


def stalled(model):
    model.blocks[2].register_forward_pre_hook(stall)


def composed():
    model = seeded(Model()).cuda()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model), model


def wrapped():
    model = seeded(Model()).cuda()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FullyShardedDataParallel(block)
    return FullyShardedDataParallel(model), model


APIS = {"fully_shard": composed, "wrapper": wrapped}


def err(errs_by, checks, looks_at_the_loss, api):
    """Good steps; then the last rank errs. What the others are told goes to the caller as an error's text."""
    set_trust(timeout_seconds=3.0, late_seconds=3.0, checks=checks)
    model, inner = APIS[api]()
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, WIDTH, device="cuda")

    def step():
        loss = model(x).square().mean()
        loss.backward()
        if looks_at_the_loss:
            loss.item()
        optim.step()
        optim.zero_grad()

    step()
    step()
    torch.cuda.synchronize()
    if dist.get_rank() == dist.get_world_size() - 1:
        errs_by(inner)
    begun = time.monotonic()
    try:
        step()
        torch.cuda.synchronize()
    except (PeerFailure, RankDisagreement) as error:
        # The pool keeps the story of a rank that raised; and these are not to be used again.
        raise AssertionError(
            f"TOLD in {time.monotonic() - begun:.1f} s: {type(error).__name__}: {error}"
        ) from None


def errors_of(world_size, errs_by, *, checks="step", looks_at_the_loss=False, api="fully_shard"):
    with pytest.MonkeyPatch.context() as patch:
        # A rank that was killed has failed: those who wait for it need time to find out and tell.
        patch.setattr(pool_call, "_GRACE_SECONDS", 20.0)
        options = (errs_by, checks, looks_at_the_loss, api)
        with pytest.raises(RankFailure) as failure:
            run_ranks(err, world_size, *options, kind="nccl", timeout_seconds=60)
    # With the way it ended: a rank that torch's own watchdog has ended tells nothing else.
    return {report.rank: f"{report.summary}\n{report.details}" for report in failure.value.reports}


@worlds
@pytest.mark.parametrize("errs_by", [diverges_by_order, diverges_by_size])
def test_ranks_that_diverge_are_told_on_all_ranks_before_the_optimizer(api, world_size, errs_by):
    reported = errors_of(world_size, errs_by, api=api)
    assert len(reported) == world_size
    for text in reported.values():
        assert "RankDisagreement: ranks diverged" in text, reported
        assert f"rank {world_size - 1} went on to gather" in text, reported


def test_with_checks_before_every_collective_no_data_is_mixed():
    for text in errors_of(2, diverges_by_size, checks="collective").values():
        assert "rank 1 went on to gather 'blocks.3' in forward" in text


def begin_without_the_last():
    """The last rank does not come to the model: the others must not get into NCCL, which would not let them out."""
    set_trust(timeout_seconds=2.0, late_seconds=4.0, start_seconds=4.0)
    model, _ = composed()
    if dist.get_rank() == dist.get_world_size() - 1:
        stall()
    model(torch.randn(4, WIDTH, device="cuda"))


def test_a_rank_that_does_not_come_to_the_model_is_named():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_call, "_GRACE_SECONDS", 10.0)
        with pytest.raises(RankFailure) as failure:
            run_ranks(begin_without_the_last, 3, kind="nccl", timeout_seconds=40)
    reported = {report.rank: report.details for report in failure.value.reports}
    for rank in range(2):
        assert 'rank 2 did not reach "use the model for the first time"' in reported[rank], reported
        assert "rank 2 is alive, it has issued no collective yet" in reported[rank], reported


def connect_while_asked(num_groups):
    """NCCL connects ranks again and again, while this one is asked all the time where it is."""
    thread, over = threading.get_ident(), threading.Event()
    asked = []

    def ask():
        while not over.is_set():
            asked.append(stack_of(thread)[-1])

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(num_groups):
            group = dist.new_group()
            ones = torch.ones(1, device="cuda")
            dist.all_reduce(ones, group=group)
            assert ones.item() == dist.get_world_size()
            dist.destroy_process_group(group)
    finally:
        over.set()
        asking.join()
    return len(asked)


def test_ranks_that_are_asked_where_they_are_connect_all_the_same():
    # Every look for what others have sent fails until it has come, and says why in errno.
    assert min(run_ranks(connect_while_asked, 2, 12, kind="nccl")) > 50


@worlds
@pytest.mark.parametrize("looks_at_the_loss", [False, True], ids=["host ahead", "host waits for the device"])
@pytest.mark.parametrize(("errs_by", "state"), [(killed, "dead"), (stalled, "alive")])
def test_a_rank_that_is_gone_or_stalls_is_named(api, world_size, errs_by, state, looks_at_the_loss):
    reported = errors_of(world_size, errs_by, looks_at_the_loss=looks_at_the_loss, api=api)
    for rank in range(world_size - 1):
        assert f"rank {world_size - 1} is {state}" in reported[rank], reported[rank]
