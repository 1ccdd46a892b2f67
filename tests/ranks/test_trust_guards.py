"""Gradients that are not finite are named, with their unit and rank; a user's own model is checked against itself."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import ConfigError, NonFiniteGradients, fully_shard, set_trust
from shardwise.testing import check_parity, run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.divergence import Block, Model, Run, timeouts_of
from tests.ranks.models import TwoLayers, data, same_parameters
from tests.ranks.subject import beyond_torch

pytestmark = beyond_torch


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


class Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, is_on):
        ctx.is_on = is_on
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf") if ctx.is_on else grad, None


class Poisoned(Model):
    """Blocks, after the second of which a gradient may turn infinite on one rank."""

    who = None

    def forward(self, x):
        x = self.blocks[1](self.blocks[0](self.first(x)))
        return self.blocks[3](self.blocks[2](Poison.apply(x, self.who == dist.get_rank())))


def poisoned_run():
    model, plain = seeded(Poisoned()), seeded(Model())
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model), plain


def three_policies(who):
    model, plain = poisoned_run()
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    reported = {}
    heard = Heard()
    logging.getLogger("shardwise").addHandler(heard)
    try:
        for policy in ("raise", "skip", "log"):
            with timeouts_of(non_finite=policy):
                model.who = who
                model(data(0, dist.get_rank(), 3, 6)).sum().backward()
                try:
                    optim.step()
                except NonFiniteGradients as error:
                    reported[policy] = str(error)
                if policy != "log":
                    same_parameters(model, plain, policy, 0.0)
                    assert not any(state for state in optim.state.values())
                else:
                    assert any(not param.full_tensor().isfinite().all() for param in model.parameters())
                optim.zero_grad()
    finally:
        logging.getLogger("shardwise").removeHandler(heard)
    return reported, heard.said


@pytest.mark.parametrize(("kind", "who"), [("gloo", 0), ("gloo", 2)])
def test_a_gradient_that_is_not_finite_is_named_and_handled_the_same_on_all_ranks(kind, who):
    for reported, said in run_ranks(three_policies, 3, who, kind=kind):
        first = f"the gradient of 'blocks.1.up.weight' (unit 'blocks.1') is not finite on rank {who}"
        assert first in reported["raise"]
        assert [first in text for text in said] == [True, True]
        assert "skipped on all ranks" in said[0]


def finite_steps():
    with timeouts_of(non_finite="raise"):
        run = Run()
        for _ in range(3):
            run.good_step()


def test_the_guard_changes_no_step_that_is_finite():
    run_ranks(finite_steps, 2)


def test_bad_policies_are_refused():
    for changes in (
        {"checks": "often"},
        {"timeout_seconds": 0},
        {"late_seconds": 0},
        {"non_finite": "ignore"},
    ):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            set_trust(**changes)


# --- a user's own model --------------------------------------------------------------------------------------------


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(TwoLayers(), nn.Dropout(0.5), TwoLayers())
        self.head = nn.Linear(8, 3)

    def forward(self, x, scale):
        return {"logits": self.head(self.body(x)) * scale}


def parity_in_a_group():
    model = seeded(WithDropout())
    before = [param.clone() for param in model.parameters()]
    batch = {"x": data(0, dist.get_rank(), 4, 8), "scale": 2.0}

    def loss(output):
        return output["logits"].square().sum()

    def spoil(model):
        fully_shard(model)
        model.body[2].out_proj.weight.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(1.5))

    good = check_parity(model, batch, loss=loss, shard=lambda model: fully_shard(model, wrap=TwoLayers))
    bad = check_parity(model, batch, loss=loss, shard=spoil, steps=2)
    with pytest.raises(ConfigError, match="no loss can be computed"):
        check_parity(model, batch)
    assert all(map(torch.equal, before, model.parameters()))
    return bool(good), str(good), bool(bad), str(bad)


def test_parity_of_a_users_model_names_the_first_parameter_that_differs():
    for good, reported, bad, difference in run_ranks(parity_in_a_group, 3, kind="gloo"):
        assert good
        assert reported == "10 parameters over 3 steps: the same"
        assert not bad
        assert "at step 0, the gradient of 'body.2.out_proj.weight' differs by 0.5" in difference


def test_parity_starts_ranks_of_its_own_where_there_is_no_group():
    assert check_parity(Block(8), data(0, 0, 3, 6), optimizer=torch.optim.AdamW)


class Decoder(nn.Module):
    """Units that all take in what the first gave out, and use it once or twice."""

    def __init__(self, uses):
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.layers = nn.ModuleList(self.Layer(uses) for _ in range(3))

    def forward(self, x):
        encoded = torch.tanh(self.encoder(x))
        for layer in self.layers:
            x = layer(x, encoded)
        return x

    class Layer(nn.Module):
        def __init__(self, uses):
            super().__init__()
            self.takes = nn.ModuleList(nn.Linear(8, 8) for _ in range(uses))

        def forward(self, x, encoded):
            for take in self.takes:
                x = x + torch.tanh(take(encoded))
            return x


class Attending(nn.Module):
    """What is added to all keys alike changes nothing: the gradient of their bias is rounding, and nothing else."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, encoded):
        scores = self.queries(x) @ self.keys(encoded).T
        return x + scores.softmax(-1) @ self.values(encoded)


def parity_of_attention():
    torch.manual_seed(0)
    model = Decoder(1)
    model.layers = nn.ModuleList(Attending() for _ in range(3))
    batch = data(0, dist.get_rank(), 16, 8)

    def spoil(model):
        fully_shard(model, wrap=Attending)
        model.layers[1].keys.bias.register_post_accumulate_grad_hook(lambda param: param.grad.add_(1e-3))

    options = {"tolerance": 1e-5, "steps": 8}
    good = check_parity(model, batch, shard=lambda each: fully_shard(each, wrap=Attending), **options)
    return str(good), str(check_parity(model, batch, shard=spoil, **options))


def test_gradients_that_are_only_rounding_errors_are_compared_on_the_scale_of_the_others():
    for good, bad in run_ranks(parity_of_attention, 2, kind="gloo"):
        assert good == "20 parameters over 8 steps: the same"
        assert "the gradient of 'layers.1.keys.bias' differs" in bad


def parity_of_decoders():
    batch = data(0, dist.get_rank(), 16, 8)

    def of(uses, **options):
        torch.manual_seed(0)
        shard = lambda model: fully_shard(model, wrap=Decoder.Layer)  # noqa: E731  as users write it
        return str(check_parity(Decoder(uses), batch, shard=shard, **options))

    return of(1), of(2), of(2, tolerance=1e-5)


def test_a_tensor_that_units_share_and_use_twice_is_summed_unit_by_unit():
    for once, twice, roughly in run_ranks(parity_of_decoders, 2, kind="gloo"):
        assert once == "8 parameters over 3 steps: the same"
        assert "the gradient of 'encoder." in twice
        assert roughly == "14 parameters over 3 steps: the same"


def parity_of_unlike_models():
    torch.manual_seed(dist.get_rank())
    return str(check_parity(nn.Linear(4, 4), torch.ones(2, 4)))


def test_parity_says_so_if_the_models_differed_from_the_start():
    for reported in run_ranks(parity_of_unlike_models, 2, kind="gloo"):
        assert reported.startswith(
            "2 parameters over 0 steps: before the first step, parameter 'weight' differs"
        )
        assert "torch.manual_seed" in reported
