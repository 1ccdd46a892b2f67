"""A sharded run computes, bit for bit, what one process computes that runs every rank's slice in turn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

from shardwise.testing import run_ranks
from shardwise.testing.parity import (
    BF16,
    BF16_REDUCED_IN_BF16,
    FP32,
    ONE_BATCH,
    Accumulation,
    History,
    Precision,
    differences,
    gather_histories,
    run_plain,
    run_sharded,
)
from shardwise.testing.workloads import TIED_ACROSS_UNITS, WORKLOADS, Workload
from tests.ranks.subject import TORCH_IS_THE_SUBJECT, MixedPrecisionPolicy, beyond_torch, fully_shard
from tests.ranks.tables import slow

pytestmark = pytest.mark.arithmetic

# What goes wrong goes wrong by the first momentum; that nothing adds up later is seen in ten steps.
FEW = 3
# Of what a model may be, two ranks show all.
SOME = ("odd MLP", "tied transformer")
some_workloads = pytest.mark.parametrize(
    "workload", [name if name in SOME else slow(name) for name in WORKLOADS]
)
each_length = pytest.mark.parametrize("steps", [FEW, slow(10)])

EACH_OF_THREE = Accumulation(3)
LAST_OF_THREE = Accumulation(3, sync_each=False)
ALL_WORKLOADS = {**WORKLOADS, TIED_ACROSS_UNITS.name: TIED_ACROSS_UNITS}


@dataclass(frozen=True)
class Case:
    """One run: everything but the world it runs in. Cases that differ in `reshard` alone share an oracle."""

    workload: str
    precision: Precision = FP32
    accumulation: Accumulation = ONE_BATCH
    reshard: bool | int = True
    steps: int = FEW

    @property
    def label(self) -> str:
        return f"{self.workload}, {self.precision.label}, {self.accumulation.label}, reshard {self.reshard}"

    def model(self) -> Workload:
        return ALL_WORKLOADS[self.workload]


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def check_on_this_rank(cases, tolerance, optimizer=None):
    """Run all cases, then judge this rank's part of them; returns what is wrong, case by case."""
    options = {"optimizer": optimizer} if optimizer else {}
    local = []
    for case in cases:
        policy = MixedPrecisionPolicy(case.precision.param_dtype, case.precision.reduce_dtype)
        shard = partial(fully_shard, reshard_after_forward=case.reshard, mp_policy=policy)
        try:
            history = run_sharded(
                case.model(), shard, accumulation=case.accumulation, steps=case.steps, **options
            )
        except Exception as error:
            raise RuntimeError(f"{case.label}: {error}") from error
        local.append(history)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    oracles: dict[tuple, History | None] = {}
    wrong = []
    for case, history in zip(cases, gather_histories(local), strict=True):
        key = (case.workload, case.precision, case.accumulation, case.steps)
        if key not in oracles:
            mine = len(oracles) % world_size == rank
            oracles[key] = (
                run_plain(
                    case.model(),
                    world_size,
                    precision=case.precision,
                    accumulation=case.accumulation,
                    steps=case.steps,
                    **options,
                )
                if mine
                else None
            )
        expected = oracles[key]
        if expected is not None:
            found = differences(expected, history, tolerance=tolerance)
            if found:
                wrong.append(f"{case.label}: {len(found)} differences, first: {found[0]}")
    return wrong


def check(cases, world_size, *, kind="gloo", tolerance=0.0, optimizer=None):
    wrong = run_ranks(check_on_this_rank, world_size, cases, tolerance, optimizer, kind=kind)
    assert not any(wrong), "\n".join(line for rank in wrong for line in rank)


def cases_of(workload, precisions, accumulations, reshards, *, steps=FEW):
    cases = [Case(workload, *choice, steps) for choice in product(precisions, accumulations, reshards)]
    if TORCH_IS_THE_SUBJECT and workload == "branches":
        # Reused modules without gradient sync: torch adds up their gradients in another order.
        cases = [case for case in cases if case.accumulation.sync_each]
    return cases


@each_length
@pytest.mark.parametrize("workload", WORKLOADS)
def test_two_ranks_match_the_oracle_bitwise(workload, steps):
    # Groups of two are the whole world here, and mean True.
    accumulations = (ONE_BATCH, LAST_OF_THREE, EACH_OF_THREE)
    check(cases_of(workload, (FP32, BF16), accumulations, (True, False), steps=steps), 2)


def test_two_ranks_match_the_oracle_bitwise_with_gradients_reduced_in_bf16():
    precisions, accumulations = (BF16_REDUCED_IN_BF16,), (ONE_BATCH, LAST_OF_THREE)
    cases = [case for name in WORKLOADS for case in cases_of(name, precisions, accumulations, (True,))]
    check(cases, 2)


@each_length
def test_two_ranks_match_the_oracle_bitwise_with_adamw(steps):
    cases = [
        case for name in WORKLOADS for case in cases_of(name, (FP32,), (ONE_BATCH,), (True,), steps=steps)
    ]
    check(cases, 2, optimizer=adamw)


# From three ranks on, a backend adds gradients up in an order of its own and the last bits may differ; on gloo we add
# them up ourselves, in rank order, where torch lets us.
FROM_THREE_RANKS_ON = 1e-6 if TORCH_IS_THE_SUBJECT else 0.0


@each_length
@some_workloads
def test_three_ranks_match_the_oracle_bitwise(workload, steps):
    cases = cases_of(workload, (FP32,), (ONE_BATCH, LAST_OF_THREE), (True, False), steps=steps)
    check(cases, 3, tolerance=FROM_THREE_RANKS_ON)


@each_length
@some_workloads
def test_four_ranks_match_the_oracle_bitwise(workload, steps):
    cases = cases_of(workload, (FP32,), (ONE_BATCH, LAST_OF_THREE), (True, False, 2), steps=steps)
    check(cases, 4, tolerance=FROM_THREE_RANKS_ON)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_two_ranks_as_threads_match_the_oracle_bitwise(workload):
    cases = cases_of(workload, (FP32, BF16), (ONE_BATCH, LAST_OF_THREE), (True, False))
    check(cases, 2, kind="threads")


@pytest.mark.slow
def test_four_ranks_as_threads_match_the_oracle_to_the_last_digits():
    cases = [case for name in WORKLOADS for case in cases_of(name, (FP32,), (ONE_BATCH,), (True, 2))]
    check(cases, 4, kind="threads", tolerance=1e-6)


@beyond_torch
@each_length
def test_a_parameter_tied_across_units_trains_as_in_the_plain_model(steps):
    accumulations = (ONE_BATCH, LAST_OF_THREE)
    check(cases_of(TIED_ACROSS_UNITS.name, (FP32, BF16), accumulations, (True, False), steps=steps), 2)


def test_one_rank_alone_matches_the_oracle_bitwise():
    cases = [case for name in WORKLOADS for case in cases_of(name, (FP32, BF16), (ONE_BATCH,), (True,))]
    check(cases, 1)


def test_the_oracle_notices_a_gradient_that_is_off_in_its_last_bit():
    """The verdict itself: a history that differs by one rounding is told from one that does not."""
    workload = WORKLOADS["odd MLP"]
    expected, nudged = run_plain(workload, 2, steps=2), run_plain(workload, 2, steps=2)
    assert differences(expected, nudged) == []
    gradient = nudged.grads[1]["layers.0.weight"]
    gradient[0, 0] = torch.nextafter(gradient[0, 0], torch.tensor(torch.inf))
    assert [line.split(":")[0] for line in differences(expected, nudged)] == [
        "step 1, gradient 'layers.0.weight'"
    ]
