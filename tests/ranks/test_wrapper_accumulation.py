"""Many micro-batches, within `no_sync()` and without it, add up to one big batch."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

from shardwise import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, ShardingStrategy
from shardwise.engine.unit.membership import units_of
from shardwise.errors import StateError
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import GATHER, REDUCE, Layers, counted, data
from tests.ranks.tables import slow
from tests.ranks.wrapped import device

pytestmark = pytest.mark.arithmetic

NO_SYNC, SYNC = True, False
INTERLEAVINGS = (
    [(NO_SYNC, 3), (SYNC, 3), (NO_SYNC, 3)],
    [(SYNC, 3), (NO_SYNC, 3), (SYNC, 3)],
)
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
PREFETCHES = (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST)


class Layer(nn.Module):
    """Attention to a memory, then two linear layers: what torch's own layers do, at a third of their host time."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(8, 8, bias=False)
        self.keys_and_values = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 11), nn.Linear(11, 8)

    def forward(self, x, memory):
        keys, values = self.keys_and_values(memory).chunk(2, -1)
        x = x + torch.softmax(self.queries(x) @ keys.transpose(-1, -2), -1) @ values
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TiedTransformer(nn.Module):
    """An encoder and a decoder layer; the output layer's weight is the embedding's, and there is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.encoder, self.decoder = Layer(), Layer()
        self.output = nn.Linear(8, 11)
        self.output.weight = self.embed.weight
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale
        return self.output(self.decoder(x, self.encoder(x, x)))


def wrapped(**options):
    model = seeded(TiedTransformer())
    for name in ("encoder", "decoder"):
        setattr(model, name, FullyShardedDataParallel(getattr(model, name), **options))
    return FullyShardedDataParallel(model, **options)


def batches(count):
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    return [torch.randint(0, 11, (2, 4), generator=generator).to(device()) for _ in range(count)]


def loss_of(model, tokens):
    # A sum, so that micro-batches add up to the big batch.
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")


def gradients(model):
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def accumulates(offload):
    """Returns the cases in which micro-batches do not give the gradients of one batch."""
    wrong = []
    micro_batches = batches(10)
    for strategy, prefetch, use_orig_params in itertools.product(STRATEGIES, PREFETCHES, (False, True)):
        model = wrapped(
            sharding_strategy=strategy,
            backward_prefetch=prefetch,
            use_orig_params=use_orig_params,
            cpu_offload=CPUOffload(offload_params=offload),
        )
        loss_of(model, torch.cat(micro_batches)).backward()
        expected = gradients(model)
        for interleaving in INTERLEAVINGS:
            model.zero_grad()
            remaining = iter(micro_batches)
            for uses_no_sync, count in interleaving:
                with model.no_sync() if uses_no_sync else contextlib.nullcontext():
                    for tokens in itertools.islice(remaining, count):
                        loss_of(model, tokens).backward()
            for tokens in remaining:
                loss_of(model, tokens).backward()
            for name, gradient in gradients(model).items():
                want = expected[name]
                label = f"{strategy.name} {prefetch} {use_orig_params} {interleaving}: {name}"
                if gradient is None or want is None:
                    # This rank has no element of the parameter.
                    if gradient is not want:
                        wrong.append(f"{label}: {gradient}, expected {want}")
                elif (gradient.device, gradient.shape, gradient.dtype) != (
                    want.device,
                    want.shape,
                    want.dtype,
                ):
                    wrong.append(
                        f"{label}: {gradient.shape} {gradient.dtype}, expected {want.shape} {want.dtype}"
                    )
                # Not bitwise: one batch sums over samples in another order than ten do.
                elif not torch.allclose(gradient, want, rtol=1e-4, atol=1e-5):
                    wrong.append(f"{label}: off by {(gradient - want).abs().max()}")
    return wrong


@pytest.mark.parametrize("world_size", [2, slow(4)])
@pytest.mark.parametrize("offload", [False, True])
def test_micro_batches_in_and_out_of_no_sync_equal_one_batch(world_size, offload):
    assert run_ranks(accumulates, world_size, offload, kind="gloo") == [[]] * world_size


def against_plain():
    """Micro-batches also equal a plain model, to the bit where sums are exact: integers."""
    world = dist.get_world_size()
    for strategy, orig in itertools.product(STRATEGIES, (False, True)):
        model = FullyShardedDataParallel(
            nn.Linear(3, 5, bias=False), sharding_strategy=strategy, use_orig_params=orig
        )
        for step in range(4):
            with model.no_sync() if step in (0, 2) else contextlib.nullcontext():
                (model(torch.ones(1, 3)) * (world * 2.0 ** (dist.get_rank() + 4 * step))).sum().backward()
        expected = sum(2.0 ** (rank + 4 * step) for rank in range(world) for step in range(4))
        for param in model.parameters():
            if param.numel() == 0:
                assert param.grad is None
                continue
            values = param.grad[param.grad != 0]
            assert values.eq(expected).all(), (strategy, orig, values, expected)


@pytest.mark.parametrize("world_size", [1, 3])
def test_accumulated_gradients_are_averages_over_ranks(world_size):
    run_ranks(against_plain, world_size, kind="threads")


def communication(strategy):
    model = seeded(Layers())
    for index in range(3):
        model.layers[index] = FullyShardedDataParallel(model.layers[index], sharding_strategy=strategy)
    model = FullyShardedDataParallel(model, sharding_strategy=strategy)
    model(data(0, 0, 2, 6)).sum().backward()
    counts = []
    with model.no_sync():
        for step in range(2):
            with CommDebugMode() as mode:
                model(data(step, 0, 2, 6)).sum().backward()
            counts.append(counted(mode))
    with CommDebugMode() as mode:
        model(data(3, 0, 2, 6)).sum().backward()
    return counts, counted(mode)


def test_no_gradient_travels_inside_no_sync():
    all_reduce = "c10d.allreduce_"
    for inside, after in run_ranks(communication, 2, ShardingStrategy.FULL_SHARD, kind="gloo"):
        assert inside == [{GATHER: 7}, {GATHER: 7}]
        assert after == {GATHER: 7, REDUCE: 4}
    # What is kept after forward is kept for the next micro-batch: after the first, nothing travels at all.
    for inside, after in run_ranks(communication, 2, ShardingStrategy.SHARD_GRAD_OP, kind="gloo"):
        assert inside == [{GATHER: 4}, {}]
        assert after == {REDUCE: 4}
    for inside, after in run_ranks(communication, 2, ShardingStrategy.NO_SHARD, kind="gloo"):
        assert inside == [{}, {}]
        assert after == {all_reduce: 4}


def held_bytes(orig):
    """Bytes of gradients between micro-batches, outside and inside `no_sync`, and of all full gradients."""
    model = FullyShardedDataParallel(
        nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), use_orig_params=orig
    )
    (unit,) = units_of(model)

    def held():
        tensors = [param.grad for param in model.parameters() if param.grad is not None]
        tensors += [slot.stash for slot in unit.slots if slot.stash is not None]
        tensors += [slot.unsharded.grad for slot in unit.slots if slot.unsharded.grad is not None]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    model(torch.ones(1, 32)).sum().backward()
    outside = held()
    model.zero_grad()
    assert held() == 0
    with model.no_sync():
        model(torch.ones(1, 32)).sum().backward()
    inside = held()
    model.zero_grad()
    assert held() == 0, "zero_grad left gradients of no_sync behind"
    return outside, inside


@pytest.mark.parametrize("orig", [False, True])
def test_gradients_are_held_sharded_outside_no_sync_and_whole_inside(orig):
    full = 3 * (32 * 32 + 32) * 4
    for world_size in (2, 4):
        for outside, inside in run_ranks(held_bytes, world_size, orig, kind="threads"):
            assert full // world_size <= outside <= full // world_size + 64
            assert inside == full


def zeroed_in_place():
    """Gradients that were there before, and their sums after zeros were written into them; both ways to show shards."""
    found = []
    for orig in (False, True):
        model = FullyShardedDataParallel(nn.Linear(32, 32), use_orig_params=orig)
        model(torch.ones(1, 32)).sum().backward()
        before = [param.grad for param in model.parameters()]
        model.zero_grad(set_to_none=False)
        after = [param.grad for param in model.parameters()]
        found.append(
            all(one is other for one, other in zip(before, after, strict=True))
            and not any(gradient.any() for gradient in after if gradient is not None)
        )
    return found


def test_zero_grad_can_keep_the_gradients_and_fill_them_with_zeros():
    assert run_ranks(zeroed_in_place, 2, kind="threads") == [[True, True]] * 2


def no_sync_on_a_child():
    model = wrapped()
    assert model.check_is_root()
    with (
        pytest.raises(
            StateError, match=r"no_sync was called on a wrapper inside another one(.|\n)*outermost"
        ),
        model.encoder.no_sync(),
    ):
        pass
    with pytest.raises(ZeroDivisionError), model.no_sync():
        raise ZeroDivisionError
    tokens = batches(1)[0]
    loss_of(model, tokens).backward()
    assert all(param.grad is not None for param in model.parameters()), (
        "no_sync was not left after an exception"
    )


def test_no_sync_is_for_the_outermost_wrapper_and_ends_with_an_exception():
    run_ranks(no_sync_on_a_child, 2)
