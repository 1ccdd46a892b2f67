"""Saving and loading."""

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.optim import Adafactor, Adam

from shardwise.errors import StateError
from shardwise.zero import ZeroRedundancyOptimizer
from tests.ranks.zero_cases.models import (
    OPTIMIZERS,
    assert_same_state,
    batches,
    ddp_of,
    grouped,
    overlap_both,
    set_gradients,
    share_from,
    small_model,
    train_both,
    trained,
    wide_model,
)
from tests.ranks.zero_cases.overlap import overlapped


def consolidated_state_is_an_unsharded_optimizers(name: str, *, balanced: bool) -> None:
    _, ours, _, theirs = trained(name, balanced=balanced)
    last = dist.get_world_size() - 1
    ours.consolidate_state_dict(to=last)
    if dist.get_rank() == last:
        assert_same_state(ours.state_dict(), theirs.state_dict())
    else:
        with pytest.raises(RuntimeError, match=rf"consolidate_state_dict\(to={dist.get_rank()}\)"):
            ours.state_dict()


def every_rank_loads_what_one_rank_consolidated(*, balanced: bool, loads_balanced: bool) -> None:
    model, ours, reference, theirs = trained(balanced=balanced)
    ours.consolidate_state_dict(to=0)
    saved = share_from(0, ours.state_dict() if dist.get_rank() == 0 else None)
    fresh = ZeroRedundancyOptimizer(
        grouped(model, 2), Adam, lr=7.0, balanced=loads_balanced, parameters_as_bucket_view=True
    )
    fresh.load_state_dict(saved)
    assert [group["lr"] for group in fresh.param_groups] == [group["lr"] for group in theirs.param_groups]
    assert [group["lr"] for group in fresh.optim.param_groups] == [
        group["lr"] for group in theirs.param_groups
    ]
    # What was loaded is the optimizer's own: stepping must not write into the saved dict.
    before = copy.deepcopy(saved)
    train_both(model, fresh, reference, theirs, range(3, 5))
    assert_same_state(saved, before)


def loads_an_unsharded_optimizers_state(*, balanced: bool) -> None:
    model, reference = small_model(), small_model()
    theirs = Adam(grouped(reference, 2), lr=0.01)
    for step in range(2):
        set_gradients([reference], step)
        theirs.step()
    with torch.no_grad():
        for mine, peer in zip(model.parameters(), reference.parameters(), strict=True):
            mine.copy_(peer)
    ours = ZeroRedundancyOptimizer(grouped(model, 2), Adam, lr=0.5, balanced=balanced)
    ours.load_state_dict(theirs.state_dict())
    train_both(model, ours, reference, theirs, range(2, 4))


def state_dict_shows_what_was_consolidated_last() -> None:
    model, ours, _, _ = trained()
    ours.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        before = ours.state_dict()["state"][0]["exp_avg"].clone()
    set_gradients([model], 9)
    ours.step()
    if dist.get_rank() == 0:
        assert torch.equal(ours.state_dict()["state"][0]["exp_avg"], before)
    ours.consolidate_state_dict(to=1)
    with pytest.raises(RuntimeError) if dist.get_rank() == 0 else nullcontext():
        ours.state_dict()


def runs_the_hooks_around_saving_and_loading() -> None:
    _, ours, _, _ = trained()
    seen: list[str] = []
    ours.register_state_dict_pre_hook(lambda optimizer: seen.append("before saving"))
    ours.register_state_dict_post_hook(lambda optimizer, saved: {**saved, "note": len(saved["state"])})
    ours.register_load_state_dict_pre_hook(lambda optimizer, saved: seen.append(f"note {saved['note']}"))
    ours.register_load_state_dict_post_hook(lambda optimizer: seen.append("after loading"))
    ours.consolidate_state_dict(to=0)
    saved = share_from(0, ours.state_dict() if dist.get_rank() == 0 else None)
    ours.load_state_dict(saved)
    before = ["before saving"] if dist.get_rank() == 0 else []
    assert seen == [*before, "note 7", "after loading"]


def saves_sharded(path: str, name: str, *, balanced: bool) -> None:
    """Saves after three steps, and the unsharded optimizer's state beside it."""
    model, ours, _, theirs = trained(name, balanced=balanced)
    dcp.save({"model": model.state_dict(), "optimizer": ours.sharded_state_dict()}, checkpoint_id=path)
    if dist.get_rank() == 0:
        torch.save(theirs.state_dict(), f"{path}.peer")
    dist.barrier()


def loads_sharded(path: str, name: str, *, balanced: bool) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    model, reference = small_model(seed=1), small_model()
    ours = ZeroRedundancyOptimizer(
        grouped(model, 2), optimizer_class, balanced=balanced, parameters_as_bucket_view=balanced, **options
    )
    for group in ours.param_groups:
        group["lr"] = 9.0
    metadata = FileSystemReader(path).read_metadata()
    entries = ours.sharded_state_dict(like=metadata, prefix="optimizer.")
    dcp.load({"model": model.state_dict(), "optimizer": entries}, checkpoint_id=path)
    ours.load_sharded_state_dict(entries)

    saved = torch.load(f"{path}.peer")
    ours.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert_same_state(ours.state_dict(), saved)
    theirs = optimizer_class(grouped(reference, 2), **options)
    theirs.load_state_dict(saved)
    with torch.no_grad():
        for mine, peer in zip(model.parameters(), reference.parameters(), strict=True):
            peer.copy_(mine)
    train_both(model, ours, reference, theirs, range(3, 5))


def saves_and_loads_state_that_is_not_per_element(path: str) -> None:
    """Adafactor keeps a row and a column of statistics for each matrix."""
    model, reference = small_model(), small_model()
    ours, theirs = ZeroRedundancyOptimizer(model.parameters(), Adafactor), Adafactor(reference.parameters())
    train_both(model, ours, reference, theirs, range(2))
    dcp.save({"optimizer": ours.sharded_state_dict()}, checkpoint_id=path)
    fresh = ZeroRedundancyOptimizer(model.parameters(), Adafactor)
    entries = fresh.sharded_state_dict(like=FileSystemReader(path).read_metadata(), prefix="optimizer.")
    dcp.load({"optimizer": entries}, checkpoint_id=path)
    fresh.load_sharded_state_dict(entries)
    train_both(model, fresh, reference, theirs, range(2, 4))


class NestedState(torch.optim.Optimizer):
    """Keeps tensors inside dicts and lists, and a count of all steps under a name of its own."""

    elementwise = True

    def __init__(self, params: Any, lr: float | Tensor = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.update(param, self.state[param]) * (group["lr"] / self.state["steps"]))

    def update(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["moments"] = {"sum": torch.zeros_like(param), "last": [torch.zeros_like(param)]}
        state["moments"]["sum"].add_(param.grad)
        state["moments"]["last"][0].copy_(param.grad)
        return state["moments"]["sum"] + state["moments"]["last"][0]


class OddState(NestedState):
    """Also tensors that are not shaped like the parameter, though one has as many elements."""

    def update(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        update = super().update(param, state)
        flat = state.setdefault("flat", torch.zeros(param.numel(), device=param.device))
        rows = state.setdefault("rows", torch.zeros(param.shape[0], 2, device=param.device))
        flat.add_(param.grad.flatten())
        rows.add_(1.0)
        return update + flat.view_as(param) * rows.mean()


ANY_FORM = {
    "nested": (NestedState, False),
    "nested and balanced": (NestedState, True),
    "odd": (OddState, False),
}


def consolidates_state_of_any_form(form: str) -> None:
    optimizer_class, balanced = ANY_FORM[form]
    model, reference = small_model(), small_model()
    ours = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, balanced=balanced)
    theirs = optimizer_class(reference.parameters())
    train_both(model, ours, reference, theirs, range(2))
    ours.consolidate_state_dict(to=0)
    saved = share_from(0, ours.state_dict() if dist.get_rank() == 0 else None)
    torch.testing.assert_close(
        saved["state"], theirs.state_dict()["state"], rtol=0, atol=0, check_device=False
    )
    fresh = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, balanced=balanced)
    fresh.load_state_dict(saved)
    before = copy.deepcopy(saved)
    train_both(model, fresh, reference, theirs, range(2, 4))
    torch.testing.assert_close(saved, before, rtol=0, atol=0)


def saves_sharded_state_of_any_form(path: str, form: str) -> None:
    """And loads it, after copying it, where every rank owns something else."""
    optimizer_class, balanced = ANY_FORM[form]
    model, reference = small_model(), small_model()
    ours = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, balanced=balanced)
    theirs = optimizer_class(reference.parameters())
    train_both(model, ours, reference, theirs, range(2))
    copied, peers = copy.deepcopy(ours.sharded_state_dict()), copy.deepcopy(theirs.state_dict())
    # A copy has memory of its own, and stays as it is.
    train_both(model, ours, reference, theirs, range(2, 3))
    fresh = _saved_and_loaded({"optimizer": copied}, path, model, optimizer_class, balanced=form == "nested")
    theirs.load_state_dict(peers)
    train_both(model, fresh, reference, theirs, range(3, 5))


def loads_options_as_they_were_saved(path: str) -> None:
    """A learning rate that is a tensor where it is none here, a scheduler's notes that were not there, and the
    other way round."""
    model, reference = small_model(), small_model()
    theirs = Adam(reference.parameters(), lr=torch.tensor(0.02))
    torch.optim.lr_scheduler.StepLR(theirs, 1)
    ours = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=torch.tensor(0.02))
    torch.optim.lr_scheduler.StepLR(ours, 1)
    train_both(model, ours, reference, theirs, range(1))
    entries = {"optimizer": ours.sharded_state_dict()}
    fresh = _saved_and_loaded(entries, f"{path}-tensor", model, Adam, lr=3.0)
    group = fresh.param_groups[0]
    assert isinstance(group["lr"], Tensor)
    assert group["initial_lr"] == group["lr"] == torch.tensor(0.02)
    train_both(model, fresh, reference, theirs, range(1, 2))

    plain = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.125)
    fresh = _saved_and_loaded(
        {"optimizer": plain.sharded_state_dict()}, f"{path}-number", model, Adam, lr=torch.tensor(0.02)
    )
    assert type(fresh.param_groups[0]["lr"]) is float
    assert fresh.param_groups[0]["lr"] == 0.125


def _saved_and_loaded(
    entries: dict[str, Any], path: str, model: nn.Module, optimizer_class: Any, **options: Any
) -> ZeroRedundancyOptimizer:
    dcp.save(entries, checkpoint_id=path)
    fresh = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options)
    torch.optim.lr_scheduler.ExponentialLR(fresh, 0.5)
    like = fresh.sharded_state_dict(like=FileSystemReader(path).read_metadata(), prefix="optimizer.")
    dcp.load({"optimizer": like}, checkpoint_id=path)
    fresh.load_sharded_state_dict(like)
    return fresh


def a_sharded_state_dict_needs_no_communication() -> None:
    _, ours, _, _ = trained(balanced=True)
    with torch.profiler.profile() as profile:
        entries = ours.sharded_state_dict()
    assert not [event for event in profile.key_averages() if event.key.startswith("c10d::")]
    owned = {id(tensor) for group in ours.optim.param_groups for tensor in group["params"]}
    assert sum("exp_avg_sq" in key and "max" not in key for key in entries) == len(owned)
    # No copies either: the entries are the state's own memory.
    addresses = {value.data_ptr() for values in ours.optim.state.values() for value in values.values()}
    assert {value.data_ptr() for key, value in entries.items() if key.startswith("state.")} == addresses


def overlap_keeps_state_that_was_loaded(*, shard_buckets: bool) -> None:
    """State loaded before the first backward moves to the buckets' owners like any other."""
    model, reference = wide_model(), wide_model()
    peer, theirs = ddp_of(reference), Adam(reference.parameters(), lr=0.01)
    inputs = batches(11)
    for _ in range(2):
        theirs.zero_grad()
        peer(next(inputs)).square().sum().backward()
        theirs.step()
    model.load_state_dict(reference.state_dict())
    ddp, ours = overlapped(model, Adam, interleaved=True, shard_buckets=shard_buckets, lr=3.0)
    ours.load_state_dict(theirs.state_dict())
    for _ in range(3):
        overlap_both(ddp, ours, peer, theirs, next(inputs))


def copies_step_as_the_original(balanced: bool, views: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.1, balanced=balanced, parameters_as_bucket_view=views
    )
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))], "lr": 0.2})

    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    step(model, optimizer)
    if dist.get_rank() == 0:
        # No other rank takes part, and a copy that is never used needs none.
        assert isinstance(copy.deepcopy(optimizer), ZeroRedundancyOptimizer)
        assert not hasattr(copy.copy(optimizer), "unknown")
    pairs = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    pairs.append(copy.deepcopy(pairs[0]))
    for _ in range(2):
        step(model, optimizer)
        for other_model, other in pairs:
            step(other_model, other)
            assert [group["lr"] for group in other.param_groups] == [0.1, 0.2]
            for one, two in zip(model.parameters(), other_model.parameters(), strict=True):
                assert torch.equal(one, two)


def a_pickled_copy_needs_the_default_group() -> None:
    group = dist.new_group([0, 1])
    model = nn.Linear(2, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    assert copy.deepcopy(optimizer).process_group is group
    pickled = pickle.loads(pickle.dumps(optimizer))
    with pytest.raises(StateError, match="does not know its process group"):
        pickled.step()
