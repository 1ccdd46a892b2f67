"""The same programs with shardwise and with torch's ``fully_shard``, side by side on the same ranks.

A program takes an API and returns what a user can see: losses, gradients, kinds of parameters, errors. Both APIs must
give the same. What shardwise does better on purpose is in ``docs/torch_surface.md``, with its own tests.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import shardwise
from shardwise.testing import run_ranks
from tests.ranks.side_by_side import device, failures, two_axes

NAMES = (
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)


def api_of(library: Any, mesh_of_dp_and_tp: Any) -> Any:
    """The names of an API; torch's default mesh would be one of accelerators wherever there are some."""
    api = SimpleNamespace(**{name: getattr(library, name, None) for name in NAMES})
    api.mesh_of_dp_and_tp = mesh_of_dp_and_tp
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    shard = api.fully_shard

    def fully_shard(module, **options):
        return shard(module, **{"mesh": mesh, **options})

    api.fully_shard, api.mesh, api.without_a_mesh = fully_shard, mesh, shard
    return api


def outcome(program, api):
    """What the program returns; or the error that it raises."""
    torch.manual_seed(11)
    try:
        return program(api)
    except Exception as error:  # noqa: BLE001  compared with the other API's
        return error


def shared_mesh():
    """One object for all: DTensor keeps the first of equal meshes, and torch wants the very one it was given."""
    return two_axes("dp", "tp")


def both(program, spmd=None):
    spmd = spmd or shared_mesh()
    ours, theirs = (outcome(program, api_of(library, spmd)) for library in (shardwise, torch_fsdp))
    for found in (ours, theirs):
        if isinstance(found, Exception):
            raise found
    assert_same(ours, theirs, "")


def both_raise(program, spmd=None):
    spmd = spmd or shared_mesh()
    ours, theirs = (outcome(program, api_of(library, spmd)) for library in (shardwise, torch_fsdp))
    assert isinstance(theirs, Exception), f"torch returns {theirs!r}"
    if not isinstance(theirs, AttributeError):
        # Older versions of torch stumble over an attribute where newer ones raise an error on purpose.
        assert isinstance(ours, type(theirs)), f"torch raises {theirs!r}, shardwise {ours!r}"
    assert isinstance(ours, shardwise.ShardwiseError), repr(ours)
    assert ours.fix, repr(ours)


def assert_same(ours, theirs, where):
    if isinstance(theirs, torch.Tensor):
        # Sums over ranks may be taken in another order.
        torch.testing.assert_close(ours, theirs, msg=lambda text: f"{where}: {text}")
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{where}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), f"{where}: {ours} {theirs}"
        for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(own, other, f"{where}[{index}]")
    else:
        assert ours == theirs, f"{where}: shardwise {ours!r}, torch {theirs!r}"


def full(tensor):
    if not isinstance(tensor, DTensor):
        return tensor
    # NCCL cannot gather what is offloaded to the host.
    return tensor.to(tensor.device_mesh.device_type).full_tensor()


class Block(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class Stack(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard(api, model=None, **options):
    model = Stack() if model is None else model
    for block in model.blocks:
        api.fully_shard(block, **options)
    return api.fully_shard(model, **options)


def rows(step, width=4):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(3, width, generator=generator, device="cpu").to(device())


def gradients(model):
    return {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}


def train(model, steps=2, run=None):
    """Losses, gradients and parameters of some steps."""
    # Not foreach, the default on a GPU: torch refuses plain tensors, such as ignored parameters, beside DTensors in it.
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False)
    seen = []
    for step in range(steps):
        loss = (run or model)(rows(step)).float().square().mean()
        loss.backward()
        seen.append((loss.detach(), gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: full(param.detach()) for name, param in model.named_parameters()}


def kinds(model):
    return {
        name: (isinstance(p, DTensor), tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()
    }


# --- programs ---------------------------------------------------------------------------------------------------------


class EncodesAndDecodes(nn.Module):
    """Without a forward: encode and decode are what is called."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 5), nn.Linear(5, 4)

    def encode(self, x, scale=1.0):
        return torch.relu(self.encoder(x)) * scale

    def decode(self, z):
        return self.decoder(z)

    def cycle(self, x):
        return self.decode(self.encode(x, scale=2.0))


def methods_without_a_forward(api):
    model = EncodesAndDecodes()
    api.fully_shard(model.encoder)
    api.fully_shard(model)
    for name in ("encode", "decode", "cycle"):
        api.register_fsdp_forward_method(model, name)
    seen = [train(model, run=lambda x: model.decode(model.encode(x)))]
    # Decoding first, then encoding; and a method that calls both.
    seen.append(train(model, run=lambda x: model.encode(model.decode(torch.cat([x, x[:, :1]], dim=1)))))
    seen.append(train(model, run=lambda x: model.decode(torch.cat([x, x[:, :1]], dim=1)), steps=1))
    return seen


def a_method_that_calls_registered_methods(api):
    model = EncodesAndDecodes()
    api.fully_shard(model)
    for name in ("cycle", "decode", "encode"):
        api.register_fsdp_forward_method(model, name)
    return train(model, run=model.cycle)


def torchs_mixed_precision_policy(api):
    model = Stack()
    policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        api.fully_shard(block, mp_policy=policy)
    api.fully_shard(model, mp_policy=dataclasses.replace(policy, output_dtype=torch.float32))
    return train(model), str(model(rows(0)).dtype)


def torchs_offload_policies(api):
    seen = []
    for policy in (torch_fsdp.OffloadPolicy(), torch_fsdp.CPUOffloadPolicy(pin_memory=False)):
        seen.append(train(shard(api, offload_policy=policy)))
    return seen


# Arguments of fully_shard.


def mesh_of_two_axes(api):
    mesh = two_axes("replicate", "shard")
    model = shard(api, mesh=mesh)
    return [tuple(map(str, p.placements)) for p in model.parameters()], train(model)


def reshard_after_forward(api):
    seen = []
    for choice in (True, False, None, 1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = shard(api, reshard_after_forward=choice)
        loss = model(rows(0)).sum()
        # shardwise's root keeps its parameters whatever is passed: backward begins with them.
        seen.append((choice, kinds(model.blocks)))
        loss.backward()
        seen.append((kinds(model), train(model)))
    return seen


def has_even_columns(param):
    # torch refuses the others.
    return param.dim() == 2 and param.shape[1] % dist.get_world_size() == 0


def shard_placement_fn(api):
    model = shard(api, shard_placement_fn=lambda p: Shard(1) if has_even_columns(p) else None)
    return [tuple(map(str, p.placements)) for p in model.parameters()], train(model)


def shard_placement_fn_counts_dims_from_the_end(api):
    model = shard(api, shard_placement_fn=lambda p: Shard(-1) if has_even_columns(p) else None)
    return [tuple(p.to_local().shape) for p in model.parameters()], train(model)


def ignored_params(api):
    model = Stack()
    ignored = {model.head.weight, *model.blocks[0].second.parameters()}
    model = shard(api, model, ignored_params=ignored)
    return kinds(model), train(model)


def dp_mesh_dims(api):
    mesh = api.mesh_of_dp_and_tp
    model = Stack()
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(param.detach(), mesh, [Replicate(), Replicate()])
            module.register_parameter(name, nn.Parameter(placed))
    dims = torch_fsdp.DataParallelMeshDims(shard="dp")
    shard(api, model, mesh=mesh, dp_mesh_dims=dims)
    x = distribute_tensor(torch.ones(2, 4), mesh, [Replicate(), Replicate()])
    with implicit_replication():
        model(x).sum().backward()
    return [tuple(map(str, p.placements)) for p in model.parameters()], gradients(model)


def dp_mesh_dims_that_only_replicate(api):
    mesh = api.mesh_of_dp_and_tp
    model = Stack()
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(param.detach(), mesh, [Replicate(), Replicate()])
            module.register_parameter(name, nn.Parameter(placed))
    shard(api, model, mesh=mesh, dp_mesh_dims=torch_fsdp.DataParallelMeshDims(replicate="dp"))
    x = DTensor.from_local(rows(0), mesh, [Replicate(), Replicate()])
    with implicit_replication():
        model(x).sum().backward()
    return [tuple(map(str, p.placements)) for p in model.parameters()], [
        p.grad.to_local() for p in model.parameters()
    ]


def a_list_of_modules(api):
    model = Stack()
    api.fully_shard([model.blocks[0], model.blocks[1]])
    api.fully_shard([model.embed, model.head])
    returned = api.fully_shard(model)
    return returned is model, kinds(model), train(model)


def a_list_with_a_module_and_its_part(api):
    model = Stack()
    api.fully_shard([model, model.head])
    return isinstance(model.head, api.FSDPModule), kinds(model), train(model)


def names_classes_and_state_dicts(api):
    model = Stack()
    before = list(model.state_dict())
    shard(api, model)
    state = model.state_dict()
    return (
        [type(module).__name__ for module in model.modules()],
        isinstance(model, api.FSDPModule),
        isinstance(model.head, api.FSDPModule),
        list(state) == before,
        [isinstance(value, DTensor) for value in state.values()],
        type(model.blocks[:1]).__name__,
    )


def mixed_precision_policy(api):
    seen = []
    for casts in (True, False):
        policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, casts)
        model = api.fully_shard(Block(), mp_policy=policy)
        out = model(rows(0, 6).to(torch.float32 if casts else torch.bfloat16))
        out.sum().backward()
        seen.append((str(out.dtype), kinds(model), gradients(model)))
    return seen


# Methods.


def unshard_and_reshard(api):
    model = shard(api)
    seen = [model.unshard(), kinds(model), [full(p.detach()).clone() for p in model.head.parameters()]]
    seen += [model.reshard(), kinds(model)]
    handle = model.blocks[0].unshard(async_op=True)
    seen += [handle.wait(), kinds(model), handle.wait()]
    model.blocks[0].reshard()
    return seen, train(model)


def unshard_without_parameters(api):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for linear in model:
        api.fully_shard(linear)
    api.fully_shard(model)
    handle = model.unshard(async_op=True)
    handle.wait()
    return kinds(model)


def set_is_last_backward(api):
    model = shard(api)
    loss = model(rows(0)).sum()
    model.set_is_last_backward(False)
    loss.backward(retain_graph=True)
    model.set_is_last_backward(True)
    loss.backward()
    return gradients(model)


def set_requires_gradient_sync(api):
    model = shard(api)
    model.set_requires_gradient_sync(False)
    model(rows(0)).sum().backward()
    seen = [{name: p.grad is None for name, p in model.named_parameters()}]
    model.set_requires_gradient_sync(True)
    model(rows(1)).sum().backward()
    seen.append(gradients(model))
    model.blocks[0].set_requires_gradient_sync(False, recurse=False)
    model(rows(2)).sum().backward()
    model.set_requires_gradient_sync(True, recurse=True)
    model(rows(3)).sum().backward()
    return [*seen, gradients(model)]


def set_requires_all_reduce(api):
    mesh = two_axes("replicate", "shard")
    model = shard(api, mesh=mesh)
    model.set_requires_all_reduce(False, recurse=True)
    model(rows(0)).sum().backward()
    model.set_requires_all_reduce(True)
    model(rows(1)).sum().backward()
    return gradients(model)


def set_reshard_after_forward(api):
    seen = []
    for value, recurse in ((True, True), (False, True), (True, False)):
        model = shard(api)
        model.set_reshard_after_forward(value, recurse=recurse)
        loss = model(rows(0)).sum()
        seen.append(kinds(model))
        loss.backward()
        seen.append(gradients(model))
    return seen


def set_reshard_after_backward(api):
    seen = []
    for recurse in (True, False):
        model = shard(api)
        model.set_reshard_after_backward(False, recurse=recurse)
        model(rows(0)).sum().backward()
        # shardwise keeps the memory, and shows the shards, which optimizers and clipping want.
        seen.append({name: shape for name, (_, shape, _) in kinds(model).items()})
        model.set_reshard_after_backward(True)
        model(rows(0)).sum().backward()
        seen.append((kinds(model), gradients(model)))
    return seen


def set_modules_to_prefetch(api):
    model = shard(api)
    model.set_modules_to_forward_prefetch(list(model.blocks))
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    return train(model)


def set_divide_factors(api):
    seen = []
    for factor in (1.0, 2.0, 3.0):
        model = shard(api)
        for module in (model, *model.blocks):
            # torch needs this with gloo.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(factor)
        model(rows(0)).sum().backward()
        seen.append(gradients(model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.set_reduce_scatter_divide_factor(4.0)
    model(rows(1)).sum().backward()
    return seen, [warning.category.__name__ for warning in caught], gradients(model)


def set_force_sum_reduction_for_comms(api):
    model = shard(api)
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    return train(model)


def set_all_reduce_hook(api):
    seen = []

    def hook(reduced):
        seen.append(reduced.numel())
        reduced.mul_(2.0)

    model = api.fully_shard(Block(), mesh=api.mesh)
    model.set_all_reduce_hook(hook)
    model(rows(0, 6)).sum().backward()
    return len(seen), gradients(model)


def set_reduce_scatter_unused_params(api):
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            return self.parts[dist.get_rank() % 2](x)

    model = api.fully_shard(Chooses())
    model.set_reduce_scatter_unused_params(True, recurse=True)
    return train(model)


def settings_of_collectives(api):
    model = shard(api)
    model.set_reduce_scatter_max_input_buffers(2, recurse=True)
    model.set_separate_reduce_scatter_group(True, recurse=True)
    seen = train(model)
    model.set_separate_reduce_scatter_group(False)
    for module in (model, *model.blocks):
        module.set_allocate_memory_from_process_group_for_comm(False)
    return seen, train(model)


def set_unshard_in_backward(api):
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 3))
    api.fully_shard(model[0]).set_unshard_in_backward(False)
    api.fully_shard(model)
    model(torch.arange(5) + dist.get_rank()).square().sum().backward()
    return gradients(model)


class Collective:
    def __init__(self):
        self.calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)


class Gathers(Collective):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatters(Collective):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def custom_collectives(api):
    model = api.fully_shard(Block(), mesh=api.mesh)
    gathers, scatters = Gathers(), Scatters()
    model.set_custom_all_gather(gathers)
    model.set_custom_reduce_scatter(scatters)
    seen = train(model, run=lambda x: model(torch.cat([x, x[:, :2]], dim=1)))
    return seen, gathers.calls, scatters.calls


def reset_iter_state(api):
    class Fails(Block):
        fails = True

        def forward(self, x):
            x = super().forward(x)
            if self.fails:
                raise KeyError("on purpose")
            return x

    model = Stack()
    model.blocks[1] = Fails()
    shard(api, model)
    with pytest.raises(KeyError):
        model(rows(0))
    model.reset_iter_state()
    model.blocks[1].fails = False
    return kinds(model), train(model)


def share_comm_ctx(api):
    chunks = [api.fully_shard(Block()), api.fully_shard(Block())]
    api.share_comm_ctx([])
    api.share_comm_ctx(chunks)
    chunks[1](chunks[0](rows(0, 6))).square().sum().backward()
    return [gradients(chunk) for chunk in chunks]


def to_and_apply(api):
    model = shard(api)
    model.to(torch.float64).float()
    model.apply(lambda module: None)
    model.requires_grad_(True)
    return kinds(model), train(model)


def functional_calls_with_its_own_values(api):
    seen = []
    for is_strict in (False, True):
        model = shard(api)
        for step in range(2):
            values = dict(model.named_parameters())
            output = torch.func.functional_call(model, values, (rows(step),), strict=is_strict)
            output.sum().backward()
            seen.append((output.detach(), gradients(model)))
        seen.append(train(model))
    return seen


def the_default_mesh(api):
    model = api.without_a_mesh(Stack())
    mesh = model.head.weight.device_mesh
    return mesh.device_type, mesh.ndim, [param.device.type for param in model.parameters()], train(model)


def shallow_copies(api):
    model = shard(api)
    model.blocks[0] = copy.copy(model.blocks[0])
    seen = [train(model)]
    copied = copy.copy(model)
    seen += [train(copied), train(model), list(copied.state_dict()), copied.head is model.head]
    copied(rows(0)).sum().backward()
    return [*seen, gradients(copied), gradients(model)]


def loading_a_state_dict(api):
    model, other = shard(api), shard(api)
    other.load_state_dict(model.state_dict())
    seen = [str(other.load_state_dict(model.state_dict(), strict=True))]
    other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return seen, train(model), train(other)


# Tensor subclasses.


class Pair(TwoTensor):
    """Two inner tensors, which must agree in storage offset; both are sent."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        if out is None:
            return Pair(*outputs).to(param_dtype), outputs
        for inner, output in zip((out.a, out.b), outputs, strict=True):
            if output.dtype == param_dtype:
                assert inner.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
            else:
                inner.copy_(output)
        return None


def inner(tensor):
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.a if isinstance(tensor, TwoTensor) else tensor


def tensor_subclasses(api):
    seen = []
    for options in (
        {},
        {"reshard_after_forward": dist.get_world_size()},
        {"mp_policy": api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    ):
        model = Stack(8)  # torch's subclasses must divide
        for block in model.blocks:
            weight = block.first.weight.detach()
            block.first.weight = nn.Parameter(Pair(weight.clone(), weight.clone()))
        shard(api, model, **options)
        for step in range(2):
            loss = model(rows(step)).float().square().mean()
            loss.backward()
            seen.append(inner(loss.detach()))
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
                    param.grad = None
        seen.append([inner(param.detach()).clone() for param in model.parameters()])
    return seen


# What a program uses that an older torch lacks.
USES = {
    dp_mesh_dims: "DataParallelMeshDims",
    dp_mesh_dims_that_only_replicate: "DataParallelMeshDims",
    reset_iter_state: "FSDPModule.reset_iter_state",
    set_reduce_scatter_unused_params: "FSDPModule.set_reduce_scatter_unused_params",
    settings_of_collectives: "FSDPModule.set_reduce_scatter_max_input_buffers",
    share_comm_ctx: "share_comm_ctx",
}


def where_torch_has_it(programs, uses):
    """The programs as parameters of a test, skipped where torch lacks what they use."""
    for program in programs:
        value = torch_fsdp
        for part in filter(None, uses.get(program, "").split(".")):
            value = getattr(value, part, None)
        lacking = pytest.mark.skipif(value is None, reason="this torch lacks it")
        yield pytest.param(program, marks=lacking, id=program.__name__)


PROGRAMS = [
    methods_without_a_forward,
    a_method_that_calls_registered_methods,
    torchs_mixed_precision_policy,
    torchs_offload_policies,
    mesh_of_two_axes,
    reshard_after_forward,
    shard_placement_fn,
    shard_placement_fn_counts_dims_from_the_end,
    ignored_params,
    dp_mesh_dims,
    dp_mesh_dims_that_only_replicate,
    a_list_of_modules,
    a_list_with_a_module_and_its_part,
    names_classes_and_state_dicts,
    mixed_precision_policy,
    unshard_and_reshard,
    unshard_without_parameters,
    set_is_last_backward,
    set_requires_gradient_sync,
    set_requires_all_reduce,
    set_reshard_after_forward,
    set_reshard_after_backward,
    set_modules_to_prefetch,
    set_divide_factors,
    set_force_sum_reduction_for_comms,
    set_all_reduce_hook,
    set_reduce_scatter_unused_params,
    settings_of_collectives,
    set_unshard_in_backward,
    custom_collectives,
    reset_iter_state,
    share_comm_ctx,
    to_and_apply,
    tensor_subclasses,
    loading_a_state_dict,
    shallow_copies,
    the_default_mesh,
    functional_calls_with_its_own_values,
]


def here(programs, uses):
    """The programs that this version of torch has everything for."""
    return [each.values[0] for each in where_torch_has_it(programs, uses) if not each.marks[0].args[0]]


def all_programs(programs, check):
    """What goes wrong in all programs, one after another on the same ranks."""
    mesh = shared_mesh()
    return failures((partial(check, program, mesh), program.__name__) for program in programs)


@pytest.mark.parametrize("program", [*where_torch_has_it(PROGRAMS, USES)])
def test_a_program_gives_what_it_gives_with_torch(program):
    run_ranks(both, 2, program, kind="gloo")


# --- misuse -----------------------------------------------------------------------------------------------------------


def sharded_twice(api):
    model = shard(api)
    api.fully_shard(model)


def sharded_twice_in_a_list(api):
    model = shard(api)
    api.fully_shard([model.head, model.blocks[0]])


def a_module_list(api):
    api.fully_shard(nn.ModuleList([nn.Linear(2, 2)]))


def a_module_dict(api):
    api.fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)}))


def no_module(api):
    api.fully_shard(3)


def mesh_of_three_axes(api):
    api.fully_shard(Block(), mesh=init_device_mesh(device().type, (dist.get_world_size(), 1, 1)))


def reshards_to_a_number_that_does_not_divide(api):
    api.fully_shard(Block(), reshard_after_forward=3)


def reshards_to_zero(api):
    api.fully_shard(Block(), reshard_after_forward=0)


def reshards_to_a_word(api):
    api.fully_shard(Block(), reshard_after_forward="yes")


def set_reshard_after_forward_to_an_int(api):
    shard(api).set_reshard_after_forward(2)


def a_scalar(api):
    model = Block()
    model.scale = nn.Parameter(torch.tensor(1.0))
    api.fully_shard(model)


def placed_on_a_dim_too_many(api):
    api.fully_shard(Block(), shard_placement_fn=lambda p: Shard(2))


def placed_before_the_first_dim(api):
    api.fully_shard(Block(), shard_placement_fn=lambda p: Shard(-3))


def placed_as_a_replica(api):
    api.fully_shard(Block(), shard_placement_fn=lambda p: Replicate())


def placed_by_a_number(api):
    api.fully_shard(Block(), shard_placement_fn=lambda p: 1)


def copied(api):
    copy.deepcopy(shard(api))


def part_copied(api):
    copy.deepcopy(shard(api).blocks[0])


def prefetches_a_plain_module(api):
    model = shard(api)
    model.set_modules_to_forward_prefetch([model.head])


def prefetches_a_plain_module_in_backward(api):
    model = shard(api)
    model.set_modules_to_backward_prefetch([model.head])


def group_memory_after_a_custom_gather(api):
    model = api.fully_shard(Block())
    model.set_custom_all_gather(Gathers())
    model.set_allocate_memory_from_process_group_for_comm(True)


def group_memory_after_a_custom_reduce(api):
    model = api.fully_shard(Block())
    model.set_custom_reduce_scatter(Scatters())
    model.set_allocate_memory_from_process_group_for_comm(True)


def symmetric_memory_after_a_custom_gather(api):
    model = api.fully_shard(Block())
    model.set_custom_all_gather(Gathers())
    model.set_symm_mem_for_comm()


def forward_on_meta(api):
    with torch.device("meta"):
        model = Block()
    api.fully_shard(model)
    model(rows(0, 6))


def unshard_on_meta(api):
    with torch.device("meta"):
        model = Block()
    api.fully_shard(model)
    model.unshard()


def registers_a_missing_method(api):
    api.register_fsdp_forward_method(shard(api), "encode")


def shares_with_a_plain_module(api):
    api.share_comm_ctx([shard(api), nn.Linear(2, 2)])


def names_no_axis(api):
    api.DataParallelMeshDims()


def names_an_unknown_axis(api):
    dims = api.DataParallelMeshDims(shard="data")
    api.fully_shard(Block(), mesh=api.mesh_of_dp_and_tp, dp_mesh_dims=dims)


def names_an_axis_of_a_mesh_without_names(api):
    api.fully_shard(Block(), mesh=api.mesh, dp_mesh_dims=api.DataParallelMeshDims(shard="dp"))


def placed_on_the_axis_that_shards(api):
    model, mesh = nn.Linear(4, 4, bias=False), api.mesh_of_dp_and_tp
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0), Replicate()]))
    api.fully_shard(model, mesh=mesh, dp_mesh_dims=api.DataParallelMeshDims(shard="dp"))


def hook_stream_with_replicas(api):
    mesh = two_axes("replicate", "shard")
    api.fully_shard(Block(), mesh=mesh).set_all_reduce_hook(lambda reduced: None, stream=object())


def no_input_buffers(api):
    shard(api).set_reduce_scatter_max_input_buffers(0)


def input_buffers_as_a_bool(api):
    shard(api).set_reduce_scatter_max_input_buffers(True)


class Extended(torch.Tensor):
    """A tensor subclass that computes as its one inner tensor does."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"{type(self).__name__}({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda tensor: tensor.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


class HalfAnExtension(Extended):
    def fsdp_pre_all_gather(self, mesh):
        return (self.inner,), None


class OddExtension(HalfAnExtension):
    def fsdp_pre_all_gather(self, mesh, size):
        return (self.inner,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return outputs[0], outputs


def extended(api, kind):
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(kind(model.weight.detach()))
    api.fully_shard(model)
    model(rows(0))


def an_extension_without_its_second_half(api):
    extended(api, HalfAnExtension)


def an_extension_of_another_signature(api):
    extended(api, OddExtension)


MISUSES_USE = {
    names_no_axis: "DataParallelMeshDims",
    names_an_unknown_axis: "DataParallelMeshDims",
    names_an_axis_of_a_mesh_without_names: "DataParallelMeshDims",
    placed_on_the_axis_that_shards: "DataParallelMeshDims",
    symmetric_memory_after_a_custom_gather: "FSDPModule.set_symm_mem_for_comm",
    no_input_buffers: "FSDPModule.set_reduce_scatter_max_input_buffers",
    input_buffers_as_a_bool: "FSDPModule.set_reduce_scatter_max_input_buffers",
    shares_with_a_plain_module: "share_comm_ctx",
}
MISUSES = [
    sharded_twice,
    sharded_twice_in_a_list,
    a_module_list,
    a_module_dict,
    no_module,
    mesh_of_three_axes,
    reshards_to_a_number_that_does_not_divide,
    reshards_to_zero,
    reshards_to_a_word,
    set_reshard_after_forward_to_an_int,
    a_scalar,
    placed_on_a_dim_too_many,
    placed_before_the_first_dim,
    placed_as_a_replica,
    placed_by_a_number,
    copied,
    part_copied,
    prefetches_a_plain_module,
    prefetches_a_plain_module_in_backward,
    group_memory_after_a_custom_gather,
    group_memory_after_a_custom_reduce,
    symmetric_memory_after_a_custom_gather,
    forward_on_meta,
    unshard_on_meta,
    registers_a_missing_method,
    shares_with_a_plain_module,
    names_no_axis,
    names_an_unknown_axis,
    names_an_axis_of_a_mesh_without_names,
    placed_on_the_axis_that_shards,
    hook_stream_with_replicas,
    no_input_buffers,
    input_buffers_as_a_bool,
    an_extension_without_its_second_half,
    an_extension_of_another_signature,
]


@pytest.mark.parametrize("program", [*where_torch_has_it(MISUSES, MISUSES_USE)])
def test_a_misuse_raises_an_error_of_the_kind_that_torch_raises(program):
    run_ranks(both_raise, 2, program, kind="gloo")


# --- what modules show ------------------------------------------------------------------------------------------------


def what_modules_show(api):
    """Whether the outermost module's own weight, and a block's, are shards; where torch and ours may differ."""
    seen = {}

    def look(model, moment):
        weights = model.embed.weight, model.blocks[0].first.weight
        seen[moment] = [isinstance(weight, DTensor) for weight in weights]

    for reshards in (None, True, False):
        model = Stack()
        for block in model.blocks:
            api.fully_shard(block, reshard_after_forward=reshards)
        api.fully_shard(model, reshard_after_forward=reshards)
        look(model, f"{reshards}: at first")
        output = model(rows(0))
        look(model, f"{reshards}: after forward")
        output.sum().backward()
        look(model, f"{reshards}: after backward")
        with torch.no_grad():
            model(rows(0))
        look(model, f"{reshards}: after a forward without gradients")
        moment = f"{reshards}: in a hook of a block"
        hook = model.blocks[0].register_forward_hook(lambda *_: look(model, moment))  # noqa: B023
        model(rows(0))
        hook.remove()
    return seen


def modules_show_the_same_but():
    spmd = shared_mesh()
    ours, theirs = (outcome(what_modules_show, api_of(library, spmd)) for library in (shardwise, torch_fsdp))
    assert {moment: (ours[moment], found) for moment, found in theirs.items() if ours[moment] != found} == {
        # What is kept after a forward is kept for a backward; and the outermost module's is, whatever is passed.
        "None: after a forward without gradients": ([True, True], [False, True]),
        "False: after a forward without gradients": ([True, True], [False, False]),
        "True: after forward": ([False, True], [True, True]),
        # The hook was registered after the module had been sharded.
        "None: in a hook of a block": ([False, False], [False, True]),
        "True: in a hook of a block": ([False, False], [False, True]),
    }


def test_modules_show_shards_and_full_parameters_when_torchs_do_with_these_exceptions():
    run_ranks(modules_show_the_same_but, 2, kind="gloo")
