"""The catalogue of errors that one rank can make, as cases on a small model.

Each case is a function that runs on all ranks; its arguments are a `Run` and whether this rank errs. The cases are used
by tests and by `benchmarks/trust.py`, which shows how torch's own `fully_shard` reacts to them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from shardwise import (
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    TrustPolicy,
    clip_grad_norm_,
    set_trust,
)
from shardwise.comm.channels import gloo
from shardwise.comm.channels import threads as thread_channels
from shardwise.comm.watchdog import diagnosis
from shardwise.comm.watchdog import thread as watchdog_thread
from shardwise.testing.workloads import seeded
from tests.ranks.models import average_gradients, data, same, sgd
from tests.ranks.subject import TORCH_IS_THE_SUBJECT, MixedPrecisionPolicy, fully_shard

WIDTH = 6


class Boom(Exception):
    """An error raised by a user's code."""


class OutOfMemory(Boom, torch.OutOfMemoryError):
    """The error of a device that is out of memory, raised by hand."""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(WIDTH, width)
        self.down = nn.Linear(width, WIDTH)
        self.uses_bias = True
        self.boom = None

    def forward(self, x):
        if self.boom == "forward":
            raise Boom
        x = x + self.down(torch.tanh(self.up(x)) if self.uses_bias else linear(x, self.up.weight))
        if self.boom == "backward":
            x.register_hook(raise_boom)
        return x


def raise_boom(*_):
    raise Boom


class Model(nn.Module):
    """Blocks in an order that tests can change; the last one has another size."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(width) for width in (8, 8, 8, 12))
        self.order = (0, 1, 2, 3)

    def forward(self, x):
        x = self.first(x)
        for number in self.order:
            x = self.blocks[number](x)
        return x


def sharded(api, **options):
    model = seeded(Model())
    if api == "wrapper":
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, **options
        )
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def loss_of(model, step, rank, num_rows=3):
    return model(data(step, rank, num_rows, WIDTH)).square().sum() / (3 * WIDTH)


class Run:
    """A sharded model in training, and a plain one that takes the same good steps."""

    def __init__(self, api="fully_shard", **options):
        self.api = api
        self.model, self.plain = sharded(api, **options), seeded(Model())
        self.optim, self.plain_optim = sgd(self.model.parameters()), sgd(self.plain.parameters())
        self.step = 0

    def loss(self):
        return loss_of(self.model, self.step, dist.get_rank())

    def take(self, *order):
        model = self.model.module if self.api == "wrapper" else self.model
        model.order = order

    def block(self, number):
        block = self.model.blocks[number]
        return block.module if self.api == "wrapper" else block

    def bad_step(self):
        """Takes a step in which a rank errs."""
        self.loss().backward()
        self.optim.step()

    def be_struck(self, strike):
        self.block(2).register_forward_pre_hook(strike)

    def go_back(self):
        """Undoes an interrupted step; that step has changed no parameter."""
        self.optim.zero_grad()

    def good_step(self, num_rows=lambda rank: 3):
        """Takes a step and checks that its loss is bitwise right, and with it the parameters."""
        self.take(0, 1, 2, 3)
        self.optim.zero_grad()
        loss = loss_of(self.model, self.step, dist.get_rank(), num_rows(dist.get_rank()))
        loss.backward()
        self.optim.step()
        losses = average_gradients(
            self.plain,
            lambda rank: loss_of(self.plain, self.step, rank, num_rows(rank)),
            dist.get_world_size(),
        )
        # torch sums in another order.
        tolerance = 1e-5 if TORCH_IS_THE_SUBJECT else 0.0
        same(loss.detach(), losses[dist.get_rank()], f"loss of step {self.step}", tolerance)
        self.plain_optim.step()
        self.plain_optim.zero_grad()
        self.step += 1


# --- errors of one rank: each case runs on all ranks; `errs` is true on the rank that errs ---------------------------


def another_layer_of_the_same_shape(run, errs):
    run.take(*((0, 2, 1, 3) if errs else (0, 1, 2, 3)))
    run.bad_step()


def another_layer_of_another_shape(run, errs):
    run.take(*((0, 3, 1, 2) if errs else (0, 1, 2, 3)))
    run.bad_step()


def an_unused_layer(run, errs):
    run.take(*((0, 1, 3) if errs else (0, 1, 2, 3)))
    run.bad_step()


def an_extra_forward(run, errs):
    if errs:
        run.loss()
    run.bad_step()


def an_extra_forward_without_grad(run, errs):
    if errs:
        with torch.no_grad():
            run.loss()
    run.bad_step()


def a_missing_forward(run, errs):
    if not errs:
        run.loss().backward()
    run.optim.step()


def no_backward(run, errs):
    loss = run.loss()
    if not errs:
        loss.backward()
    run.optim.step()


def backward_twice(run, errs):
    loss = run.loss()
    loss.backward(retain_graph=errs)
    if errs:
        loss.backward()
    run.optim.step()


def another_number_of_micro_batches(run, errs):
    for _ in range(3 if errs else 2):
        run.loss().backward()
    run.optim.step()


def another_requires_grad(run, errs):
    run.block(1).up.weight.requires_grad_(not errs)
    try:
        run.bad_step()
    finally:
        run.block(1).up.weight.requires_grad_(True)


def another_resharding(run, errs):
    if run.api == "wrapper":
        strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
        fresh = Run(run.api, sharding_strategy=strategies[errs])
        fresh.loss().backward()
        fresh.optim.step()
        return
    run.model.blocks[1].set_reshard_after_forward(not errs)
    try:
        run.bad_step()
    finally:
        run.model.blocks[1].set_reshard_after_forward(True)


def no_sync_on_one(run, errs):
    if run.api == "wrapper":
        with run.model.no_sync() if errs else nullcontext():
            run.loss().backward()
    else:
        run.model.set_requires_gradient_sync(not errs)
        try:
            run.loss().backward()
        finally:
            run.model.set_requires_gradient_sync(True)
    run.optim.step()


def eval_on_one(run, errs):
    with torch.set_grad_enabled(not errs):
        loss = run.loss()
    if not errs:
        loss.backward()
    run.optim.step()


def a_step_on_the_others_only(run, errs):
    run.loss().backward()
    if not errs:
        run.optim.step()
    run.loss()


def an_exception_in_forward(run, errs):
    run.block(2).boom = "forward" if errs else None
    try:
        run.bad_step()
    finally:
        run.block(2).boom = None


def an_exception_in_backward(run, errs):
    run.block(1).boom = "backward" if errs else None
    try:
        run.bad_step()
    finally:
        run.block(1).boom = None


def bad_step_under(run, hook):
    try:
        run.bad_step()
    finally:
        if hook is not None:
            hook.remove()


def an_exception_in_a_hook(run, errs):
    hook = run.block(2).up.weight.register_post_accumulate_grad_hook(raise_boom) if errs else None
    bad_step_under(run, hook)


def clipping_on_one(run, errs):
    run.loss().backward()
    if errs:
        clip = torch.nn.utils.clip_grad_norm_ if TORCH_IS_THE_SUBJECT else clip_grad_norm_
        clip(run.model.parameters(), 1.0)
    run.optim.step()


def a_gradient_on_the_others_only(run, errs):
    run.block(2).uses_bias = not errs
    try:
        run.bad_step()
    finally:
        run.block(2).uses_bias = True


def running_out_of_memory(run, errs):
    hook = run.block(2).register_forward_pre_hook(out_of_memory) if errs else None
    bad_step_under(run, hook)


def out_of_memory(*_):
    raise OutOfMemory


def another_dtype_policy(run, errs):
    dtype = torch.bfloat16 if errs else None
    if run.api == "wrapper":
        fresh = Run(run.api, mixed_precision=MixedPrecision(reduce_dtype=dtype))
    else:
        fresh = Run(run.api, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    fresh.loss().backward()
    fresh.optim.step()


def an_exit_in_forward(run, errs):
    hook = run.block(2).register_forward_pre_hook(leave) if errs else None
    bad_step_under(run, hook)


def leave(*_):
    sys.exit(1)


def an_interrupt_in_backward(run, errs):
    hook = run.block(1).register_full_backward_hook(interrupt) if errs else None
    bad_step_under(run, hook)


def interrupt(*_):
    raise KeyboardInterrupt


def a_state_dict_on_one(run, errs):
    """With ``fully_shard`` it is no collective, so the next step must be right. A wrapper's gathers, as in torch."""
    if errs:
        run.model.state_dict()
    run.good_step()


def an_empty_batch(run, errs):
    reported = [None] * dist.get_world_size()
    dist.all_gather_object(reported, errs)
    run.good_step(lambda rank: 0 if reported[rank] else 3)


DIVERGING = [
    another_layer_of_the_same_shape,
    another_layer_of_another_shape,
    an_unused_layer,
    an_extra_forward,
    an_extra_forward_without_grad,
    a_missing_forward,
    no_backward,
    backward_twice,
    another_number_of_micro_batches,
    another_requires_grad,
    another_resharding,
    no_sync_on_one,
    eval_on_one,
    a_step_on_the_others_only,
    clipping_on_one,
    a_gradient_on_the_others_only,
]
DIFFERING = [another_dtype_policy]
BREAKING_OFF = [
    an_exception_in_forward,
    an_exception_in_backward,
    an_exception_in_a_hook,
    running_out_of_memory,
    an_exit_in_forward,
    an_interrupt_in_backward,
]


LONG_SECONDS = 120.0
"""Longer than any wait without an error, however busy the machine is."""

# The watchdog's polling intervals, short here; and limits that a busy machine might exceed, long here.
_WAITS = {
    (watchdog_thread, "_TICK_SECONDS"): 0.01,
    (watchdog_thread, "_IDLE_SECONDS"): 0.05,
    (gloo, "_DRAIN_SECONDS"): 0.02,
    (thread_channels, "_DRAIN_SECONDS"): 0.02,
    (diagnosis, "_STATUS_GRACE_SECONDS"): LONG_SECONDS,
    (gloo, "_PEERS_ANSWER_SECONDS"): LONG_SECONDS,
}
_USUAL_WAITS = {place: getattr(*place) for place in _WAITS}


def _set_waits(waits):
    for place, seconds in waits.items():
        setattr(*place, seconds)


class _Inside:
    """The number of ranks of this process inside ``timeouts_of``, and the policy before the first entered."""

    lock = threading.Lock()
    num_ranks = 0
    before = TrustPolicy()


@contextmanager
def timeouts_of(**changes):
    """Sets a policy and short polling intervals for the process, and restores both, since other tests run in it."""
    with _Inside.lock:
        before = set_trust(**changes)
        if _Inside.num_ranks == 0:
            _Inside.before = before
            _set_waits(_WAITS)
        _Inside.num_ranks += 1
    try:
        yield
    finally:
        with _Inside.lock:
            _Inside.num_ranks -= 1
            if _Inside.num_ranks == 0:
                set_trust(**asdict(_Inside.before))
                _set_waits(_USUAL_WAITS)


# --- cases that end or stop a rank: only for ranks that are separate processes ---------------------------------------


class Struck:
    """A forward hook that sends its rank a signal, and sleeps if the rank survives it."""

    def __init__(self, signal_number, seconds):
        self.signal_number = signal_number
        self.seconds = seconds

    def __call__(self, *_):
        os.kill(os.getpid(), self.signal_number)
        time.sleep(self.seconds)


def strike(run, errs, signal_number, seconds=60.0):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if errs:
        run.be_struck(Struck(signal_number, seconds))
    run.bad_step()


def a_rank_that_is_killed(run, errs):
    strike(run, errs, signal.SIGKILL)


def a_rank_that_is_stopped(run, errs):
    strike(run, errs, signal.SIGSTOP)


def a_rank_that_is_terminated(run, errs):
    strike(run, errs, signal.SIGTERM)


def a_rank_that_exits(run, errs):
    run.good_step()
    if errs:
        sys.exit()
    run.bad_step()


def a_slow_rank(run, errs):
    if errs:
        time.sleep(10)
    run.good_step()


def in_a_debugger(is_over):
    """Waits in a frame of a debugger's file, as at its prompt, until ``is_over()``."""
    scope = {"time": time, "is_over": is_over}
    prompt = "def prompt():\n    while not is_over():\n        time.sleep(0.02)\n"
    exec(compile(prompt, "/usr/lib/python3/pdb.py", "exec"), scope)
    scope["prompt"]()


def a_debugger_on_one(run, errs):
    if errs:
        until = time.monotonic() + 22.0
        in_a_debugger(lambda: time.monotonic() > until)
    run.good_step()


STRIKING = [a_rank_that_is_killed, a_rank_that_is_stopped, a_rank_that_is_terminated, a_rank_that_exits]
HARMLESS = [a_state_dict_on_one, an_empty_batch, a_slow_rank, a_debugger_on_one]
