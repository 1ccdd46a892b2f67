"""The wrapper beside torch's, check by check in the same processes: values, kinds of errors, and whether they warn.

A check gets one of the two libraries and returns what is to be the same. Where ours deliberately does more than torch,
another file tests it.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import warnings
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.testing import run_ranks
from tests.ranks.side_by_side import device, same, two_axes


def library(source, *more):
    names = {
        name: getattr(each, name)
        for each in (source, *more)
        for name in dir(each)
        if not name.startswith("__")
    }
    fsdp = source.FullyShardedDataParallel

    def make(module, **options):
        return fsdp(module, **{"device_id": device(), **options})

    return SimpleNamespace(**{**names, "FSDP": fsdp, "make": make})


def libraries():
    import torch.distributed.fsdp as torch_fsdp
    from torch.distributed.fsdp import sharded_grad_scaler as torch_scaler
    from torch.distributed.fsdp import wrap as torch_wrap

    return library(torch_fsdp, torch_wrap, torch_scaler), library(shardwise)


# --- models ---------------------------------------------------------------------------------------------------------


def net():
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), inner, nn.Linear(8, 4))


def nested(lib, **options):
    model = net()
    model[2][0] = lib.make(model[2][0], **options)
    model[2] = lib.make(model[2], **options)
    return lib.make(model, **options)


def normed():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def step(model, x=None):
    output = model(torch.ones(2, 4) if x is None else x)
    output.float().sum().backward()
    return output


def wrappers(lib, model):
    return lib.FSDP.fsdp_modules(model)


def dtypes(model):
    return [(param.dtype, param.grad.dtype) for param in model.parameters()]


def to_bf16(lib, **options):
    return lib.MixedPrecision(**{"param_dtype": torch.bfloat16, **options})


def on_linear(lib):
    return lib.ModuleWrapPolicy({nn.Linear})


# --- what is wrapped ------------------------------------------------------------------------------------------------


def an_ignored_module(lib):
    model = net()
    wrapped = lib.make(model, ignored_modules=[model])
    step(wrapped)
    return [(tuple(param.shape), param.grad is not None) for param in wrapped.parameters()]


def an_ignored_wrapper(lib):
    model = net()
    model[2] = lib.make(model[2])
    lib.make(model, ignored_modules=[model[2]])


def ignored_modules_and_parameters(lib):
    model = net()
    lib.make(model, ignored_states=[model[0], model[3].weight])


def an_ignored_number(lib):
    lib.make(net(), ignored_states=3)


def a_mesh_of_two_axes(lib):
    model = lib.make(net(), device_mesh=two_axes())
    step(model)
    return model.sharding_strategy.name, model.world_size, round(float(model.clip_grad_norm_(1e9)), 4)


def names_of_flat_parameters(lib):
    model = nested(lib)
    inside = [name for name, _ in model.module.named_parameters()]
    with lib.FSDP.summon_full_params(model):
        summoned = [name for name, _ in model.named_parameters()]
    return [name for name, _ in model.named_parameters()], inside, summoned


def names_of_buffers(lib):
    return [
        name for name, _ in lib.make(nn.Sequential(normed()), auto_wrap_policy=on_linear(lib)).named_buffers()
    ]


def options_that_are_changed(lib):
    precision, offload = lib.MixedPrecision(), lib.CPUOffload()
    precision.param_dtype, offload.offload_params = torch.bfloat16, False
    return step(lib.make(net(), mixed_precision=precision, cpu_offload=offload)).dtype


def a_list(lib):
    return type(lib.make(nn.ModuleList([nn.Linear(4, 4)]))[0]).__name__


def a_dict(lib):
    return list(lib.make(nn.ModuleDict({"a": nn.Linear(4, 4)})).state_dict())


def a_list_that_a_policy_chooses(lib):
    model = nn.Sequential(nn.Linear(4, 4))
    model.more = nn.ModuleList([nn.Linear(4, 4)])
    return type(lib.make(model, auto_wrap_policy=lib.ModuleWrapPolicy({nn.ModuleList})).more).__name__


def options_of_a_policy_that_are_empty(lib):
    policy = lib.CustomPolicy(lambda module: {} if isinstance(module, nn.Linear) else module is not None)
    return len(wrappers(lib, lib.make(net(), auto_wrap_policy=policy)))


def options_of_a_policy_that_are_unknown(lib):
    policy = lib.CustomPolicy(lambda module: {"speed": 1} if isinstance(module, nn.Linear) else False)
    lib.make(net(), auto_wrap_policy=policy)


def a_wrapper_in_a_wrapper(lib):
    model = lib.make(lib.make(net()))
    step(model)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    return len(wrappers(lib, model)), len(list(model.parameters())), shapes


def a_module_that_is_wrapped_again(lib):
    model = nn.Sequential(lib.make(nn.Linear(4, 4)))
    once, again = lib.make(model), lib.make(model)
    return torch.equal(once(torch.ones(2, 4)), again(torch.ones(2, 4)))


def a_single_rank(lib):
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return lib.make(net(), process_group=alone).sharding_strategy.name


def a_param_init_fn_that_is_no_function(lib):
    with torch.device("meta"):
        model = net()
    lib.make(model, param_init_fn=3)


def the_modules_that_param_init_fn_gets(lib):
    with torch.device("meta"):
        model = net()
    seen = []

    def init(module):
        seen.append(type(module).__name__)
        module.to_empty(device=device(), recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.ones_(param)

    return float(lib.make(model, param_init_fn=init).state_dict()["0.weight"].sum()), seen


def the_module_in_an_activation_checkpoint(lib):
    model = net()
    return lib.make(checkpoint_wrapper(model)).module is model


def a_shallow_copy(lib):
    model = nested(lib)
    step(model)
    copied = copy.copy(model)
    torch.optim.SGD(copied.parameters(), 0.1).step()
    both = step(copied).detach(), step(model).detach()
    return type(copied).__name__, copied.module is model.module, both, sums_of(copied), sums_of(model)


def a_pickled_wrapper(lib):
    pickle.dumps(nested(lib))


# --- attributes -----------------------------------------------------------------------------------------------------


def attributes(lib):
    found = []
    for orig in (False, True):
        for each in wrappers(lib, nested(lib, use_orig_params=orig)):
            handle, flat = each._handle, each._flat_param
            marked = [getattr(param, "_fsdp_flattened", False) for param in each.parameters()]
            found.append(
                (each._has_params, list(flat._fqns), len(each.params), handle._orig_param_dtype, marked)
            )
            found.append((each.limit_all_gathers, each._use_orig_params, each.training_state.name))
    bare = lib.make(nn.Sequential(lib.make(nn.Linear(4, 4))))
    return found, bare._has_params, bare._flat_param, bare._handle, list(bare.params)


def the_state_when_summoned(lib):
    model = nested(lib)
    with lib.FSDP.summon_full_params(model):
        return [each.training_state.name for each in wrappers(lib, model)]


def weights_stored_wider_after_wrapping(lib):
    # As accelerate does where 16-bit weights are trained with mixed precision.
    found = []
    for orig in (False, True):
        model = net().bfloat16()
        model[2] = lib.make(model[2], use_orig_params=orig, mixed_precision=to_bf16(lib))
        model = lib.make(model, use_orig_params=orig, mixed_precision=to_bf16(lib))
        for each in wrappers(lib, model):
            param = each._flat_param
            param.data = param.data.to(torch.float32)
            each._handle._orig_param_dtype = torch.float32
        step(model)
        found.append(
            (sorted({param.dtype for param in model.parameters()}, key=str), model[0].weight.dtype.itemsize)
        )
    return [kinds for kinds, _ in found]


def the_defaults_of_the_size_policy(lib):
    policy = lib.size_based_auto_wrap_policy
    return policy.EXCLUDE_WRAP_MODULES, policy.FORCE_LEAF_MODULES


def groups_of_a_hybrid_strategy(lib):
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    world = dist.group.WORLD
    model = lib.make(net(), sharding_strategy=lib.ShardingStrategy.HYBRID_SHARD, process_group=(world, alone))
    return model.process_group is world, model._inter_node_pg is alone, model._device_mesh


class ReadsItsParameters(nn.Module):
    """Casts to the dtype of its first parameter, and adds a penalty over all of them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.dtype = next(self.parameters()).dtype
        self.numel = sum(param.numel() for param in self.parameters())
        return self.linear(x.to(self.dtype)).sum() + sum(param.square().sum() for param in self.parameters())


def parameters_in_forward(lib):
    found = []
    for orig in (False, True):
        for precision in (None, to_bf16(lib)):
            model = lib.make(ReadsItsParameters(), use_orig_params=orig, mixed_precision=precision)
            loss = step(model)
            torch.optim.SGD(model.parameters(), 0.1).step()
            found.append((model.module.dtype, model.module.numel, loss.detach(), sums_of(model)))
    return found


def parameters_between_passes(lib):
    found = []
    for strategy in (lib.ShardingStrategy.FULL_SHARD, lib.ShardingStrategy.SHARD_GRAD_OP):
        model = nested(lib, sharding_strategy=strategy)
        output = model(torch.ones(2, 4))
        found.append([name for name, _ in model.named_parameters()])
        output.sum().backward()
        found.append([name for name, _ in model.named_parameters()])
    return found


# --- methods --------------------------------------------------------------------------------------------------------


def norms(lib):
    model = nested(lib)
    step(model)
    kinds = ((1, 2), (0.5, math.inf), (1.0, 1), (2, "inf"), (2, 3.5))
    return [round(float(model.clip_grad_norm_(*kind)), 4) for kind in kinds]


def a_norm_without_gradients(lib):
    return float(nested(lib).clip_grad_norm_(1.0))


def a_norm_of_an_inner_wrapper_that_is_alone(lib):
    return float(nested(lib).module[2].clip_grad_norm_(1.0))


def a_norm_of_an_inner_wrapper(lib):
    model = nested(lib)
    step(model)
    model.module[2].clip_grad_norm_(1.0)


def average(state, gradients, own):
    gradients = gradients.clone()
    dist.all_reduce(gradients)
    own.copy_(gradients.view(state, -1)[dist.get_rank()] / state)


def a_hook(lib):
    model = nested(lib)
    before = [each._comm_hook for each in wrappers(lib, model)]
    model.register_comm_hook(dist.get_world_size(), average)
    step(model)
    found = [(each._comm_hook is average, each._comm_hook_state) for each in wrappers(lib, model)]
    return before, found, round(float(model.clip_grad_norm_(1e9)), 4)


def a_hook_of_a_single_rank(lib):
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = lib.make(net(), process_group=alone)
    model.register_comm_hook(3, lambda state, gradients: gradients.mul_(state))
    step(model)
    return round(float(model.clip_grad_norm_(1e9)), 4)


def a_hook_of_an_inner_wrapper(lib):
    model = nested(lib)
    assert model.check_is_root()
    model.module[2].register_comm_hook(dist.get_world_size(), average)


def a_hook_of_an_inner_wrapper_that_is_alone(lib):
    nested(lib).module[2].register_comm_hook(dist.get_world_size(), average)


def a_second_hook(lib):
    model = nested(lib)
    model.register_comm_hook(dist.get_world_size(), average)
    model.register_comm_hook(dist.get_world_size(), average)


def a_hook_that_is_no_function(lib):
    nested(lib).register_comm_hook(None, 3)


def a_hook_with_a_hybrid_strategy(lib):
    mesh = init_device_mesh(device().type, (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    model = lib.make(net(), sharding_strategy=lib.ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    model.register_comm_hook(dist.get_world_size(), average)


def apply_when_summoned(lib):
    model = lib.make(net())
    with open(os.devnull, "w") as nowhere, quiet(nowhere), lib.FSDP.summon_full_params(model):
        model.apply(lambda module: None)


@contextmanager
def quiet(nowhere):
    # torch prints a stack before it raises.
    import contextlib

    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def apply_to_an_inner_wrapper(lib):
    seen = []
    nested(lib).module[2].apply(
        lambda module: seen.append([tuple(p.shape) for p in module._parameters.values() if p is not None])
    )
    return seen


def summoned_twice(lib):
    model = nested(lib)
    with lib.FSDP.summon_full_params(model), lib.FSDP.summon_full_params(model):
        pass


def summoned_in_backward(lib):
    model = lib.make(net())
    output = model(torch.ones(2, 4))

    def summon(_gradient):
        with lib.FSDP.summon_full_params(model):
            pass

    output.register_hook(summon)
    output.sum().backward()


def summoned_on_one_rank_and_written_back(lib):
    with lib.FSDP.summon_full_params(nested(lib), rank0_only=True):
        pass


def copies_of_full_state_dicts(lib):
    model = nested(lib)
    found = []
    for config in (lib.FullStateDictConfig(), lib.FullStateDictConfig(offload_to_cpu=True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # torch's breaks on the CPU, after it has warned.
            kind = lib.StateDictType.FULL_STATE_DICT
            with lib.FSDP.state_dict_type(model, kind, config), suppress(RuntimeError):
                model.state_dict()
        found.append(any(each.category is UserWarning for each in caught))
    return found


def deprecated_input_of_an_optimizer(lib):
    model = lib.make(net())
    optimizer = torch.optim.Adam(model.parameters())
    step(model)
    optimizer.step()
    plain = net()
    named = lib.FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    key_type = lib.OptimStateKeyType.PARAM_ID
    inputs = list(plain.parameters())
    return sorted(lib.FSDP.rekey_optim_state_dict(named, key_type, plain, optim_input=inputs)["state"])


# --- gradients without sync -----------------------------------------------------------------------------------------


def shown_without_sync(lib):
    model = nested(lib, use_orig_params=True)
    with model.no_sync():
        step(model)
        once = [round(float(param.grad.sum()), 4) for param in model.parameters()]
        step(model)
    twice = [round(float(param.grad.sum()), 4) for param in model.parameters()]
    return once, twice, [tuple(param.grad.shape) for param in model.parameters()]


def shown_flat_without_sync(lib):
    model = nested(lib)
    with model.no_sync():
        step(model)
    return [round(float(param.grad.sum()), 4) for param in model.parameters()]


def an_inner_wrapper_alone_without_sync(lib):
    part = nested(lib).module[2]
    x = torch.ones(2, 8)
    with part.no_sync():
        step(part, x)
    step(part, x)
    torch.optim.SGD(part.parameters(), 0.1).step()
    return sums_of(part)


def changed_without_sync(lib):
    found = []
    for orig in (False, True):
        for change in (None, torch.Tensor.zero_, lambda gradient: gradient.mul_(3)):
            model = nested(lib, use_orig_params=orig)
            with model.no_sync():
                step(model)
            for param in model.parameters():
                if change is None:
                    param.grad = None
                else:
                    change(param.grad)
            step(model)
            found.append(round(float(model.clip_grad_norm_(1e9)), 3))
    return found


# --- optimizers in backward -----------------------------------------------------------------------------------------


def give_optimizers(params):
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.1}, register_hook=False)


def sums_of(model):
    return [round(float(value.sum()), 3) for value in model.state_dict().values()]


def optimizers_from_before_wrapping(lib):
    model = net()
    give_optimizers(model.parameters())
    model = lib.make(model, use_orig_params=True)
    with model.no_sync():
        step(model)
    step(model)
    return sums_of(model), [param.grad for param in model.parameters()]


def optimizers_from_after_wrapping(lib):
    model = nested(lib, use_orig_params=True)
    give_optimizers(model.parameters())
    step(model)
    step(model)
    return sums_of(model)


def optimizers_of_flat_parameters(lib):
    model = nested(lib)
    give_optimizers(model.parameters())
    step(model)


# --- precision ------------------------------------------------------------------------------------------------------


def half_after_wrapping(lib):
    found = []
    for orig in (False, True):
        for precision in (None, lib.MixedPrecision(reduce_dtype=torch.float32)):
            model = nested(lib, use_orig_params=orig, mixed_precision=precision).half()
            found.append(step(model, torch.ones(2, 4).half()).dtype)
            found.append({param.dtype for param in model.parameters()})
    return found


@contextmanager
def full_in_eval():
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    try:
        yield
    finally:
        del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]


class Buffered(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.seen = seen

    def forward(self, x):
        self.seen.append((x.dtype, self.linear.weight.dtype, self.scale.dtype))
        return self.linear(x) * self.scale


def dtypes_in_eval(lib):
    seen = []
    with full_in_eval():
        precision = to_bf16(lib, buffer_dtype=torch.bfloat16)
        inner = lib.make(Buffered(seen), mixed_precision=precision)
        model = lib.make(nn.Sequential(inner, Buffered(seen)), mixed_precision=precision)
    for is_training in (True, False, False, True):
        step(model.train(is_training))
    return seen, dtypes(model)


def gradients_in_eval(lib):
    with full_in_eval():
        model = nested(lib, mixed_precision=to_bf16(lib, reduce_dtype=torch.bfloat16))
    step(model)
    model.zero_grad()
    step(model.eval())
    return round(float(model.clip_grad_norm_(1e9)), 4)


def batch_norm_with_a_policy(lib):
    found = []
    policies = (on_linear(lib), lib.ModuleWrapPolicy({nn.Conv2d}), lib.size_based_auto_wrap_policy)
    for policy in policies:
        model = lib.make(normed(), mixed_precision=to_bf16(lib), auto_wrap_policy=policy)
        found.append((step(model).dtype, type(model.module[1]).__name__, model.module[1].running_mean.dtype))
        found.append([each.mixed_precision.param_dtype for each in wrappers(lib, model)])
    return found


CHECKS = [
    an_ignored_module,
    an_ignored_wrapper,
    ignored_modules_and_parameters,
    a_mesh_of_two_axes,
    an_ignored_number,
    names_of_flat_parameters,
    names_of_buffers,
    options_that_are_changed,
    a_list,
    a_dict,
    a_list_that_a_policy_chooses,
    options_of_a_policy_that_are_empty,
    options_of_a_policy_that_are_unknown,
    a_wrapper_in_a_wrapper,
    a_module_that_is_wrapped_again,
    a_single_rank,
    a_param_init_fn_that_is_no_function,
    the_modules_that_param_init_fn_gets,
    the_module_in_an_activation_checkpoint,
    a_shallow_copy,
    a_pickled_wrapper,
    attributes,
    the_state_when_summoned,
    weights_stored_wider_after_wrapping,
    the_defaults_of_the_size_policy,
    groups_of_a_hybrid_strategy,
    parameters_in_forward,
    parameters_between_passes,
    norms,
    a_norm_without_gradients,
    a_norm_of_an_inner_wrapper_that_is_alone,
    a_norm_of_an_inner_wrapper,
    a_hook,
    a_hook_of_a_single_rank,
    a_hook_of_an_inner_wrapper,
    a_hook_of_an_inner_wrapper_that_is_alone,
    a_second_hook,
    a_hook_that_is_no_function,
    a_hook_with_a_hybrid_strategy,
    apply_when_summoned,
    apply_to_an_inner_wrapper,
    summoned_twice,
    summoned_in_backward,
    summoned_on_one_rank_and_written_back,
    copies_of_full_state_dicts,
    deprecated_input_of_an_optimizer,
    shown_without_sync,
    shown_flat_without_sync,
    an_inner_wrapper_alone_without_sync,
    changed_without_sync,
    optimizers_from_before_wrapping,
    optimizers_from_after_wrapping,
    optimizers_of_flat_parameters,
    half_after_wrapping,
    dtypes_in_eval,
    gradients_in_eval,
    batch_norm_with_a_policy,
]


def outcome(check, lib):
    """The value or the builtin classes of the error, and whether the check warned."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = ("returned", check(lib))
        except Exception as error:  # noqa: BLE001  which one is what is compared
            builtin = {cls for cls in type(error).__mro__ if cls.__module__ == "builtins"}
            found = ("raised", builtin - {Exception, BaseException, object}, error)
    # Importing parts of torch warns, too, the first time; and autograd, of streams that torch's FSDP uses.
    of_the_check = (
        each
        for each in caught
        if not issubclass(each.category, DeprecationWarning) and "AccumulateGrad" not in str(each.message)
    )
    return found, any(of_the_check)


def beside_torch(checks, compares_warnings=True):
    theirs_lib, ours_lib = libraries()
    differences = []
    for check in checks:
        (theirs, they_warned), (ours, we_warned) = outcome(check, theirs_lib), outcome(check, ours_lib)
        if theirs[0] == "raised" == ours[0]:
            is_same = bool(theirs[1] & ours[1]) and "fix:" in str(ours[2])
        else:
            is_same = same(ours[:2], theirs[:2])
        if not is_same or (compares_warnings and they_warned and not we_warned):
            differences.append(
                f"{check.__name__}: torch {theirs}, warned {they_warned}; ours {ours}, {we_warned}"
            )
    return differences


def test_the_wrapper_does_what_torchs_does():
    for differences in run_ranks(beside_torch, 2, CHECKS, kind="gloo"):
        assert not differences, "\n".join(differences)


def what_modules_show(lib):
    """By strategy and ``use_orig_params``, the dims of an outer and an inner weight: 1 where it is this rank's part."""
    found = {}
    for strategy in (lib.ShardingStrategy.FULL_SHARD, lib.ShardingStrategy.SHARD_GRAD_OP):
        for orig in (False, True):
            model = nested(lib, sharding_strategy=strategy, use_orig_params=orig)
            output = model(torch.ones(2, 4))
            between = [weight.dim() for weight in (model.module[0].weight, model.module[2].module[1].weight)]
            output.sum().backward()
            after = [weight.dim() for weight in (model.module[0].weight, model.module[2].module[1].weight)]
            found[strategy.name, orig] = between, after
    return found


def modules_show_the_same():
    theirs, ours = (what_modules_show(lib) for lib in libraries())
    assert ours == theirs


def test_modules_show_what_they_show_in_torch():
    run_ranks(modules_show_the_same, 2, kind="gloo")


def parameters_that_differ():
    theirs, ours = libraries()
    for lib in (theirs, ours):
        model = nested(lib, sharding_strategy=lib.ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True)
        model(torch.ones(2, 4))
        assert {param.dim() for param in model.parameters()} == ({1} if lib is ours else {1, 2})
    model = ours.make(ReadsItsParameters())
    names = []
    model.module.register_forward_hook(lambda module, *_: names.extend(dict(module.named_parameters())))
    step(model)
    assert names == ["linear.weight", "linear.bias"]


def test_what_differs_between_passes():
    run_ranks(parameters_that_differ, 2, kind="gloo")


# --- more than torch ------------------------------------------------------------------------------------------------


class UsesOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def beyond_torch():
    _, lib = libraries()
    fsdp = lib.FSDP
    model = nested(lib)
    step(model.module[2], torch.ones(2, 8))
    step(model)
    model = lib.make(UsesOne(), use_orig_params=True)
    step(model)
    assert all(param.grad is None for param in model.unused.parameters())
    with lib.enable_wrap(wrapper_cls=fsdp, sharding_strategy=lib.ShardingStrategy.NO_SHARD):
        with lib.enable_wrap(wrapper_cls=fsdp):
            assert lib.wrap(nn.Linear(2, 2)).sharding_strategy is lib.ShardingStrategy.FULL_SHARD
        assert lib.wrap(nn.Linear(2, 2)).sharding_strategy is lib.ShardingStrategy.NO_SHARD
    model = nested(lib, use_orig_params=True)
    want = step(model)
    options = {"writeback": False, "with_grads": True, "offload_to_cpu": True, "rank0_only": True}
    with fsdp.summon_full_params(model, **options):
        assert all(param.grad is not None for param in model.parameters()) or dist.get_rank()
    with fsdp.summon_full_params(model), torch.no_grad():
        assert torch.equal(model(torch.ones(2, 4)), want)
    precision = to_bf16(lib, reduce_dtype=torch.float32, keep_low_precision_grads=True)
    model = lib.make(net(), mixed_precision=precision)
    step(model)
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = lib.make(net(), sharding_strategy=lib.ShardingStrategy.NO_SHARD)
        fsdp.full_optim_state_dict(model, torch.optim.SGD(model.parameters(), 0.1))
        with fsdp.state_dict_type(model, lib.StateDictType.FULL_STATE_DICT):
            model.state_dict()
    buffers = lib.make(nn.Sequential(normed()), use_orig_params=True).named_buffers()
    assert [name for name, _ in buffers] == ["0.1.running_mean", "0.1.running_var", "0.1.num_batches_tracked"]


def test_what_torch_refuses_and_shardwise_does():
    run_ranks(beyond_torch, 2)


def trains(model, want=None):
    """Whether a step gives finite parameters, those of ``want`` if given."""
    step(model)
    torch.optim.SGD(model.parameters(), 0.1).step()
    sums = sums_of(model)
    assert all(map(math.isfinite, sums))
    assert want is None or same(sums, want), (sums, want)
    return sums


def options_that_differ_inside(lib):
    torch.manual_seed(0)
    want = trains(nested(lib))
    for inner, outer in (
        ({"use_orig_params": True}, {}),
        ({}, {"use_orig_params": True}),
        ({"limit_all_gathers": False}, {}),
    ):
        torch.manual_seed(0)
        model = net()
        model[2][0] = lib.make(model[2][0], **inner)
        model[2] = lib.make(model[2], **inner)
        trains(lib.make(model, **outer), want)


def a_hybrid_strategy_without_groups(lib):
    trains(lib.make(net(), sharding_strategy=lib.ShardingStrategy.HYBRID_SHARD))


def a_scalar(lib):
    model = net()
    model[0].scale = nn.Parameter(torch.tensor(2.0))
    trains(lib.make(model, use_orig_params=True))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def parameters_tied_across_wrappers(lib):
    torch.manual_seed(0)
    want = trains(lib.make(Tied()))
    torch.manual_seed(0)
    trains(lib.make(Tied(), auto_wrap_policy=on_linear(lib)), want)


def gradients_of_flat_parameters(lib):
    model = nested(lib)
    step(model)
    with lib.FSDP.summon_full_params(model, with_grads=True):
        assert all(param.grad.shape == param.shape for param in model.parameters())


def summoned_copies_on_the_host(lib):
    model = lib.make(net(), sharding_strategy=lib.ShardingStrategy.NO_SHARD)
    with lib.FSDP.summon_full_params(model, offload_to_cpu=True):
        pass


def local_states_with_a_mesh(lib):
    model = lib.make(net(), device_mesh=init_device_mesh(device().type, (dist.get_world_size(),)))
    with lib.FSDP.state_dict_type(model, lib.StateDictType.LOCAL_STATE_DICT):
        state = model.state_dict()
        model.load_state_dict(state)


REFUSED_BY_TORCH = [
    options_that_differ_inside,
    a_hybrid_strategy_without_groups,
    a_scalar,
    parameters_tied_across_wrappers,
    gradients_of_flat_parameters,
    summoned_copies_on_the_host,
    local_states_with_a_mesh,
]


def refused_by_torch():
    theirs, ours = libraries()
    for program in REFUSED_BY_TORCH:
        program(ours)
        with pytest.raises(Exception):  # noqa: B017  of any kind; ours raised none
            program(theirs)


@pytest.mark.filterwarnings("ignore")
def test_programs_that_torch_refuses_run():
    run_ranks(refused_by_torch, 2, kind="gloo")


def differs_from_torch():
    theirs, ours = libraries()
    strategies = theirs.ShardingStrategy
    for lib in (theirs, ours):
        model = lib.make(net(), sharding_strategy=strategies.NO_SHARD)
        want = sums_of(model)
        with lib.FSDP.summon_full_params(model, writeback=False), torch.no_grad():
            for param in model.parameters():
                param.zero_()
        assert same(sums_of(model), want) == (lib is ours)
        model = nested(lib, use_orig_params=True)
        before = set(map(id, model.parameters()))
        with lib.FSDP.summon_full_params(model):
            assert (set(map(id, model.parameters())) == before) == (lib is theirs)
        precision = to_bf16(lib, reduce_dtype=torch.float32)
        options = {"sharding_strategy": strategies.NO_SHARD, "mixed_precision": precision}
        model = lib.make(net(), use_orig_params=True, **options)
        with model.no_sync():
            step(model)
        held = {param.grad.dtype for param in model.parameters()}
        assert held == ({torch.float32} if lib is ours else {torch.bfloat16})
        # Two replicas, each on one rank: they stay equal if gradients are summed over replicas.
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        groups = (alone, dist.group.WORLD)
        model = lib.make(net(), sharding_strategy=strategies.HYBRID_SHARD, process_group=groups)
        step(model, torch.full((2, 4), float(dist.get_rank())))
        torch.optim.SGD(model.parameters(), 0.1).step()
        everyone = [None, None]
        dist.all_gather_object(everyone, sums_of(model))
        assert same(*everyone) == (lib is ours)


@pytest.mark.filterwarnings("ignore")
def test_what_differs_from_torch_on_purpose():
    run_ranks(differs_from_torch, 2, kind="gloo")
