"""Ranks that part raise, all of them, with the place where they part; then they train on, right to the last bit.

Many cases share one set of ranks: a case that left anything behind would fail those after it.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwise import PeerFailure, RankDisagreement, ZeroRedundancyOptimizer
from shardwise.comm.collectives import GroupCalls
from shardwise.comm.native import NativeWire
from shardwise.comm.path import code_of
from shardwise.comm.watch import watch_over
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.parting import (
    BREAKING_OFF,
    PARTING,
    Boom,
    Model,
    Run,
    a_state_dict_on_one,
    another_dtype_policy,
    another_requires_grad,
    another_resharding,
    running_out_of_memory,
    timeouts_of,
)
from tests.ranks.subject import beyond_torch

pytestmark = beyond_torch


def outcomes(cases, who, face):
    """What each case ends in on this rank; a good step before and after each must be right to the last bit."""
    errs = dist.get_rank() == who % dist.get_world_size()
    ended = []
    run = Run(face)
    with timeouts_of(timeout_seconds=4.0):
        run.good_step()
        for case in cases:
            run.optim.zero_grad()
            try:
                case(run, errs)
            except (Boom, RankDisagreement, PeerFailure) as error:
                ended.append((type(error).__name__, str(error)))
            else:
                ended.append(("nothing", ""))
            run.good_step()
            run.good_step()
        if face == "fully_shard":
            # A wrapper's gathers, as torch's does.
            a_state_dict_on_one(run, errs)
    return ended


def check(world_size, who, parting, breaking_off, kind, face="fully_shard"):
    cases = [*parting, *breaking_off]
    told = run_ranks(outcomes, world_size, cases, who, face, kind=kind, timeout_seconds=100)
    who %= world_size
    for rank, ended in enumerate(told):
        for case, (name, text) in zip(parting, ended, strict=False):
            assert name == "RankDisagreement", f"{case.__name__} on rank {rank}: {name} {text}"
            assert f"rank {who} went on to" in text
            assert f"rank {rank}: ..." in text
        for case, (name, text) in zip(breaking_off, ended[len(parting) :], strict=True):
            own = "OutOfMemory" if case is running_out_of_memory else "Boom"
            assert name == (own if rank == who else "PeerFailure"), f"{case.__name__} on {rank}: {name}"
            assert rank == who or f"rank {who} broke off its step" in text


def test_two_ranks_that_part_both_raise_and_train_on():
    check(2, 0, PARTING[::2], BREAKING_OFF, "gloo")


def test_four_ranks_raise_when_the_last_one_parts_and_train_on():
    check(4, -1, PARTING[:2] + PARTING[6:8] + PARTING[-1:], BREAKING_OFF[1:2], "gloo")


def test_ranks_as_threads_that_part_all_raise_and_train_on():
    check(4, 0, PARTING[1::2], BREAKING_OFF[1:], "threads")


def test_ranks_of_a_wrapped_model_that_part_all_raise_and_train_on():
    # Of settings that a wrapper does not have.
    others = (another_resharding, another_requires_grad)
    check(3, 1, [case for case in PARTING if case not in others], BREAKING_OFF, "threads", "wrapper")


def zero_outcomes():
    """The last rank errs with a ZeroRedundancyOptimizer; then all go on."""
    errs = dist.get_rank() == dist.get_world_size() - 1
    model = seeded(Model())
    optim = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    ended = []

    def gradients(of=lambda name: True):
        for name, param in model.named_parameters():
            param.grad = torch.ones_like(param) if of(name) else None

    def all_step():
        gradients()
        optim.step()

    def one_lacks_a_gradient():
        gradients(lambda name: not errs or name != "first.bias")
        optim.step()

    with timeouts_of(timeout_seconds=4.0):
        all_step()
        for case in (one_lacks_a_gradient, one_lacks_a_gradient):
            try:
                case()
            except RankDisagreement as error:
                ended.append(str(error))
            all_step()
    return ended


@pytest.mark.parametrize("kind", ["gloo", "threads"])
def test_no_rank_steps_a_zero_optimizer_before_all_agree(kind):
    for ended in run_ranks(zero_outcomes, 3, kind=kind):
        assert len(ended) == 2
        assert all("rank 2 went on to step a ZeroRedundancyOptimizer" in text for text in ended)
        assert all("without gradients of [1]" in text for text in ended)


def different_sizes():
    """The same collective of different sizes, which gloo itself would end the process for; then one that is right."""
    calls, rank = GroupCalls(dist.group.WORLD, torch.device("cpu")), dist.get_rank()
    with timeouts_of(timeout_seconds=4.0), pytest.raises(RankDisagreement) as told:
        calls.issue_all_gather(torch.empty(8 + 2 * rank), torch.ones(4 + rank)).wait()
    gathered = torch.empty(2)
    calls.issue_all_gather(gathered, torch.full((1,), float(rank))).wait()
    with timeouts_of(timeout_seconds=4.0), pytest.raises(RankDisagreement, match="hold different models"):
        another_dtype_policy(Run(), errs=rank == 1)
    return str(told.value), gathered.tolist()


def test_messages_of_different_sizes_and_models_of_different_dtypes_are_told():
    for text, gathered in run_ranks(different_sizes, 2, kind="gloo"):
        assert "rank 0 sends 16 bytes; rank 1 sends 20 bytes" in text
        assert gathered == [0.0, 1.0]


def native_paths():
    """Two paths on a group whose own collectives carry the data, as with NCCL, here without any."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    told = []
    with timeouts_of(timeout_seconds=4.0):
        wire = NativeWire(group, torch.device("cpu"))
        watch_over(wire)
        for step in range(6):
            wire.note(code_of("gather 'a' in forward"))
            wire.note(code_of("reduce 'b'" if step == 3 and rank == 1 else "reduce 'a'"))
            try:
                wire.agree(code_of("let an optimizer use the step"))
            except RankDisagreement as error:
                told.append((step, str(error)))
    return told


def test_paths_of_groups_that_carry_data_themselves_are_compared_before_a_step_is_used():
    for told in run_ranks(native_paths, 3, kind="gloo"):
        assert [step for step, _ in told] == [3]
        assert "ranks 0, 2 went on to reduce 'a'; rank 1 went on to reduce 'b'" in told[0][1]
