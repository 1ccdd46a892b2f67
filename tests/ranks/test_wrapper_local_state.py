"""Local state dicts: every rank's own elements, through files of one rank and through distributed checkpoints."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from shardwise import FullyShardedDataParallel, LocalStateDictConfig, ShardingStrategy, StateDictType
from shardwise.testing import run_ranks
from shardwise.testing.workloads import WORKLOADS, seeded
from tests.ranks.models import same
from tests.ranks.wrapped import wrapped

FSDP = FullyShardedDataParallel
LOCAL = StateDictType.LOCAL_STATE_DICT
TIED = WORKLOADS["tied transformer"]


def adam(params):
    return torch.optim.AdamW(params, lr=0.02)


def trained(options):
    model = wrapped("tied transformer", **options)
    optim = adam(model.parameters())
    batch = TIED.data(0, 0, dist.get_rank())
    TIED.loss(model(*batch), batch).backward()
    optim.step()
    optim.zero_grad()
    return model, optim


def same_states(got, want):
    assert got.keys() == want.keys()
    for name, values in want.items():
        for key, value in values.items():
            same(got[name][key], value, f"{name} {key}")


def through_checkpoints(path, options, copied):
    model, optim = trained(options)
    want = model.state_dict()
    want_state = FSDP.full_optim_state_dict(model, optim, rank0_only=False)["state"]
    with FSDP.state_dict_type(model, LOCAL, LocalStateDictConfig(offload_to_cpu=copied)):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optim)}
    if copied:
        # What is copied is the rank's own all the same.
        state = copy.deepcopy(state)
        state["model"] = {name: value.clone().contiguous().cpu() for name, value in state["model"].items()}
    dcp.save(state, checkpoint_id=path)
    other = wrapped("tied transformer", **options)
    other_optim = adam(other.parameters())
    for param in other.parameters():
        param.grad = torch.zeros_like(param)
    other_optim.step()
    with torch.no_grad():
        for param in other.parameters():
            param.fill_(dist.get_rank() + 5.0)
    with FSDP.state_dict_type(other, LOCAL):
        loaded = {"model": other.state_dict(), "optim": FSDP.optim_state_dict(other, other_optim)}
        dcp.load(loaded, checkpoint_id=path)
        other.load_state_dict(loaded["model"])
        FSDP.optim_state_dict_to_load(other, other_optim, loaded["optim"], load_directly=True)
    got = other.state_dict()
    for name, value in want.items():
        same(got[name], value, name)
    same_states(FSDP.full_optim_state_dict(other, other_optim, rank0_only=False)["state"], want_state)


OPTIONS = [
    {"use_orig_params": False},
    {"use_orig_params": True},
    {"use_orig_params": False, "sharding_strategy": ShardingStrategy.NO_SHARD},
]


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_a_distributed_checkpoint_gives_every_rank_its_own_back(tmp_path, number):
    for copied in (False, True):
        path = tmp_path / f"{copied}"
        run_ranks(through_checkpoints, 3, path, OPTIONS[number], copied, kind="gloo")


class Uneven(nn.Module):
    """Of the first parameter some ranks hold nothing, of the last one none holds anything."""

    def __init__(self):
        super().__init__()
        self.small = nn.Parameter(torch.arange(3.0))
        self.large = nn.Parameter(torch.arange(40.0) + 100)
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x):
        return x * self.small.sum() + self.large.sum() + self.nothing.sum()


def save_uneven(path):
    model = FSDP(Uneven(), use_orig_params=True)
    assert model.small.numel() == (3 if dist.get_rank() == 0 else 0)
    with FSDP.state_dict_type(model, LOCAL):
        dcp.save(model.state_dict(), checkpoint_id=path)


def load_uneven(path):
    model = FSDP(Uneven(), use_orig_params=True)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with FSDP.state_dict_type(model, LOCAL):
        state = model.state_dict()
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state)
    want = Uneven().state_dict()
    for name, value in model.state_dict().items():
        same(value, want[name], name)


def test_ranks_without_elements_of_a_parameter_neither_hide_nor_lose_it(tmp_path):
    run_ranks(save_uneven, 3, tmp_path, kind="gloo")
    for world in (2, 3):
        run_ranks(load_uneven, world, tmp_path, kind="gloo")


def files_of_one_rank(options):
    model, optim = trained(options)
    with FSDP.state_dict_type(model, LOCAL):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optim)}
        buffer = io.BytesIO()
        torch.save(state, buffer)
        numel = sum(value.numel() for value in state["model"].values())
        numel += sum(
            value.numel() for values in state["optim"]["state"].values() for value in values.values()
        )
        assert buffer.tell() < 4 * numel + 40_000
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        assert {type(value) for value in loaded["model"].values()} == {torch.Tensor}
        other, other_optim = trained(options)
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        with FSDP.state_dict_type(other, LOCAL):
            other.load_state_dict(loaded["model"])
            FSDP.optim_state_dict_to_load(other, other_optim, loaded["optim"], load_directly=True)
    want = model.state_dict()
    for name, value in other.state_dict().items():
        same(value, want[name], name)
    # Values compute like any tensors.
    with FSDP.state_dict_type(model, LOCAL):
        for name, value in model.state_dict().items():
            same(value.sum() + 1, dict(model.named_parameters()).get(name, value).detach().sum() + 1, name)


def test_local_state_dicts_are_plain_tensors_in_a_file_of_one_rank():
    for options in OPTIONS:
        run_ranks(files_of_one_rank, 2, options)


def pieces(path):
    model = FSDP(seeded(nn.Linear(8, 8)), use_orig_params=True)
    with FSDP.state_dict_type(model, LOCAL):
        state = model.state_dict()
    cut = {name: list(value.split(4)) for name, value in state.items() if value.numel()}
    with pytest.raises(CheckpointException, match="is a view of a rank's shard"):
        dcp.save(cut, checkpoint_id=path)


def test_pieces_of_a_ranks_part_are_refused(tmp_path):
    run_ranks(pieces, 2, tmp_path, kind="gloo")
