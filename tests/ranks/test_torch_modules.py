"""Torch's own modules train sharded as they do unsharded, whatever they do with their parameters."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise import FullyShardedDataParallel, ZeroRedundancyOptimizer, fully_shard, hook_with_zero_step
from shardwise.testing import run_ranks
from tests.ranks.tables import slow
from tests.ranks.torch_modules import MODELS, losses, output_of, pair

pytestmark = pytest.mark.arithmetic

APIS = ["fully_shard", "wrapper", "wrapper, original parameters"]


def _parts(model):
    """What becomes a unit of its own: children with parameters, and what containers hold."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif not isinstance(child, (nn.ParameterList, nn.ParameterDict)) and any(
            True for _ in child.parameters()
        ):
            yield child


def sharded(model, api, device="cpu"):
    parts = list(_parts(model))
    if api == "fully_shard":
        for part in parts:
            fully_shard(part)
        return fully_shard(model)
    chosen = set(parts)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or module in chosen,
        use_orig_params=api == "wrapper, original parameters",
        device_id=torch.device(device),
    )


def fresh(name, device="cpu"):
    """A model and its inputs, the same each time."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors is a no-op")
        model, x = MODELS[name].make().to(device), MODELS[name].inputs()
    return model, x.detach().to(device).requires_grad_(x.requires_grad)


def different_losses(api, device="cpu", tolerance=0.0):
    """All ranks have the same inputs, so that the average of their gradients is each one's own; which differ.

    With 2 or 4 ranks, whose average is exact.
    """
    different = {}
    for name in MODELS:
        model, x = fresh(name, device)
        found = [losses(model, x)]
        model, x = fresh(name, device)
        found.append(losses(sharded(model, api, device), x))
        if not torch.allclose(*found, rtol=tolerance, atol=0.0):
            different[name] = [each.tolist() for each in found]
    return different


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_torchs_modules_train_as_unsharded(api, world_size):
    assert run_ranks(different_losses, world_size, api, kind="gloo") == [{}] * world_size


ZEROS = {
    "whole parameters": {},
    "bucket views": {"parameters_as_bucket_view": True},
    "cut where a fair share ends": {"balanced": True},
    "in backward": {"overlap_with_ddp": True},
}


def different_steps(options):
    """The same for an optimizer whose ranks step parts of a model that is whole on each of them."""
    different = {}
    for name in MODELS:
        model, x = fresh(name)
        found = [losses(model, x)]
        model, x = fresh(name)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2, **options)
        if "overlap_with_ddp" in options:
            model = DistributedDataParallel(model)
            model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
        found.append(losses(model, x, optimizer))
        if not torch.equal(*found):
            different[name] = [each.tolist() for each in found]
    return different


@pytest.mark.parametrize("options", ZEROS.values(), ids=ZEROS)
def test_torchs_modules_train_with_a_divided_optimizer(options):
    assert run_ranks(different_steps, 2, options, kind="gloo") == [{}] * 2


class MovingLSTM(nn.LSTM):
    """Moves its weights to memory of its own whenever they are other ones, as on a GPU, for cuDNN."""

    def flatten_parameters(self):
        if len(self._flat_weights) == len(self._flat_weights_names):
            with torch.no_grad():
                for weight in self._flat_weights:
                    weight.set_(weight.clone())


def moves_its_weights(api):
    found = []
    for shard in (False, True):
        torch.manual_seed(1)
        lstm, x = MovingLSTM(4, 3, batch_first=True), torch.randn(2, 5, 4)
        model = pair(lstm, output_of, 3)
        found.append(losses(sharded(model, api) if shard else model, x))
        # As many models do in each forward.
        lstm.flatten_parameters()
    return torch.equal(*found)


@pytest.mark.parametrize("api", APIS)
def test_recurrent_modules_do_not_move_weights_that_are_gathered(api):
    assert run_ranks(moves_its_weights, 2, api, kind="gloo") == [True, True]


def lost_writes(api):
    model = nn.Sequential(nn.Embedding(20, 4, max_norm=1.0), nn.Linear(4, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded(model, api)
    return [str(each.message) for each in caught if "max_norm" in str(each.message)], dist.get_rank()


@pytest.mark.parametrize("api", APIS)
def test_an_embedding_that_writes_to_its_weight_is_warned_of(api):
    for messages, _ in run_ranks(lost_writes, 2, api, kind="gloo"):
        assert messages
        assert "'weight'" in messages[0] or "'0.weight'" in messages[0]
        assert "the shards, which the optimizer steps, are not scaled" in messages[0]
