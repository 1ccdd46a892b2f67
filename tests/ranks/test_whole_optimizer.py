"""`shardwise.optim.whole`: matrices stepped whole by one owner each, with the results of the unsharded optimizer."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Muon

from shardwise import ConfigError, PeerFailure, RankDisagreement, StateError, clip_grad_norm_, fully_shard
from shardwise.checkpoint import Saver, Store, TrainingState, read_manifest
from shardwise.optim import whole
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from shardwise.train.team import Team
from tests.ranks.models import average_gradients, data, full, match_plain, same
from tests.ranks.tables import run_cases, slow
from tests.ranks.whole_classes import SOAP, Shampoo

pytestmark = pytest.mark.arithmetic

WIDTH = 6
CLASSES = {
    "Muon": (Muon, {"lr": 0.02, "weight_decay": 0.1}),
    "Shampoo": (Shampoo, {"lr": 0.05}),
    "SOAP": (SOAP, {"lr": 0.01}),
}


class Layer(nn.Module):
    """Sizes that do not divide by the world, rows that some ranks have none of, a matrix that is frozen."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.frozen = nn.Parameter(torch.full((7, 3), 0.5), requires_grad=False)
        self.few_rows = nn.Parameter(torch.full((1, 7), 0.5))
        self.sometimes = nn.Parameter(torch.full((2, 7), 0.5))
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x, uses):
        x = torch.tanh(self.up(x)) * self.few_rows + self.frozen.sum()
        return self.down(x * self.sometimes.sum(0) if uses else x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x, uses=True):
        for layer in self.layers:
            x = layer(x, uses)
        return self.tied(torch.tanh(self.head(x)))


class Convolutions(nn.Module):
    """Kernels of four dims, which Shampoo and SOAP reshape themselves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def shard(model, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def matrices(params):
    return [param for param in params if param.dim() >= 2]


def chosen(kind, **settings):
    """Makes the optimizer of a sharded or of a plain model."""
    optimizer_class, options = CLASSES[kind]

    def make(params):
        found = matrices(params)
        if any(isinstance(param, DTensor) for param in found):
            return whole(optimizer_class, found, **settings, **options)
        return optimizer_class(found, **options)

    return make


def loss_of(model, step, rank):
    return model(data(step, rank, 3, WIDTH), step % 3 != 1).square().mean()


def check_parity(kind, cut=None, **settings):
    options = {} if cut is None else {"shard_placement_fn": lambda param: Shard(min(cut, param.dim() - 1))}
    match_plain(
        Model, lambda model: shard(model, **options), loss_of, steps=5, optimizer=chosen(kind, **settings)
    )


def test_results_are_those_of_the_unsharded_optimizer():
    cases = [
        {"kind": "Muon"},
        {"kind": "Muon", "at_once": 1},
        {"kind": "Muon", "at_once": 2},
        {"kind": "Muon", "cut": 1},
        {"kind": "Shampoo"},
        {"kind": "SOAP", "at_once": 2},
    ]
    run_cases(check_parity, 3, cases)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Muon", "Shampoo"])
def test_after_300_steps_every_bit_is_that_of_the_unsharded_optimizer(kind):
    run_ranks(check_long, 4, kind)


def check_long(kind):
    match_plain(Model, shard, loss_of, steps=300, optimizer=chosen(kind))


def test_one_rank_needs_no_exchange():
    run_cases(check_parity, 1, [{"kind": "Muon"}, {"kind": "SOAP"}])


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


def make(kind="Muon", seed=0, **settings):
    model = shard(seeded(Model(), seed))
    return model, chosen(kind, **settings)(model.parameters())


def values_of(model):
    return {name: full(param.detach()).clone() for name, param in model.named_parameters()}


# --- what it costs ----------------------------------------------------------------------------------------------------


def costs(kind):
    model, optimizer = make(kind)
    train(model, optimizer, 1)
    fetched = optimizer.moves.bytes_sent
    train(model, optimizer, 1, first=2)
    second = optimizer.moves.bytes_sent - fetched
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    train(model, optimizer, 1, first=3)
    third = optimizer.moves.bytes_sent - fetched - second
    mine = set(optimizer.owned_parameters())
    owned = [optimizer.state[param] for param in mine if param.requires_grad]
    others = [state for param, state in optimizer.state.items() if param not in mine]
    return fetched, second, third, len(owned), all(owned), any(others)


def test_state_is_with_its_owner_and_parameters_travel_to_it_only_after_somebody_else_wrote_to_them():
    results = run_ranks(costs, 3, "Muon")
    assert sum(num_owned for _, _, _, num_owned, _, _ in results) == 9
    for fetched, second, third, _, has_state, others_have_state in results:
        assert second < third < fetched
        assert has_state
        assert not others_have_state


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def bytes_of_a_step():
    model = shard(Wide())
    optimizer = whole(Muon, model.parameters(), lr=0.02)
    sent = []
    for step in range(3):
        before = optimizer.moves.bytes_sent
        model(data(step, dist.get_rank(), 2, 64)).square().mean().backward()
        optimizer.step()
        sent.append(optimizer.moves.bytes_sent - before)
    state = sum(value.numel() for values in optimizer.state.values() for value in values.values())
    return sent[1:], state


def test_a_step_moves_gradients_once_and_parameters_once():
    results = run_ranks(bytes_of_a_step, 4)
    numel = 8 * 64 * 64
    for step in range(2):
        assert sum(sent[step] for sent, _ in results) <= 2.1 * 4 * numel
    assert [state for _, state in results] == [numel / 4] * 4


def gradients_at_once(at_once):
    model = shard(Wide())
    live, most = [], []

    class Watching(Muon):
        def step(self, closure=None):
            gradients = [param.grad for group in self.param_groups for param in group["params"]]
            live.extend(weakref.ref(gradient) for gradient in gradients)
            most.append(sum(reference() is not None for reference in live))
            del gradients
            return super().step(closure)

    optimizer = whole(Watching, model.parameters(), at_once=at_once)
    for step in range(2):
        model(data(step, dist.get_rank(), 2, 64)).square().mean().backward()
        optimizer.step()
    return max(most)


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_no_more_gradients_are_whole_at_once_than_allowed(at_once):
    # Of those that have arrived; as many more may be on their way, if more than one is allowed.
    assert run_ranks(gradients_at_once, 2, at_once) == [max(1, at_once // 2)] * 2


class SideStream:
    """Stands in for a stream of a GPU, on which movements run that are sent after a step was issued."""

    def wait_stream(self, other):
        pass

    def record_event(self):
        return None


def step_beside(at_once, in_backward):
    """Returns what happens in a step, in order, when gradients move on a stream of their own."""
    model, twin = shard(seeded(Wide())), shard(seeded(Wide()))
    events = []

    class Watching(Muon):
        def step(self, closure=None):
            events.append("step")
            return super().step(closure)

    optimizer = whole(Watching, model.parameters(), at_once=at_once, in_backward=in_backward)
    expected = whole(Muon, twin.parameters())
    moves = optimizer.moves
    moves.stream, exchange = SideStream(), moves.exchange

    def watched(*args):
        events.append("send")
        return exchange(*args)

    moves.exchange = watched
    for step in range(3):
        for trained, optim in ((model, optimizer), (twin, expected)):
            trained(data(step, dist.get_rank(), 2, 64)).square().mean().backward()
            events.clear()
            optim.step()
            optim.zero_grad()
            if optim is optimizer:
                found = list(events)
    for (name, value), other in zip(values_of(model).items(), values_of(twin).values(), strict=True):
        same(value, other, name)
    return " ".join(found)


def test_beside_compute_gradients_are_sent_once_the_step_before_is_under_way(monkeypatch):
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", SideStream)
    two, four = ["send step send step send send"] * 2, ["send step" + " send step" * 3 + " send" * 4] * 2
    assert run_ranks(step_beside, 2, 4, False) == two
    assert run_ranks(step_beside, 2, 1, False) == four
    # Three of four arrive in backward.
    assert run_ranks(step_beside, 2, 3, True) == ["step step step send step" + " send" * 4] * 2


def send_short(gradient_dtype):
    model = shard(Wide())
    optimizer = whole(Muon, model.parameters(), lr=0.02, gradient_dtype=gradient_dtype)
    twins = [nn.Parameter(full(param.detach()).clone()) for param in model.parameters()]
    plain = Muon(twins, lr=0.02)
    for step in range(3):
        before = optimizer.moves.bytes_sent
        model(data(step, dist.get_rank(), 2, 64)).square().mean().backward()
        for param, twin in zip(model.parameters(), twins, strict=True):
            twin.grad = full(param.grad).to(gradient_dtype).to(twin.dtype)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
        for param, twin in zip(model.parameters(), twins, strict=True):
            same(full(param.detach()), twin.detach(), f"step {step}")
    return optimizer.moves.bytes_sent - before


def test_gradients_travel_in_fewer_bytes_if_asked():
    assert [
        short / long
        for short, long in zip(
            run_ranks(send_short, 2, torch.bfloat16), run_ranks(send_short, 2, torch.float32), strict=True
        )
    ] == [0.75] * 2


# --- errors -----------------------------------------------------------------------------------------------------------


class Failing(Muon):
    """Raises on one rank, after having changed some of its matrices."""

    fails_on: int | None = None

    def step(self, closure=None):
        super().step(closure)
        if Failing.fails_on == dist.get_rank() and any(group["params"] for group in self.param_groups):
            raise ValueError("no root")


class FailingShampoo(Shampoo):
    """Its state is a number and lists of tensors, some of them written to and some replaced."""

    def step(self, closure=None):
        super().step(closure)
        if Failing.fails_on == dist.get_rank() and any(group["params"] for group in self.param_groups):
            raise ValueError("no root")


def fail_once(at_once, failing=Failing, kind=Muon):
    model = shard(seeded(Model()))
    twin = shard(seeded(Model()))
    optimizer = whole(failing, matrices(model.parameters()), lr=0.02, at_once=at_once)
    expected = whole(kind, matrices(twin.parameters()), lr=0.02)
    for step in range(4):
        loss_of(model, step, dist.get_rank()).backward()
        before = values_of(model)
        Failing.fails_on = None if step == 3 else step
        dist.barrier()
        if step < 3:
            with pytest.raises((ValueError, PeerFailure), match="no root"):
                optimizer.step()
            dist.barrier()
            for name, value in values_of(model).items():
                same(value, before[name], f"step {step}: {name}")
            Failing.fails_on = None
            dist.barrier()
        optimizer.step()
        optimizer.zero_grad()
        train(twin, expected, 1, first=step)
        for (name, value), other in zip(values_of(model).items(), values_of(twin).values(), strict=True):
            same(value, other, f"after step {step}: {name}")


def test_an_error_in_an_owners_step_leaves_all_ranks_where_they_were():
    cases = [
        {"at_once": 2},
        {"at_once": 8},
        {"at_once": 2, "failing": FailingShampoo, "kind": Shampoo},
    ]
    run_cases(fail_once, 3, cases)


def fail_without_undo():
    model = shard(seeded(Model()))
    optimizer = whole(Failing, matrices(model.parameters()), lr=0.02, undoes_steps=False)
    loss_of(model, 0, dist.get_rank()).backward()
    Failing.fails_on = 1
    dist.barrier()
    with pytest.raises((ValueError, PeerFailure), match="no root"):
        optimizer.step()
    dist.barrier()
    Failing.fails_on = None
    with pytest.raises((StateError, PeerFailure), match="torn"):
        loss_of(model, 0, dist.get_rank())


def test_without_undo_an_error_in_an_owners_step_is_a_torn_step():
    run_ranks(fail_without_undo, 2)


def save_and_load(folder):
    model, optimizer = make()
    train(model, optimizer, 2)
    file = f"{folder}/{dist.get_rank()}"
    torch.save(optimizer.state_dict(), file)
    state = torch.load(file, weights_only=False)
    other, again = make()
    for param, mine in zip(other.parameters(), values_of(model).values(), strict=True):
        param.data = mine
    again.load_state_dict(state)
    for trained, optim in ((model, optimizer), (other, again)):
        train(trained, optim, 1, first=2)
    for (name, value), mine in zip(values_of(model).items(), values_of(other).values(), strict=True):
        same(mine, value, name)


def test_each_rank_can_save_its_own_state_dict(tmp_path):
    run_ranks(save_and_load, 2, tmp_path, kind="gloo")


def lose_a_gradient():
    model, optimizer = make()
    loss_of(model, 0, dist.get_rank()).backward()
    if dist.get_rank() == 1:
        model.layers[0].up.weight.grad = None
    before = values_of(model)
    with pytest.raises(RankDisagreement, match=r"'layers.0.up.weight': .*rank 1 of the group has none"):
        optimizer.step()
    for name, value in values_of(model).items():
        same(value, before[name], name)
    optimizer.zero_grad()
    train(model, optimizer, 1)


def test_ranks_with_different_gradients_all_say_so_and_go_on():
    run_ranks(lose_a_gradient, 2)


def refuse():
    model = shard(seeded(Model()))
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        whole(Muon, model)
    with pytest.raises(ConfigError, match="does not step each parameter by itself"):
        whole(torch.optim.LBFGS, model.parameters())
    with pytest.raises(ConfigError, match="at_once is 0"):
        whole(Muon, matrices(model.parameters()), at_once=0)
    with pytest.raises(TypeError, match="not a subclass"):
        whole(matrices(model.parameters()), Muon)
    with pytest.raises(RankDisagreement, match="the same parameters"):
        whole(Muon, matrices(model.parameters())[: 2 + dist.get_rank()])


def test_what_cannot_be_stepped_whole_is_refused_on_every_rank():
    run_ranks(refuse, 2)


# --- state ------------------------------------------------------------------------------------------------------------


def save_with_dcp(kind, folder):
    model, optimizer = make(kind)
    train(model, optimizer, 3)
    state = get_state_dict(model, optimizer)
    dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=folder)
    train(model, optimizer, 2, first=3)
    return values_of(model)


def resume_with_dcp(kind, folder):
    model, optimizer = make(kind, seed=7)
    state = get_state_dict(model, optimizer)
    loaded = {"model": state[0], "optimizer": state[1]}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    replay(model, optimizer, 2, first=3, world=4)
    return values_of(model)


def replay(model, optimizer, steps, first, world):
    """Trains with the gradients of another number of ranks, so that values can be compared bit for bit."""
    plain = Model()
    for step in range(first, first + steps):
        for param, mine in zip(plain.parameters(), values_of(model).values(), strict=True):
            param.data.copy_(mine)
            param.grad = None
        average_gradients(plain, lambda rank: loss_of(plain, step, rank), world)  # noqa: B023
        for param, like in zip(model.parameters(), plain.parameters(), strict=True):
            if like.grad is not None:
                param.grad = distribute_tensor(
                    like.grad, param.device_mesh, param.placements, src_data_rank=None
                )
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["Muon", "Shampoo", slow("SOAP")])
def test_a_checkpoint_of_four_ranks_resumes_on_three_bit_for_bit(kind, tmp_path):
    expected = run_ranks(save_with_dcp, 4, kind, str(tmp_path))[0]
    for resumed in run_ranks(resume_with_dcp, 3, kind, str(tmp_path)):
        for name, value in expected.items():
            same(resumed[name], value, name)


def save_own(kind, folder):
    model, optimizer = make(kind)
    train(model, optimizer, 3)
    saver = Saver(Store(folder), Team.new_group(), keep=1)
    saver.save(3, TrainingState(model, optimizer).parts(), {})
    saver.wait()
    assert saver.outcomes()[0].problem is None
    train(model, optimizer, 2, first=3)
    return values_of(model)


def resume_own(kind, folder):
    model, optimizer = make(kind, seed=7)
    found = Store(folder).checkpoints()[0]
    TrainingState(model, optimizer).load(found, read_manifest(found), dist.group.WORLD)
    replay(model, optimizer, 2, first=3, world=4)
    return values_of(model)


@pytest.mark.parametrize("kind", ["Muon", slow("Shampoo")])
def test_our_own_checkpoint_of_four_ranks_resumes_on_three_bit_for_bit(kind, tmp_path):
    expected = run_ranks(save_own, 4, kind, tmp_path, kind="gloo")[0]
    for resumed in run_ranks(resume_own, 3, kind, tmp_path, kind="gloo"):
        for name, value in expected.items():
            same(resumed[name], value, name)


def exchange_states(kind):
    """A state dict goes to an unsharded optimizer and comes back."""
    optimizer_class, options = CLASSES[kind]
    model, optimizer = make(kind)
    train(model, optimizer, 2)
    options_of = StateDictOptions(full_state_dict=True)
    everything = get_optimizer_state_dict(model, optimizer, options=options_of)
    plain = Model()
    for param, mine in zip(plain.parameters(), values_of(model).values(), strict=True):
        param.data.copy_(mine)
    unsharded = optimizer_class(matrices(plain.parameters()), **options)
    set_optimizer_state_dict(plain, unsharded, everything)
    other, again = make(kind)
    for param, mine in zip(other.parameters(), values_of(model).values(), strict=True):
        param.data = mine
    again.load_state_dict(unsharded.state_dict())
    for step in (3, 4):
        average_gradients(plain, lambda rank: loss_of(plain, step, rank), dist.get_world_size())  # noqa: B023
        unsharded.step()
        unsharded.zero_grad()
    for trained, optim in ((model, optimizer), (other, again)):
        train(trained, optim, 2, first=3)
        for (name, value), param in zip(values_of(trained).items(), plain.parameters(), strict=True):
            same(value, param.detach(), name)


def test_state_dicts_are_those_of_the_unsharded_optimizer():
    # Not SOAP: a full state dict has its bases in another order in memory, and products of them round differently.
    run_cases(exchange_states, 3, [{"kind": "Muon"}, {"kind": "Shampoo"}])


def schedule_and_clip():
    rank, world = dist.get_rank(), dist.get_world_size()
    model, plain = shard(seeded(Model())), seeded(Model())
    groups = lambda model: [  # noqa: E731
        {"params": matrices(model.layers.parameters())},
        {"params": [model.head.weight], "lr": 0.1, "weight_decay": 0.0},
    ]
    optimizer, unsharded = whole(Muon, groups(model), lr=0.02), Muon(groups(plain), lr=0.02)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (optimizer, unsharded)]
    for step in range(4):
        loss_of(model, step, rank).backward()
        average_gradients(plain, lambda r: loss_of(plain, step, r), world)  # noqa: B023
        norm = clip_grad_norm_(model.parameters(), 1e9)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        torch.testing.assert_close(norm, expected)
        for each in (optimizer, unsharded, *schedules):
            each.step()
        optimizer.zero_grad()
        unsharded.zero_grad()
    assert [group["lr"] for group in optimizer.param_groups] == [0.02 / 16, 0.1 / 16]
    for (name, value), param in zip(values_of(model).items(), plain.parameters(), strict=True):
        same(value, param.detach(), name)


def test_groups_schedulers_and_clipping_work_as_ever():
    run_ranks(schedule_and_clip, 3)


def add_a_group():
    model, twin = shard(seeded(Model())), shard(seeded(Model()))
    optimizer = whole(Muon, matrices(model.layers.parameters()), lr=0.02)
    optimizer.add_param_group({"params": [model.head.weight], "lr": 0.01})
    groups = [{"params": matrices(twin.layers.parameters())}, {"params": [twin.head.weight], "lr": 0.01}]
    expected = whole(Muon, groups, lr=0.02)
    train(model, optimizer, 3)
    train(twin, expected, 3)
    for (name, value), other in zip(values_of(model).items(), values_of(twin).values(), strict=True):
        same(value, other, name)


def test_a_group_that_is_added_later_is_stepped_like_any_other():
    run_ranks(add_a_group, 2)


def replace_parameters(assign):
    models = [shard(seeded(Wide())) for _ in range(2)]
    optimizers = [whole(Muon, model.parameters(), lr=0.02) for model in models]

    def step_both(step):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(data(step, dist.get_rank(), 2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    step_both(0)
    model, twin = models
    other = {name: value.detach() * 0.5 for name, value in twin.state_dict().items()}
    model.load_state_dict({name: value.clone() for name, value in other.items()}, assign=assign)
    with torch.no_grad():
        for name, param in twin.named_parameters():
            param.copy_(other[name])
    step_both(1)
    step_both(2)
    for (name, value), mine in zip(values_of(twin).items(), values_of(model).values(), strict=True):
        same(mine, value, name)
    shown = set(model.parameters())
    assert all(param in shown for group in optimizers[0].param_groups for param in group["params"])


def test_parameters_that_were_loaded_or_replaced_are_stepped_with_the_state_they_had():
    run_cases(replace_parameters, 2, [{"assign": False}, {"assign": True}])
