"""A unit that is reduced slice by slice trains bit by bit as one that is reduced at once."""

import pytest
import torch
import torch.distributed as dist

from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from shardwise.engine.reduce import reduce_plan
from shardwise.engine.unit.membership import units_of
from shardwise.testing import run_ranks
from shardwise.testing.workloads import WORKLOADS
from tests.ranks.models import full
from tests.ranks.tables import slow

pytestmark = pytest.mark.arithmetic

POLICIES = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "exact": {"exact": True},
    "host": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def trained(name, options, most_bytes, device):
    """Parameters after two steps of two micro-batches; and the most slices that a unit had."""
    workload = WORKLOADS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce_plan, "_MOST_BYTES", most_bytes)
        model = workload.model(device)
        for unit in (*workload.units(model), model):
            fully_shard(unit, **options)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            for micro_batch in range(2):
                batch = workload.data(step, micro_batch, dist.get_rank(), device)
                workload.loss(model(*batch), batch).backward()
            optim.step()
            optim.zero_grad()
    plans = [unit.gradients.plan for module in model.modules() for unit in units_of(module)]
    most = max(len(plan.slices) for plan in plans if plan is not None)
    return {key: full(param.detach()) for key, param in model.named_parameters()}, most


def compare(names, policies=POLICIES, device="cpu"):
    for name in names:
        for policy, options in policies.items():
            if policy == "exact" and dist.get_world_size() == 3:
                continue  # Exact sums are made in pairs.
            at_once, num_slices = trained(name, options, 1 << 30, device)
            assert num_slices == 1
            in_slices, num_slices = trained(name, options, 200, device)
            assert num_slices > 1, (name, policy)
            for key, value in at_once.items():
                assert torch.equal(value, in_slices[key]), (name, policy, key)


@pytest.mark.parametrize("world_size", [slow(2), 3])
def test_slices_come_to_the_same_bits(world_size):
    # Odd sizes, and parameters that a step does not reach.
    run_ranks(compare, world_size, ("odd MLP", "branches"), kind="gloo")
