"""The same catalogue for ZeroRedundancyOptimizer: what a rank may do wrong around its step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise import ZeroRedundancyOptimizer
from shardwise.testing.workloads import seeded
from tests.ranks.divergence import Boom, Model, OutOfMemory, loss_of
from tests.ranks.models import average_gradients, same_parameters, sgd


class ZeroRun:
    """A model on every rank, stepped by a sharded optimizer, and one beside it stepped by a plain one."""

    api = "zero"

    def __init__(self, **options):
        self.model, self.plain = seeded(Model()), seeded(Model())
        self.optim = ZeroRedundancyOptimizer(
            self.model.parameters(), Breakable, lr=0.02, momentum=0.9, **options
        )
        self.plain_optim = sgd(self.plain.parameters())
        self.step = 0

    def gradients(self):
        """Those of all ranks on average, as data parallelism leaves them."""
        self.optim.zero_grad()
        average_gradients(
            self.model, lambda rank: loss_of(self.model, self.step, rank), dist.get_world_size()
        )

    def good_step(self):
        self.gradients()
        for param, plain in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            plain.grad = param.grad.clone()
        self.optim.step()
        self.plain_optim.step()
        same_parameters(self.model, self.plain, f"step {self.step}: ")
        self.step += 1

    def bad_step(self):
        self.gradients()
        self.optim.step()

    def be_struck(self, strike):
        self.optim.optim.register_step_pre_hook(strike)

    def go_back(self):
        """As after loading a checkpoint: what a step that broke off has changed is taken back."""
        with torch.no_grad():
            for param, plain in zip(self.model.parameters(), self.plain.parameters(), strict=True):
                param.copy_(plain)
        self.optim.load_state_dict(self.plain_optim.state_dict())


class Breakable(torch.optim.SGD):
    boom = None

    def step(self, closure=None):
        super().step()
        if self.boom is not None:
            raise self.boom


def a_gradient_on_the_others_only(run, errs):
    run.gradients()
    if errs:
        run.model.blocks[2].up.bias.grad = None
    run.optim.step()


def another_requires_grad(run, errs):
    run.model.blocks[1].up.weight.requires_grad_(not errs)
    try:
        run.gradients()
        run.optim.step()
    finally:
        run.model.blocks[1].up.weight.requires_grad_(True)


def an_extra_step(run, errs):
    run.gradients()
    if errs:
        run.optim.step()
    run.optim.consolidate_state_dict()


def a_missing_step(run, errs):
    run.gradients()
    if not errs:
        run.optim.step()
    run.optim.consolidate_state_dict()


def a_closure_on_one(run, errs):
    run.gradients()
    run.optim.step(*([lambda: None] if errs else []))


def a_state_dict_on_one(run, errs):
    if errs:
        run.optim.consolidate_state_dict()
    run.good_step()


def another_set_of_options(run, errs):
    ZeroRun(parameters_as_bucket_view=errs)


def another_model(run, errs):
    params = list(run.model.parameters())
    ZeroRedundancyOptimizer(params[errs:], torch.optim.SGD, lr=0.1)


def break_step(run, errs, error):
    run.gradients()
    run.optim.optim.boom = error if errs else None
    try:
        run.optim.step()
    finally:
        run.optim.optim.boom = None
    # The others are told when they next come together.
    run.optim.step()


def an_exception_in_the_step(run, errs):
    break_step(run, errs, Boom())


def running_out_of_memory(run, errs):
    break_step(run, errs, OutOfMemory())


def an_exit_in_the_step(run, errs):
    break_step(run, errs, SystemExit(1))


def an_interrupt_in_the_step(run, errs):
    break_step(run, errs, KeyboardInterrupt())


DIVERGING = [
    a_gradient_on_the_others_only,
    another_requires_grad,
    an_extra_step,
    a_missing_step,
    a_closure_on_one,
    a_state_dict_on_one,
]
DIFFERING = [another_set_of_options, another_model]
BREAKING_OFF = [
    an_exception_in_the_step,
    running_out_of_memory,
    an_exit_in_the_step,
    an_interrupt_in_the_step,
]
