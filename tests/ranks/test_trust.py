"""Ranks that diverge raise, all of them, and say where they diverged; then they train on, right to the last bit.

Many cases share one set of ranks: a case that left anything behind would fail those after it.
"""

from __future__ import annotations

import gc
import itertools
import re
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardwise import PeerFailure, RankDisagreement, StateError
from shardwise.comm.channels import backend as native_wires
from shardwise.comm.channels import watched as channels
from shardwise.comm.channels.backend import BackendChannel
from shardwise.comm.channels.channel import collective_code
from shardwise.comm.channels.registry import channel_of
from shardwise.comm.channels.watched import EpochFailure, LostConnection
from shardwise.comm.watchdog.thread import WATCHDOG
from shardwise.engine.unit.membership import units_of
from shardwise.testing import run_ranks
from tests.ranks import divergence, divergence_zero
from tests.ranks.divergence import LONG_SECONDS, Boom, Run, timeouts_of
from tests.ranks.divergence_zero import ZeroRun
from tests.ranks.subject import beyond_torch
from tests.ranks.tables import slow

pytestmark = beyond_torch

APIS = {"fully_shard": divergence, "wrapper": divergence, "zero": divergence_zero}


def outcomes(cases, who, api):
    """What each case ends in on this rank; a good step before and after each must be right to the last bit."""
    errs = dist.get_rank() == who
    ended = []
    with timeouts_of(timeout_seconds=LONG_SECONDS):
        run = ZeroRun() if api == "zero" else Run(api)
        run.good_step()
        for case in cases:
            run.go_back()
            try:
                case(run, errs)
            except (Boom, SystemExit, KeyboardInterrupt, RankDisagreement, PeerFailure) as error:
                ended.append((type(error).__name__, str(error)))
            else:
                ended.append(("nothing", ""))
            run.go_back()
            run.good_step()
    return ended


OWN = {
    "running_out_of_memory": "OutOfMemory",
    "an_exit_in_forward": "SystemExit",
    "an_exit_in_the_step": "SystemExit",
    "an_interrupt_in_backward": "KeyboardInterrupt",
    "an_interrupt_in_the_step": "KeyboardInterrupt",
}


def check(world_size, who, api, kind):
    cases_module = APIS[api]
    harmless = [] if api == "zero" else [divergence.an_empty_batch]
    diverging = list(cases_module.DIVERGING)
    if api != "zero":
        (diverging if api == "wrapper" else harmless).append(divergence.a_state_dict_on_one)
    who %= world_size
    cases = [*diverging, *cases_module.DIFFERING, *cases_module.BREAKING_OFF, *harmless]
    reported = run_ranks(outcomes, world_size, cases, who, api, kind=kind)
    for rank, ended in enumerate(reported):
        for case, (name, text) in zip(cases, ended, strict=True):
            what = f"{case.__name__} on rank {rank}: {name} {text}"
            if case in diverging:
                assert name == "RankDisagreement", what
                assert f"rank {who} went on to" in text, what
                assert f"rank {rank}: ..." in text, what
            elif case in cases_module.DIFFERING:
                assert name == "RankDisagreement", what
                assert "different" in text, what
            elif case in harmless:
                assert name == "nothing", what
            elif rank == who:
                assert name == OWN.get(case.__name__, "Boom"), what
            else:
                assert name == "PeerFailure", what
                assert f"rank {who} aborted its step" in text, what


# Each API with two and four ranks, the first and the last of which errs; in turn as threads and as processes.
CELLS = [
    ("fully_shard", 2, 0, "gloo"),
    slow("fully_shard", 2, -1, "threads"),
    ("fully_shard", 4, 0, "threads"),
    slow("fully_shard", 4, -1, "gloo"),
    slow("wrapper", 2, 0, "threads"),
    ("wrapper", 2, -1, "gloo"),
    slow("wrapper", 4, 0, "gloo"),
    ("wrapper", 4, -1, "threads"),
    slow("zero", 2, 0, "threads"),
    ("zero", 2, -1, "gloo"),
    slow("zero", 4, 0, "gloo"),
    ("zero", 4, -1, "threads"),
]


@pytest.mark.parametrize(("api", "world_size", "who", "kind"), CELLS)
def test_ranks_that_diverge_or_abort_are_told_and_train_on(api, world_size, who, kind):
    check(world_size, who, api, kind)


def different_sizes():
    """The same collective of different sizes, which gloo itself would end the process for; then one that is right."""
    calls, rank = channel_of(dist.group.WORLD, torch.device("cpu")), dist.get_rank()
    with timeouts_of(timeout_seconds=LONG_SECONDS), pytest.raises(RankDisagreement) as caught:
        calls.issue_all_gather(torch.empty(8 + 2 * rank), torch.ones(4 + rank)).wait()
    gathered = torch.empty(2)
    calls.issue_all_gather(gathered, torch.full((1,), float(rank))).wait()
    return str(caught.value), gathered.tolist()


def test_messages_of_different_sizes_are_reported():
    for text, gathered in run_ranks(different_sizes, 2, kind="gloo"):
        assert "rank 0 sends 16 bytes; rank 1 sends 20 bytes" in text
        assert gathered == [0.0, 1.0]


def late_failure():
    """A rank was given up, but came before anybody raised that; much later all of them stand still for a moment."""
    rank, run = dist.get_rank(), Run()
    with timeouts_of(timeout_seconds=LONG_SECONDS):
        run.good_step()
        (used,) = units_of(run.model)[0].root.agreement.channels
        if rank == 0:
            stalled = EpochFailure(PeerFailure, "rank 1 did not come", "", place=used.log.num_events - 1)
            used.end_epoch(used.log.epoch, stalled)
        dist.barrier()
        if rank == 1:
            time.sleep(0.5)
        run.good_step()
        with pytest.raises(RankDisagreement, match=r"rank 1 went on to gather 'blocks\.2'"):
            divergence.another_layer_of_the_same_shape(run, errs=rank == 1)
        run.good_step()


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_rank_that_arrives_at_the_last_moment_causes_no_later_failure(kind):
    run_ranks(late_failure, 2, kind=kind)


def diverge_on_a_backends_own_collectives():
    """Two logs on a group whose own collectives carry the data, as with NCCL, here without any."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    reported = []
    with timeouts_of(timeout_seconds=LONG_SECONDS):
        watched = BackendChannel(group, torch.device("cpu"))
        WATCHDOG.watch(watched)
        for step in range(6):
            watched.record(collective_code("gather 'a' in forward"))
            watched.record(collective_code("reduce 'b'" if step == 3 and rank == 1 else "reduce 'a'"))
            try:
                watched.agree(collective_code("let an optimizer use the step"))
            except RankDisagreement as error:
                reported.append((step, str(error)))
    return reported


def native_agreements():
    """How long rank 0 naps between looks, while rank 1 waits until it has done so for a while."""
    native, store = (
        BackendChannel(dist.group.WORLD, torch.device("cpu")),
        dist.distributed_c10d._get_default_store(),
    )
    naps = []

    def nap(seconds):
        naps.append(seconds)
        time.sleep(seconds)
        if sum(naps) > 0.02:
            store.set("napped", "1")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_wires, "time", SimpleNamespace(monotonic=time.monotonic, sleep=nap))
        if dist.get_rank() == 1:
            store.wait(["napped"], timedelta(seconds=LONG_SECONDS))
        native.agree(collective_code("let an optimizer use the step"))
    return naps


def failing_collectives():
    """What NCCL raises when it is asked for another collective after a peer was lost, here without NCCL."""
    calls = BackendChannel(dist.group.WORLD, torch.device("cpu"))

    def lost(*_):
        raise dist.DistBackendError("remote process exited\nncclRemoteError\nLast error:\nrecv failed\n")

    calls._all_gather = calls._reduce_scatter = lost
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "_WATCHDOG_KNOWS_SECONDS", 0.1)
        with pytest.raises(
            PeerFailure, match="lost the connection to another rank: remote process exited: recv failed\n"
        ):
            calls.issue_all_gather(torch.empty(2), torch.ones(1))
        patch.setattr(type(calls.group), "alltoall_base", lost)
        with pytest.raises(
            PeerFailure, match="lost the connection to another rank: remote process exited: recv failed\n"
        ):
            calls.issue_exchange(torch.empty(2), torch.ones(2))

        # What is not the end of another rank is raised as it is.
        def out_of_memory(*_):
            raise dist.DistBackendError(
                "NCCL error\nncclUnhandledCudaError\nLast error:\nCuda failure 2 'out of memory'"
            )

        calls._all_gather = out_of_memory
        dist.barrier()
        with pytest.raises(dist.DistBackendError, match="out of memory"):
            calls.issue_all_gather(torch.empty(2), torch.ones(1))
    calls.set_failure(EpochFailure(PeerFailure, "rank 1 is dead", "").as_entry(), calls.log.epoch)
    calls.record = calls.log.record
    with pytest.raises(PeerFailure, match="rank 1 is dead"):
        calls.issue_reduce_scatter(torch.empty(1), torch.ones(2), average=False)


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:48010"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), True),
        (LostConnection("rank 1 of the group has ended"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:99] socket: Too many open files"), False),
        (RuntimeError("ProcessGroupGloo::allgather: invalid tensor size at index 0"), False),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 100ms for recv"), False),
        (dist.DistBackendError("NCCL error: invalid usage, ncclInvalidUsage"), False),
        (torch.OutOfMemoryError("Broken pipe of thoughts"), False),
        (OSError(24, "Too many open files"), False),
    ],
    ids=lambda value: "" if isinstance(value, bool) else str(value)[:40],
)
def test_only_lost_connections_are_recognised_as_such(error, is_lost):
    assert channels.is_lost_connection(error) is is_lost


def own_errors():
    """Rank 1 fails in a collective in ways of its own: it raises that, and the other is told of it."""
    calls, rank = channel_of(dist.group.WORLD, torch.device("cpu")), dist.get_rank()
    reported = []

    def gather(fails_in=None):
        gathered = torch.empty(2)
        with pytest.MonkeyPatch.context() as patch:
            if fails_in is not None and rank == 1:
                patch.setattr(*fails_in)
            calls.issue_all_gather(gathered, torch.full((1,), float(rank))).wait()
            if fails_in is not None:
                # What a rank has sent before it failed arrives; of the failure others hear where they next wait.
                calls.issue_all_gather(gathered, torch.full((1,), float(rank))).wait()
        return gathered.tolist()

    def watched(error):
        with calls.watched(collective_code("consolidate something")):
            if rank == 1:
                raise error
            gather()

    def raises(error):
        def raise_it(*_):
            raise error

        return raise_it

    with timeouts_of(timeout_seconds=LONG_SECONDS):
        gather()
        near = type(calls._local_peers)
        for attempt, error in (
            (gather, (near, "send", raises(OSError(24, "Too many open files")))),
            (gather, (near, "receive", raises(RuntimeError("a bug of ours")))),
            (gather, (near, "send", raises(MemoryError("too many")))),
            (watched, torch.OutOfMemoryError("out of memory")),
            (watched, RuntimeError("shapes do not fit")),
            (watched, KeyError("state")),
            (watched, StateError("a wrong moment")),
            (watched, KeyboardInterrupt("ctrl-c")),
        ):
            try:
                attempt(error)
            except BaseException as raised:  # noqa: BLE001  whatever it is
                reported.append((type(raised).__name__, str(raised)))
            assert gather() == [0.0, 1.0]
    return reported


def test_an_error_on_one_rank_is_raised_there_unchanged_and_reported_to_the_others():
    others, own = run_ranks(own_errors, 2, kind="gloo")
    assert [name for name, _ in own] == [
        "OSError",
        "RuntimeError",
        "MemoryError",
        "OutOfMemoryError",
        "RuntimeError",
        "KeyError",
        "StateError",
        "KeyboardInterrupt",
    ]
    for (name, text), (_, of_peer) in zip(own, others, strict=True):
        assert f"rank 1 aborted its step: {name}" in of_peer, of_peer
        assert text.splitlines()[0] in of_peer


def deadlock_on_two_groups():
    """Rank 0 waits for rank 1 in one group, that one for rank 0 in the other."""
    rank = dist.get_rank()
    groups = [dist.new_group(), dist.new_group()]
    for_each = [channel_of(group, torch.device("cpu")) for group in groups]

    def gather(calls):
        gathered = torch.empty(2)
        calls.issue_all_gather(gathered, torch.full((1,), float(rank))).wait()

    for calls in for_each:
        gather(calls)
    with timeouts_of(timeout_seconds=2.0):
        with pytest.raises((RankDisagreement, PeerFailure)) as caught:
            gather(for_each[rank])
        return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_ranks_that_wait_for_each_other_in_two_groups_are_told_though_both_are_alive(kind):
    reported = run_ranks(deadlock_on_two_groups, 2, kind=kind)
    assert any(
        name == "RankDisagreement" and "ranks are waiting for each other" in text for name, text in reported
    ), reported


def a_barrier_on_one():
    """Rank 1 sits in a collective of torch's that rank 0 will not come to."""
    calls, rank = channel_of(dist.group.WORLD, torch.device("cpu")), dist.get_rank()
    gathered = torch.empty(2)
    calls.issue_all_gather(gathered, torch.full((1,), float(rank))).wait()
    store = dist.distributed_c10d._get_default_store()
    with timeouts_of(timeout_seconds=2.0):
        if rank == 1:
            dist.barrier()
            store.wait(["told"], timedelta(seconds=LONG_SECONDS))
            return ""
        with pytest.raises(RankDisagreement) as caught:
            calls.issue_all_gather(gathered, torch.full((1,), float(rank))).wait()
        dist.barrier()
        store.set("told", "1")
        return str(caught.value)


def test_a_rank_in_a_collective_of_the_users_is_reported_with_its_stack():
    reported, _ = run_ranks(a_barrier_on_one, 2, kind="gloo")
    assert 'ranks are waiting for each other: rank 1 did not reach "communicate outside a unit"' in reported
    assert "in barrier" in reported


def test_a_group_that_times_out_by_itself_raises_what_the_watchdog_found():
    run_ranks(failing_collectives, 2, kind="gloo")


def test_ranks_that_meet_through_a_file_poll_at_intervals_shorter_than_their_wait():
    # torch looks into the file once in 10 ms, so one of two ranks would sleep for half of that on average.
    naps, _ = run_ranks(native_agreements, 2, kind="gloo")
    waited = itertools.accumulate(naps, initial=0.0001)
    assert all(nap <= before for nap, before in zip(naps, waited, strict=False))


def test_logs_of_groups_that_carry_data_themselves_are_compared_before_a_step_is_used():
    for reported in run_ranks(diverge_on_a_backends_own_collectives, 3, kind="gloo"):
        assert [step for step, _ in reported] == [3]
        # One of the two others may come there only when it has been told.
        assert re.search(r"ranks? (0|2|0, 2) went on to reduce 'a'", reported[0][1])
        assert "rank 1 went on to reduce 'b'" in reported[0][1]


def used_after_its_end():
    channel = channel_of(dist.new_group(), torch.device("cpu"))
    channel.issue_all_reduce(torch.ones(1), average=False).wait()
    dist.destroy_process_group(channel.group)
    # Whoever shards over a group keeps it alive; here nobody does.
    gc.collect()
    with pytest.raises(StateError, match="a process group was used after it had been destroyed"):
        channel.issue_all_reduce(torch.ones(1), average=False)


def test_a_collective_of_a_group_that_is_gone_says_so():
    run_ranks(used_after_its_end, 2, kind="gloo")
