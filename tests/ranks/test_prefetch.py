"""The order in which units are gathered and finished, as the trace shows it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint as checkpointed
from torch.utils.checkpoint import checkpoint

from shardwise.engine.unit.autograd_signals import Window
from shardwise.testing import run_ranks
from shardwise.testing.workloads import TiedTransformer, seeded
from tests.ranks.models import DoubleLinear, average_gradients, data, same, same_shard, sgd
from tests.ranks.subject import beyond_torch, fully_shard, record
from tests.ranks.tables import cases_of, run_cases

NUM_LAYERS = 3
IMPLEMENTATIONS = [None, "utils", "composable"]


class Transformer(TiedTransformer):
    """Runs its layers under activation checkpointing if told to."""

    reentrant: bool | None = None

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def transformer(reshard=True, implementation=None, num_layers=NUM_LAYERS):
    model = seeded(Transformer(num_layers=num_layers))
    model.reentrant = {"utils": False, "reentrant": True}.get(implementation)
    for layer in model.layers:
        if implementation == "composable":
            checkpointed(layer)
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model)


def tokens(step=0, rank=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, TiedTransformer.VOCAB, (2, 6), generator=generator)


def unshard(*names, phase):
    return [("unshard", name, phase) for name in names]


ROOT = ""
FORWARD = unshard(ROOT, "layers.0", "layers.1", "layers.2", phase="forward")
BACKWARD_OF_LAYERS = [
    ("unshard", "layers.2", "pre_backward"),
    ("unshard", "layers.1", "pre_backward"),
    ("post_backward", "layers.2", "post_backward"),
    ("unshard", "layers.0", "pre_backward"),
    ("post_backward", "layers.1", "post_backward"),
    ("post_backward", "layers.0", "post_backward"),
]
BACKWARD_OF_ROOT = [("post_backward", ROOT, "post_backward")]


def without_unshards(events):
    return [event for event in events if event[0] != "unshard"]


def one_forward_one_backward(reshard, implementation):
    model = transformer(reshard, implementation)
    optim = sgd(model.parameters())
    backward = BACKWARD_OF_LAYERS + BACKWARD_OF_ROOT
    if reshard is False:
        backward = without_unshards(backward)
    with record(model) as recorder:
        for step in range(3):
            loss = model(tokens(step, dist.get_rank())).sum()
            assert recorder.of("unshard", "post_backward") == FORWARD, f"forward {step}"
            recorder.clear()
            loss.backward()
            assert recorder.of("unshard", "post_backward") == backward, f"backward {step}"
            recorder.clear()
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 0)


def test_backward_gathers_one_unit_ahead():
    run_cases(
        one_forward_one_backward,
        2,
        cases_of(reshard=[True, False], implementation=IMPLEMENTATIONS),
        kind="gloo",
    )


def test_backward_gathers_one_unit_ahead_from_the_group_of_the_forward():
    run_cases(one_forward_one_backward, 4, cases_of(reshard=[2], implementation=IMPLEMENTATIONS), kind="gloo")


def two_forwards_one_backward(reshard, implementation):
    model = transformer(reshard, implementation)
    optim = sgd(model.parameters())
    again = [] if reshard is False else FORWARD[1:]
    first_pass = without_unshards(BACKWARD_OF_LAYERS) if reshard is False else BACKWARD_OF_LAYERS
    with record(model) as recorder:
        for step in range(2):
            loss = model(tokens(step)).sum() + model(tokens(step + 10)).sum()
            assert recorder.of("unshard", "post_backward") == FORWARD + again, f"forward {step}"
            recorder.clear()
            loss.backward()
            expected = first_pass + BACKWARD_OF_LAYERS + BACKWARD_OF_ROOT
            assert recorder.of("unshard", "post_backward") == expected, f"backward {step}"
            recorder.clear()
            optim.step()
            optim.zero_grad()


def test_two_forwards_before_a_backward_gather_in_each_pass():
    run_cases(
        two_forwards_one_backward,
        2,
        cases_of(reshard=[True, False], implementation=IMPLEMENTATIONS),
        kind="gloo",
    )


def test_two_forwards_before_a_backward_gather_in_each_pass_from_the_group_of_the_forward():
    run_cases(
        two_forwards_one_backward, 4, cases_of(reshard=[2], implementation=IMPLEMENTATIONS), kind="gloo"
    )


def gradients_match_plain(reshard, implementation, num_forwards=1):
    model, plain = transformer(reshard, implementation), seeded(Transformer())
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def loss_of(model, step, rank):
        outputs = [model(tokens(step + 10 * index, rank)) for index in range(num_forwards)]
        return sum(output.square().mean() for output in outputs)

    for step in range(3):
        loss_of(model, step, rank).backward()
        average_gradients(plain, lambda r: loss_of(plain, step, r), world_size)  # noqa: B023
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            same_shard(param.grad, expected.grad, f"step {step}: gradient of {name}")
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("implementation", ["utils", "composable", "reentrant"])
def test_gradients_under_activation_checkpointing_are_those_of_the_plain_model(reshard, implementation):
    run_ranks(gradients_match_plain, 2, reshard, implementation, kind="gloo")


def test_gradients_of_two_forwards_under_activation_checkpointing_match_too():
    run_cases(
        gradients_match_plain,
        2,
        cases_of(reshard=[True], implementation=["utils", "composable"], num_forwards=[2]),
        kind="gloo",
    )


def reentrant_counts():
    model = transformer(True, "reentrant")
    layers = [f"layers.{index}" for index in range(NUM_LAYERS)]
    with record(model) as recorder:
        for step in range(3):
            loss = model(tokens(step)).sum()
            assert recorder.of("unshard") == FORWARD
            recorder.clear()
            loss.backward()
            gathered = [unit for _, unit, _ in recorder.of("unshard")]
            assert sorted(gathered) == layers, f"one gather a unit, not {gathered}"
            finished = [unit for _, unit, _ in recorder.of("reduce")]
            assert sorted(finished) == sorted([ROOT, *layers]), f"one reduce a unit, not {finished}"
            recorder.clear()


@beyond_torch
def test_reentrant_checkpointing_takes_one_gather_a_unit_and_pass():
    run_ranks(reentrant_counts, 2, kind="gloo")


def branches():
    model = seeded(nn.Sequential(nn.Linear(8, 8), DoubleLinear(8)))
    for unit in (model[0], model[1].lin1, model[1].lin2, model):
        fully_shard(unit)
    inputs = data(0, dist.get_rank(), 4, 8)
    with record(model) as recorder:
        for _ in range(3):
            loss1, loss2 = model(inputs)
            # The root has no parameters of its own, so it shows no event.
            assert recorder.of("unshard", "post_backward") == unshard(
                "0", "1.lin1", "1.lin2", phase="forward"
            )
            recorder.clear()
            model.set_is_last_backward(False)
            loss2.sum().backward(retain_graph=True)
            assert recorder.of("unshard", "post_backward") == [
                ("unshard", "1.lin2", "pre_backward"),
                ("unshard", "0", "pre_backward"),
                ("post_backward", "1.lin2", "post_backward"),
                ("post_backward", "0", "post_backward"),
            ]
            recorder.clear()
            model.set_is_last_backward(True)
            loss1.sum().backward()
            assert recorder.of("unshard", "post_backward") == [
                ("unshard", "1.lin1", "pre_backward"),
                ("unshard", "0", "pre_backward"),
                ("post_backward", "1.lin1", "post_backward"),
                ("post_backward", "0", "post_backward"),
            ]
            recorder.clear()


@beyond_torch  # torch also gathers 1.lin1 in the first backward, which does not use it
def test_a_backward_through_one_branch_gathers_only_what_it_uses():
    run_ranks(branches, 2, kind="gloo")


def branch_gradients():
    model = seeded(nn.Sequential(nn.Linear(8, 8), DoubleLinear(8)))
    plain = seeded(nn.Sequential(nn.Linear(8, 8), DoubleLinear(8)))
    for unit in (model[0], model[1].lin1, model[1].lin2, model):
        fully_shard(unit)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        first, second = model(data(step, rank, 4, 8))
        model.set_is_last_backward(False)
        second.sum().backward(retain_graph=True)
        model.set_is_last_backward(True)
        first.sum().backward()
        for index in (1, 0):
            average_gradients(plain, lambda r: plain(data(step, r, 4, 8))[index].sum(), world_size)  # noqa: B023
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            same_shard(param.grad, expected.grad, f"step {step}: gradient of {name}")
        model.zero_grad()
        plain.zero_grad()


def test_backwards_through_one_branch_and_then_the_other_add_up():
    run_ranks(branch_gradients, 2, kind="gloo")


class Heads(nn.Module):
    """A body, then several heads on what it gives out."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.body(x)
        return sum(head(x) for head in self.heads)


def heads():
    model = seeded(Heads())
    for unit in (model.body, *model.heads, model):
        fully_shard(unit)
    with record(model) as recorder:
        for step in range(2):
            loss = model(data(step, dist.get_rank(), 4, 8)).sum()
            recorder.clear()
            loss.backward()
            names = [f"heads.{number}" for number in (2, 1, 0)] + ["body"]
            order = [(event, name) for event, name, _ in recorder.of("pre_backward", "post_backward")]
            assert order == [(event, name) for name in names for event in ("pre_backward", "post_backward")]


@beyond_torch
def test_units_that_take_the_same_tensor_are_done_one_after_the_other():
    run_ranks(heads, 2, kind="gloo")


def a_chain():
    """Units that feed one another get the very tensors given out; the graph leaves nothing behind."""
    model = seeded(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    given, taken = [], []
    for layer in model:
        layer.register_forward_pre_hook(lambda module, args: taken.append(args[0]))
        layer.register_forward_hook(lambda module, args, output: given.append(output))
    out = model(data(0, dist.get_rank(), 4, 8))
    assert all(one is other for one, other in zip(taken[1:], given[:-1], strict=True))
    given.clear()
    taken.clear()
    window = weakref.ref(model._shardwise_units[0].root.window)
    model._shardwise_units[0].root.window = Window()
    gc.disable()
    try:
        assert window() is not None
        del out
        assert window() is None
    finally:
        gc.enable()


@beyond_torch
def test_a_chain_of_units_passes_tensors_on_as_they_are_and_goes_with_its_graph():
    run_ranks(a_chain, 2, kind="gloo")


# --- prefetching by hand --------------------------------------------------------------------------------------


def forward_by_hand(ahead, expected):
    model = transformer(num_layers=4)
    layers = list(model.layers)
    for index, layer in enumerate(layers[:-1]):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + ahead])
    with record(model) as recorder:
        for step in range(3):
            loss = model(tokens(step)).sum()
            assert [(kind, unit) for kind, unit, _ in recorder.of("unshard", "reshard")] == expected
            loss.backward()
            recorder.clear()


def test_forward_prefetch_by_hand_gathers_the_named_modules_ahead():
    one_ahead = [
        ("unshard", ROOT),
        ("unshard", "layers.0"),
        ("unshard", "layers.1"),
        ("reshard", "layers.0"),
        ("unshard", "layers.2"),
        ("reshard", "layers.1"),
        ("unshard", "layers.3"),
        ("reshard", "layers.2"),
        ("reshard", "layers.3"),
    ]
    run_ranks(forward_by_hand, 2, 1, one_ahead, kind="gloo")
    two_ahead = [
        ("unshard", ROOT),
        ("unshard", "layers.0"),
        ("unshard", "layers.1"),
        ("unshard", "layers.2"),
        ("reshard", "layers.0"),
        ("unshard", "layers.3"),
        ("reshard", "layers.1"),
        ("reshard", "layers.2"),
        ("reshard", "layers.3"),
    ]
    run_ranks(forward_by_hand, 2, 2, two_ahead, kind="gloo")


def backward_by_hand(prefetched, expected):
    model = transformer(num_layers=4)
    for index, names in prefetched.items():
        model.layers[index].set_modules_to_backward_prefetch([model.layers[other] for other in names])
    with record(model) as recorder:
        for step in range(3):
            loss = model(tokens(step)).sum()
            recorder.clear()
            loss.backward()
            assert [(kind, unit) for kind, unit, _ in recorder.of("unshard", "post_backward")] == expected
            recorder.clear()


def test_backward_prefetch_by_hand_gathers_the_named_modules_ahead():
    two_ahead = [
        ("unshard", "layers.3"),
        ("unshard", "layers.2"),
        ("unshard", "layers.1"),
        ("post_backward", "layers.3"),
        ("unshard", "layers.0"),
        ("post_backward", "layers.2"),
        ("post_backward", "layers.1"),
        ("post_backward", "layers.0"),
        ("post_backward", ROOT),
    ]
    run_ranks(backward_by_hand, 2, {3: (2, 1), 2: (1, 0)}, two_ahead, kind="gloo")


def test_backward_prefetch_by_hand_replaces_the_default():
    skipping_one = [
        ("unshard", "layers.3"),
        ("unshard", "layers.1"),
        ("post_backward", "layers.3"),
        ("unshard", "layers.2"),
        ("post_backward", "layers.2"),
        ("unshard", "layers.0"),
        ("post_backward", "layers.1"),
        ("post_backward", "layers.0"),
        ("post_backward", ROOT),
    ]
    run_ranks(backward_by_hand, 2, {3: (1,)}, skipping_one, kind="gloo")


def prefetch_parity():
    """Prefetching changes when things happen, never what is computed."""
    by_hand, plain = transformer(num_layers=4), transformer(num_layers=4)
    layers = list(by_hand.layers)
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - 2) : index][::-1])
    optims = [sgd(model.parameters()) for model in (by_hand, plain)]
    for step in range(5):
        losses = []
        for model, optim in zip((by_hand, plain), optims, strict=True):
            loss = model(tokens(step, dist.get_rank())).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        same(*losses, f"step {step}: loss")
    for one, other in zip(by_hand.parameters(), plain.parameters(), strict=True):
        same(one.detach().to_local(), other.detach().to_local(), "shard")


def test_prefetching_by_hand_changes_no_bit_of_the_result():
    run_ranks(prefetch_parity, 2, kind="gloo")


class Ordered(nn.Module):
    """Runs its layers in the order it is given."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x, order):
        x = self.first(x)
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def order_that_changes():
    model = seeded(Ordered())
    for unit in (*model.layers, model):
        fully_shard(unit)
    with record(model) as recorder:
        for order in ((0, 1, 2), (2, 0, 1), (1, 2), (0, 1, 2)):
            loss = model(data(0, 0, 2, 5), order).sum()
            recorder.clear()
            loss.backward()
            last_first = [f"layers.{index}" for index in reversed(order)]
            assert [unit for _, unit, _ in recorder.of("unshard")] == last_first
            assert [unit for _, unit, _ in recorder.of("post_backward")] == [*last_first, ROOT]
            ahead = recorder.of("unshard", "post_backward")[1]
            assert ahead == ("unshard", last_first[1], "pre_backward"), (
                "gathered while the last layer runs backward"
            )


@beyond_torch  # torch shows a post-backward of units that did not run
def test_prefetching_follows_the_order_of_the_forward_that_just_ran():
    run_ranks(order_that_changes, 2, kind="gloo")


def eval_keeps_the_order():
    """A forward without backward between two steps does not disturb the prefetch."""
    model = transformer()
    with record(model) as recorder:
        for step in range(3):
            with torch.no_grad():
                model(tokens(step + 5))
            loss = model(tokens(step)).sum()
            recorder.clear()
            loss.backward()
            assert recorder.of("unshard", "post_backward") == BACKWARD_OF_LAYERS + BACKWARD_OF_ROOT


def test_a_forward_without_backward_does_not_disturb_the_prefetch():
    run_ranks(eval_keeps_the_order, 2, kind="gloo")
