"""torch's own tools on sharded models: each program gives with ours what it gives with torch's `fully_shard`.

A program takes a `fully_shard` and returns tensors, plain values and containers of them; DTensors are compared in full.
"""

from __future__ import annotations

import copy
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise
from shardwise.testing import run_ranks
from tests.ranks.tables import slow

pytestmark = pytest.mark.arithmetic

WIDTH = 6


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """With `hidden` 10, the weights divide by no number of ranks but 2."""

    def __init__(self, hidden: int = 10) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def sharded(fully_shard, model, **options):
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def seeded_model(*args):
    torch.manual_seed(0)
    return Model(*args)


def adamw(model):
    return torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=1e-2, foreach=False
    )


def train(model, optimizer, steps, data_rank):
    found = []
    for step in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + data_rank))
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), [param.grad for param in model.parameters() if param.requires_grad]]
        optimizer.step()
        optimizer.zero_grad()
    return plain([found, dict(model.named_parameters())])


def plain(value):
    """The value with its own tensors, DTensors in full: what two libraries return alike."""
    if isinstance(value, DTensor):
        return [str(value.placements), value.full_tensor().detach().clone()]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value


def differences(ours, theirs, at=""):
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        is_same = ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        return [] if is_same else [at]
    if type(ours) is not type(theirs):
        return [f"{at}: {type(ours).__name__}, not {type(theirs).__name__}"]
    if isinstance(ours, dict):
        if list(ours) != list(theirs):
            return [f"{at}: keys {list(ours)}, not {list(theirs)}"]
        return [one for key in ours for one in differences(ours[key], theirs[key], f"{at}.{key}")]
    if isinstance(ours, list):
        if len(ours) != len(theirs):
            return [f"{at}: {len(ours)}, not {len(theirs)}"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [one for index, (a, b) in pairs for one in differences(a, b, f"{at}[{index}]")]
    return [] if ours == theirs else [f"{at}: {ours!r}, not {theirs!r}"]


# --- the programs -----------------------------------------------------------------------------------------------------


def tensor_parallel(fully_shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = seeded_model(8)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    sharded(fully_shard, model, mesh=mesh["dp"])
    return train(model, adamw(model), 3, mesh["dp"].get_local_rank())


class Experts(nn.Module):
    """Each rank of an expert-parallel axis has half of the experts: DTensors that are sharded on dim 0."""

    def __init__(self, mesh) -> None:
        super().__init__()
        weight = torch.randn(4, WIDTH, WIDTH) / 3
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        self.mesh = mesh

    def forward(self, x):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return x + torch.relu(torch.einsum("bi,eio->beo", x, weight)).sum(1)


def experts(fully_shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(mesh["ep"]), nn.Linear(WIDTH, WIDTH))
    fully_shard(model[1], mesh=mesh["dp"], shard_placement_fn=lambda param: Shard(1))
    for module in (model[0], model[2]):
        fully_shard(module, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return train(model, optimizer, 3, mesh["dp"].get_local_rank())


OPTIONS = {
    "plain": {},
    "offloaded": {"cpu_offload": True},
    "full, offloaded": {"full_state_dict": True, "cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "without frozen": {"ignore_frozen_params": True},
}


def state_dicts(fully_shard):
    """All options of reading, then all of setting; a state that was read continues on a fresh model."""
    found = {}
    for name, options in OPTIONS.items():
        is_frozen = "ignore_frozen_params" in options
        model = seeded_model()
        model.blocks[1].norm.weight.requires_grad_(not is_frozen)
        sharded(fully_shard, model)
        optimizer = adamw(model)
        train(model, optimizer, 2, dist.get_rank())
        reading = StateDictOptions(**options)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=reading)
        found[name] = [plain(model_state), plain(optimizer_state)]
        found[f"{name}, apart"] = [
            plain(get_model_state_dict(model, options=reading)),
            plain(get_optimizer_state_dict(model, optimizer, options=reading)),
            plain(get_model_state_dict(model, submodules={model.blocks[1]}, options=reading)),
        ]
        from_rank_0 = options.get("full_state_dict", False) and options.get("cpu_offload", False)
        other = Model()
        other.blocks[1].norm.weight.requires_grad_(not is_frozen)
        sharded(fully_shard, other)
        other_optimizer = adamw(other)
        setting = StateDictOptions(
            **{**options, "cpu_offload": False},
            broadcast_from_rank0=from_rank_0,
            strict=not is_frozen,
        )
        set_model_state_dict(other, model_state, options=setting)
        set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=setting)
        found[f"{name}, continued"] = train(other, other_optimizer, 2, dist.get_rank())
    return found


def shared_folder():
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return folder[0]


def saved_asynchronously(fully_shard):
    """Training goes on while the state is written; what is loaded is the state of the call."""
    model = sharded(fully_shard, seeded_model())
    optimizer = adamw(model)
    train(model, optimizer, 2, dist.get_rank())
    folder = shared_folder()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    # The thread that writes has a group of its own: its collectives would mix with those of training.
    writing = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    went_on = train(model, optimizer, 2, dist.get_rank())
    writing.result()
    dist.barrier()
    other = sharded(fully_shard, Model())
    other_optimizer = adamw(other)
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    again = train(other, other_optimizer, 2, dist.get_rank())
    # The buffer that counts calls is part of the state, too.
    assert differences(again, went_on) == []
    return again


def saved_for_huggingface(fully_shard):
    """Safetensors files of shards, consolidated into one file, and read back into shards."""
    model = sharded(fully_shard, seeded_model())
    optimizer = adamw(model)
    trained = train(model, optimizer, 1, dist.get_rank())
    folder = shared_folder()
    writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
    dcp.save(get_model_state_dict(model), storage_writer=writer)
    dist.barrier()
    other = sharded(fully_shard, Model())
    state = get_model_state_dict(other)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    set_model_state_dict(other, state)
    names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    assert differences(plain(dict(other.named_parameters())), trained[1]) == []
    return [names, plain(other.state_dict())]


def averaged(fully_shard):
    """An average of the weights is sharded as the model is, and follows it."""
    model = seeded_model()
    average = AveragedModel(copy.deepcopy(model), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    sharded(fully_shard, model)
    sharded(fully_shard, average.module)
    optimizer = adamw(model)
    found = []
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            found.append(plain(average(x)))
        # torch's shows whole parameters until then.
        average.module.reshard()
    return [found, plain(average.state_dict())]


def compiled(fully_shard):
    model = seeded_model()
    for block in model.blocks:
        block.register_buffer("calls", None)
        block.forward = lambda x, block=block: x + block.down(torch.relu(block.up(block.norm(x))))
    model.blocks[0].compile(backend="aot_eager", fullgraph=True)
    model.blocks[1].compile(backend="aot_eager", fullgraph=True)
    sharded(fully_shard, model)
    return train(model, adamw(model), 3, dist.get_rank())


def compared(program):
    return differences(program(shardwise.fully_shard), program(torch_fully_shard))


@pytest.mark.parametrize(
    ("program", "world_size"),
    [
        (tensor_parallel, 4),
        (experts, 4),
        (state_dicts, 2),
        (saved_asynchronously, 2),
        (saved_for_huggingface, 2),
        (averaged, 2),
        slow(compiled, 2),
    ],
)
def test_a_program_gives_what_it_gives_with_torchs(program, world_size):
    assert run_ranks(compared, world_size, program, kind="gloo") == [[]] * world_size
