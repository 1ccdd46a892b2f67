"""Sharded stages of torch's pipelines: every schedule trains as with torch's own `fully_shard`, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.testing import RankFailure, run_ranks
from tests.ranks.tables import slow

pytestmark = pytest.mark.arithmetic

WIDTH = 6
MICRO_BATCHES = 6


class Block(nn.Module):
    """`ends_with_linear`: backward of the weights alone then passes through the node of the block's output."""

    def __init__(self, ends_with_linear: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.ends_with_linear = ends_with_linear

    def forward(self, x):
        y = self.down(torch.relu(self.norm(self.up(x))))
        return y if self.ends_with_linear else x + torch.tanh(y)


class Stage(nn.Module):
    """Blocks that are units of their own, and parameters of the root before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(False), Block(True)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return torch.relu(self.last(x))


def mean_square(output, target):
    return nn.functional.mse_loss(output.float(), target)


def trained(schedule_name, fully_shard, options):
    """The losses, and each step's gradients and parameters, of this rank's stages."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    cls = get_schedule_class(schedule_name)
    is_multi = issubclass(cls, pipelining.schedules.PipelineScheduleMulti)
    places = {"ZBVZeroBubble": [(0, 3), (1, 2)], "DualPipeV": [(0, 3), (1, 2)]}.get(
        schedule_name, [(0, 2), (1, 3)] if is_multi else [(0,), (1,)]
    )[pp.get_local_rank()]
    modules = []
    for place in places:
        torch.manual_seed(place)
        module = Stage()
        for block in module.blocks:
            fully_shard(block, mesh=dp, **options)
        modules.append(fully_shard(module, mesh=dp, **options))
    stages = [
        pipelining.PipelineStage(
            module, place, 4 if is_multi else 2, torch.device("cpu"), group=pp.get_group()
        )
        for module, place in zip(modules, places, strict=True)
    ]
    schedule = cls(stages if is_multi else stages[0], MICRO_BATCHES, loss_fn=mean_square)
    optimizer = torch.optim.AdamW(
        [param for module in modules for param in module.parameters()], lr=1e-2, foreach=False
    )
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dp.get_local_rank())
        x, target = torch.randn(2, 3 * MICRO_BATCHES, WIDTH, generator=generator)
        losses: list[torch.Tensor] = []
        schedule.step(
            *([x] if 0 in places else []),
            target=target if (3 if is_multi else 1) in places else None,
            losses=losses if (3 if is_multi else 1) in places else None,
        )
        found += [loss.detach().clone() for loss in losses]
        for module in modules:
            for param in module.parameters():
                assert isinstance(param, DTensor)
                found += [param.grad.full_tensor().clone(), param.full_tensor().detach().clone()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def compared(schedule_name, options, ours, torchs):
    own = trained(schedule_name, shardwise.fully_shard, {**options, **ours})
    expected = trained(schedule_name, torch_fully_shard, {**options, **torchs})
    assert len(own) == len(expected)
    return [index for index, (a, b) in enumerate(zip(own, expected, strict=True)) if not torch.equal(a, b)]


KEEPS = {"reshard_after_forward": False}
FREES = {"reshard_after_forward": True}
CASES = [
    *[(name, KEEPS) for name in ("GPipe", "1F1B", "ZBVZeroBubble")],
    *[slow(name, KEEPS) for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV")],
    ("1F1B", FREES),
    *[slow(name, FREES) for name in ("GPipe", "Interleaved1F1B", "LoopedBFS")],
]


def skip_if_it_sends_to_itself(schedule_name):
    if schedule_name in ("ZBVZeroBubble", "DualPipeV") and torch.__version__ < "2.12":
        pytest.skip(
            f"{schedule_name} of torch {torch.__version__} sends from a rank to itself, which gloo does not do"
        )


@pytest.mark.parametrize(("schedule_name", "options"), CASES)
def test_a_schedule_trains_sharded_stages_as_torch_does(schedule_name, options):
    skip_if_it_sends_to_itself(schedule_name)
    assert run_ranks(compared, 4, schedule_name, options, {}, {}, kind="gloo") == [[]] * 4


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.parametrize("schedule_name", ["GPipe", slow("1F1B"), slow("Interleaved1F1B")])
def test_stages_in_bfloat16_sum_micro_batches_in_float32_as_torch_does(schedule_name):
    ours = {"mp_policy": shardwise.MixedPrecisionPolicy(**BF16)}
    torchs = {"mp_policy": TorchMixedPrecisionPolicy(**BF16)}
    assert run_ranks(compared, 4, schedule_name, KEEPS, ours, torchs, kind="gloo") == [[]] * 4


def trained_by_ours(schedule_name, options):
    trained(schedule_name, shardwise.fully_shard, options)


def test_a_schedule_that_would_find_no_weights_is_refused():
    """torch trains such a stage without the gradients of its blocks, and says nothing."""
    skip_if_it_sends_to_itself("ZBVZeroBubble")
    with pytest.raises(RankFailure, match=r"unit 'blocks\.\d' ran and has no gradient"):
        run_ranks(trained_by_ours, 4, "ZBVZeroBubble", FREES, kind="gloo")
