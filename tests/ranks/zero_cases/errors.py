"""Bad input."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.optim import SGD, Adam

from shardwise.errors import CheckpointError, ConfigError, RankDisagreement, ShardwiseError, StateError
from shardwise.zero import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
)
from tests.ranks.zero_cases.models import (
    assert_same_on_all_ranks,
    ddp_of,
    device,
    fill,
    owned_numel,
    set_gradients,
    small_model,
    train_both,
    trained,
    wide_model,
)


def refuses_bad_parameters() -> None:
    model = small_model()
    sparse = torch.sparse_coo_tensor(size=(2, 3), check_invariants=True)
    gappy = torch.zeros(4, 4)[:, ::2].requires_grad_()
    for params, error in (
        ([], ValueError),
        (torch.randn(1), TypeError),
        (1.2, TypeError),
        ([*model.parameters(), 42], TypeError),
        ([{"params": list(model.parameters())}, torch.zeros(1)], TypeError),
        ([{"parameters": []}], ValueError),
        ([sparse], ValueError),
        ([torch.zeros(1), sparse], ValueError),
        ([gappy], ValueError),
        ([torch.zeros(3, device="meta")], ValueError),
        ([_sharded()], ValueError),
    ):
        with pytest.raises(error) as caught:
            ZeroRedundancyOptimizer(params, SGD, lr=0.1)
        assert isinstance(caught.value, ShardwiseError)
        assert caught.value.fix
    # What failed left nothing behind that would disturb the next.
    assert owned_numel(ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)) > 0


def _sharded() -> torch.Tensor:
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    return distribute_tensor(torch.zeros(4, 4, device=device()), mesh)


def finds_ranks_with_other_parameters() -> None:
    rank = dist.get_rank()
    others = "rank 0 has" if dist.get_world_size() == 2 else "ranks 0, 2 have"
    for params, says in (
        (
            [torch.zeros(3 + (rank == 1))],
            rf"{others} parameter 0: float32 \(3,\).*rank 1 has .*\(4,\)",
        ),
        ([torch.zeros(3)] * 1 + [torch.zeros(2)] * (rank == 1), "rank 1 has group 0 of 2 parameters"),
        ([torch.zeros(3, dtype=torch.bfloat16 if rank == 1 else torch.float32)], "rank 1 has .*bfloat16"),
        ([torch.zeros(3, requires_grad=rank == 1)], f"{others} .*frozen"),
        ([torch.zeros(3).to_sparse() if rank == 1 else torch.zeros(3)], "rank 1 has .*sparse"),
    ):
        leaves = [tensor.detach().to(device()).requires_grad_(tensor.requires_grad) for tensor in params]
        with pytest.raises(RankDisagreement, match=says):
            ZeroRedundancyOptimizer(leaves, SGD, lr=0.1)
    params = [torch.zeros(3, device=device())]
    with pytest.raises(RankDisagreement, match=r"rank 1 has group 0 of 1 parameters, lr=0\.2"):
        ZeroRedundancyOptimizer(params, SGD, lr=0.2 if rank == 1 else 0.1)
    with pytest.raises(RankDisagreement, match="balanced=True"):
        ZeroRedundancyOptimizer([torch.zeros(3, device=device())], SGD, lr=0.1, balanced=rank == 1)


def finds_ranks_that_list_the_same_parameters_in_other_orders() -> None:
    """Two layers of one shape: shapes alone do not tell which is which, names and values do."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device())
    params, named = list(model.parameters()), list(model.named_parameters())
    _randomize(params, 3)
    order = [params[2], params[1], params[0], params[3]] if is_last else params
    with pytest.raises(RankDisagreement, match="parameter 0 of rank 0 is parameter 2 of rank"):
        ZeroRedundancyOptimizer(order, SGD, lr=0.1)
    swapped = [named[2], named[1], named[0], named[3]]
    with torch.no_grad():
        for param in params:
            param.fill_(1.0)
    with pytest.raises(
        RankDisagreement, match=r"ha(s|ve) parameter 0 '0\.weight'.*has parameter 0 '1\.weight'"
    ):
        ZeroRedundancyOptimizer(swapped if is_last else named, SGD, lr=0.1)
    # Ranks that are still to be made equal have other values, which is nobody's fault.
    _randomize(params, dist.get_rank())
    assert owned_numel(ZeroRedundancyOptimizer(params, SGD, lr=0.1)) > 0


def _randomize(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator(device()).manual_seed(seed)
    with torch.no_grad():
        for param in params:
            param.normal_(generator=generator)


def what_one_rank_refuses_keeps_no_other_waiting() -> None:
    """That rank raises its own error, the others say which it was; all go on with the next."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    model = small_model()
    params = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(params, SGD, lr=0.1)
    new = {"params": [torch.zeros(3, device=device())]}
    for make, error, says in (
        (
            lambda: ZeroRedundancyOptimizer([] if is_last else params, SGD, lr=0.1),
            ConfigError,
            "params is empty",
        ),
        (
            lambda: ZeroRedundancyOptimizer(params, Unknown if is_last else SGD, lr=0.1, balanced=True),
            ConfigError,
            "is not known to be element-wise",
        ),
        (
            lambda: optimizer.add_param_group({"params": params[:1]} if is_last else new),
            ValueError,
            "more than one parameter group",
        ),
    ):
        with pytest.raises(error if is_last else RankDisagreement, match=says):
            make()
    assert len(optimizer.param_groups) == 1
    with pytest.raises(RankDisagreement, match=r"consolidate .* on rank 1"):
        optimizer.consolidate_state_dict(to=int(is_last))
    set_gradients([model], 0)
    optimizer.step()
    assert_same_on_all_ranks(model)


def keeps_its_groups_when_an_added_one_is_refused() -> None:
    model = small_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    with pytest.raises(RankDisagreement, match=r"parameter 7: float32 \(3,\)"):
        optimizer.add_param_group({"params": [torch.zeros(3 + (dist.get_rank() == 1))]})
    with pytest.raises(ValueError, match="sparse"):
        optimizer.add_param_group({"params": [torch.sparse_coo_tensor(size=(2, 3), check_invariants=True)]})
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1
    set_gradients([model], 0)
    optimizer.step()
    assert_same_on_all_ranks(model)


def refuses_the_state_of_another_model() -> None:
    model, ours, reference, theirs = trained()
    good = theirs.state_dict()
    one_less = copy.deepcopy(good)
    one_less["param_groups"][0]["params"].pop()
    one_group = {**good, "param_groups": good["param_groups"][:1]}
    other_shape = copy.deepcopy(good)
    other_shape["state"][0]["exp_avg"] = torch.zeros(2, 2)
    for bad, says in (
        (one_less, r"groups of \[3, 3\].*groups of \[4, 3\]"),
        (one_group, r"groups of \[4\].*groups of \[4, 3\]"),
        (other_shape, r"'exp_avg' of parameter 0 has shape \(2, 2\)"),
        ({"state": {}}, r"no \['param_groups'\]"),
    ):
        with pytest.raises(ValueError, match=says):
            ours.load_state_dict(bad)
    # Nothing was lost: it goes on as if nobody had tried.
    train_both(model, ours, reference, theirs, range(3, 5))


def refuses_a_checkpoint_of_another_model(path: str) -> None:
    _, ours, _, _ = trained()
    dcp.save({"optimizer": ours.sharded_state_dict()}, checkpoint_id=path)
    metadata = FileSystemReader(path).read_metadata()
    fewer = ZeroRedundancyOptimizer(list(small_model().parameters())[:2], Adam, lr=0.1)
    with pytest.raises(CheckpointError, match="this optimizer has 2 parameters"):
        fewer.sharded_state_dict(like=metadata, prefix="optimizer.")
    others = [torch.zeros(5 + i, requires_grad=True) for i in range(7)]
    other = ZeroRedundancyOptimizer(others, Adam, lr=0.1)
    with pytest.raises(CheckpointError, match="elements for parameter"):
        other.sharded_state_dict(like=metadata, prefix="optimizer.")


def refuses_a_checkpoint_of_another_memory_format(path: str) -> None:
    """Spans are cut as parameters lie in memory; in another order they would be other elements."""
    saved, other = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last), nn.Conv2d(4, 8, 3)
    optimizers = [ZeroRedundancyOptimizer(net.parameters(), Adam, lr=0.1) for net in (saved, other)]
    for net, optimizer in zip((saved, other), optimizers, strict=True):
        set_gradients([net], 0)
        optimizer.step()
    dcp.save(optimizers[0].sharded_state_dict(), checkpoint_id=path)
    entries = optimizers[1].sharded_state_dict()
    dcp.load(entries, checkpoint_id=path)
    with pytest.raises(
        CheckpointError, match=r"parameter 0 has its dims in memory .*\[0, 1, 2, 3\].*\[0, 2, 3, 1\]"
    ):
        optimizers[1].load_sharded_state_dict(entries)


class Unknown(SGD):
    pass


class Declared(SGD):
    elementwise = True


def refuses_options_that_cannot_work() -> None:
    model = small_model()
    params = list(model.parameters())
    for no_class in ("Adam", None, nn.Linear, partial(Adam, lr=0.1)):
        with pytest.raises(TypeError, match=r"which is not a subclass of torch\.optim\.Optimizer"):
            ZeroRedundancyOptimizer(params, no_class)  # type: ignore[arg-type]
    for optimizer_class in (torch.optim.LBFGS, Unknown):
        with pytest.raises(ConfigError, match="is not known to be element-wise"):
            ZeroRedundancyOptimizer(params, optimizer_class, balanced=True)
    ZeroRedundancyOptimizer(params, Declared, balanced=True, lr=0.1)
    for group, problem in (
        (dist.GroupMember.NON_GROUP_MEMBER, "not in process_group"),
        (5, "process_group is 5"),
    ):
        with pytest.raises(ConfigError, match=problem):
            ZeroRedundancyOptimizer(params, SGD, process_group=group, lr=0.1)
    with pytest.raises(ConfigError, match=r"LBFGS.step\(\) needs a closure"):
        ZeroRedundancyOptimizer(params, torch.optim.LBFGS, overlap_with_ddp=True)
    with pytest.warns(UserWarning, match="LBFGS searches along directions of all parameters"):
        ZeroRedundancyOptimizer(params, torch.optim.LBFGS)
    with (
        pytest.warns(UserWarning, match="duplicate"),
        pytest.raises(ConfigError, match=r"\(37, 12\) comes twice, as 0 and 7"),
    ):
        ZeroRedundancyOptimizer([*params, params[0]], SGD, lr=0.1)
    addresses = [param.data_ptr() for param in params]
    with pytest.raises(ValueError, match=r"Invalid learning rate: -1\.0"):
        ZeroRedundancyOptimizer(params, SGD, parameters_as_bucket_view=True, lr=-1.0)
    assert [param.data_ptr() for param in params] == addresses
    plain = ZeroRedundancyOptimizer(params, SGD, lr=0.1)
    with pytest.raises(ConfigError, match="no rank 5"):
        plain.consolidate_state_dict(to=5)
    with pytest.raises(StateError, match="sharded_state_dict"):
        plain.state_dict()


def refuses_overlap_that_would_never_step() -> None:
    model = wide_model()
    ddp = ddp_of(model, hook=None)
    plain = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    with pytest.raises(ValueError, match="overlap_with_ddp=True"):
        hook_with_zero_step(allreduce_hook, ddp, plain)
    stranger = ZeroRedundancyOptimizer(wide_model().parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(ConfigError, match=r"parameter 0, of shape .* is not in the model"):
        hook_with_zero_step(allreduce_hook, ddp, stranger)
    unhooked = ZeroRedundancyOptimizer(model.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(StateError, match="register_comm_hook"):
        unhooked.step()
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, unhooked))
    with pytest.warns(UserWarning, match="does nothing"):
        assert unhooked.step() is None


def refuses_memory_with_gaps_that_a_parameter_was_given() -> None:
    model = small_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    set_gradients([model], 0)
    weight = model[0].weight
    weight.data = torch.zeros(37, 24, device=device())[:, ::2]
    with pytest.raises(StateError, match="parameter 0 was given memory with gaps"):
        optimizer.step()
    weight.data = weight.data.contiguous()
    optimizer.step()
    assert_same_on_all_ranks(model)


def refuses_a_sparse_gradient_only_where_it_would_be_split() -> None:
    for balanced in (False, True):
        embedding = fill(nn.Embedding(4000, 3, sparse=True)).to(device())
        # The last of three ranks has no piece of the embedding.
        others = torch.ones(8000, device=device(), requires_grad=True)
        before = embedding.weight.detach().clone()
        optimizer = ZeroRedundancyOptimizer([embedding.weight, others], SGD, balanced=balanced, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            embedding(torch.tensor([1, 5], device=device())).sum().backward()
            others.grad = torch.ones_like(others)
            if balanced:
                with pytest.raises(StateError, match="parameter 0 has a sparse gradient"):
                    optimizer.step()
                assert torch.equal(embedding.weight, before)
                assert torch.equal(others, torch.ones_like(others))
            else:
                optimizer.step()
                assert not torch.equal(embedding.weight, before)
