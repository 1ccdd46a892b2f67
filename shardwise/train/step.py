"""Runs training steps, evaluates the model on held-out samples, and finds where gradients stop being finite.

The configuration and the number of a step alone decide its samples, its learning rate and its random seed. So a
checkpoint has to restore only two numbers and the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.parts import part_of
from shardwise.train.config import Config
from shardwise.train.loss_scaling import LossScaling
from shardwise.train.losses import count_targets, mean_loss
from shardwise.train.optimizers import take_step
from shardwise.train.parallel import Parallel
from shardwise.train.samples import Batch, Samples
from shardwise.train.schedules import learning_rate
from shardwise.train.sources import RunData
from shardwise.train.team import Team
from shardwise.train.tensor_parallel import whole

__all__ = ["Progress", "StepResult", "Stepper", "sum_losses"]


@dataclass
class Progress:
    """The two numbers of a run, step and samples, and what it has measured so far."""

    step: int = 0
    samples: int = 0
    losses: list[float] = field(default_factory=list)
    eval_loss: float | None = None
    eval_step: int | None = None
    saved_step: int = -1
    stop_requested: bool = False
    """Whether any rank was asked to stop; all ranks learn of it in the same step."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step."""

    loss: float
    """This rank's part: their sum, divided by the number of ranks with different data, is the mean over all targets."""
    lr: float
    grad_norm: float | None
    """None: the gradients overflowed in fp16, and the step was skipped."""


class Stepper:
    """Runs the steps of a run, on every rank.

    Args:
        config: the settings of the run.
        parallel: the model on all ranks.
        optimizer: the optimizer of its parameters.
        data: the samples, and which of them each micro-batch has.
        team: all ranks of the run.
        device: the device of this rank.
    """

    def __init__(
        self,
        config: Config,
        parallel: Parallel,
        optimizer: Optimizer,
        data: RunData,
        team: Team,
        device: torch.device,
    ) -> None:
        self._config, self._parallel, self._optimizer = config, parallel, optimizer
        self._samples, self._order, self._team, self._device = data.samples, data.order, team, device
        self._grid = parallel.grid
        self.scaling = LossScaling(device) if config.sharding.precision == "fp16" else None

    def step(self, progress: Progress) -> StepResult | None:
        """Runs the next step; returns None, with the weights unchanged, if its gradients are not finite."""
        optimizer, config = self._optimizer, self._config
        rate = learning_rate(config.optimizer, progress.step, config.train.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = self._forward_backward(progress)
        if self.scaling is not None:
            self.scaling.unscale(optimizer)
        norm = self._parallel.clip(config.optimizer.clip)
        is_skipped = self.scaling is not None and self._overflowed(loss)
        if norm is None and not is_skipped:
            return None
        if norm is not None:
            take_step(optimizer, config.optimizer, on_shards=self._parallel.is_sharded)
        optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.samples += config.train.batch_size
        return StepResult(float(loss) if self._grid.has_loss else 0.0, rate, norm)

    def evaluate(self) -> float | None:
        """Returns the mean loss of held-out samples over all ranks; None if there is nothing to evaluate."""
        samples, order = self._samples, self._order
        # With exact sums, the total number of batches must not depend on the number of ranks.
        num_batches = self._config.evaluate.batches * (order.accumulate if order.is_round_robin else 1)
        if not samples.num_held_out or not num_batches:
            return None
        self._parallel.module.eval()
        batches = []
        for number in range(num_batches):
            start = (number * order.world_size + self._grid.data_rank) * order.micro_batch_size
            batches.append(
                [
                    samples.num_training + (start + offset) % samples.num_held_out
                    for offset in range(order.micro_batch_size)
                ]
            )
        try:
            with torch.no_grad(), self._parallel.with_divided_logits():
                total, num_targets = sum_losses(samples, batches, self._eval_loss, self._device)
        finally:
            self._parallel.module.train()
        counts = self._grid.has_loss
        total, all_targets = self._team.sum(total * counts, num_targets * counts)
        return total / max(1.0, all_targets)

    def explain_bad_gradients(self, progress: Progress) -> str:
        """Says which unit the bad gradients come from, then clears them; the weights have not changed."""

        def forward() -> None:
            for number, batch in enumerate(self._micro_batches(progress)):
                self._seed_micro_batch(progress.step, number)
                inputs, _, segments = batch.to(self._device)
                self._parallel.logits(inputs, segments)

        parallel = self._parallel
        where = first_bad_unit(parallel.module, parallel.units, forward, self._team, parallel.unit_names)
        self._optimizer.zero_grad(set_to_none=True)
        return where

    def _forward_backward(self, progress: Progress) -> Tensor:
        """Runs all micro-batches of a step, and returns this rank's part of the loss."""
        order = self._order
        batches = list(self._micro_batches(progress))
        counts = [count_targets(batch.targets) for batch in batches]
        num_targets = self._num_targets(sum(counts))
        # In double precision, so that the reported loss does not depend on how a batch is cut.
        total = torch.zeros((), dtype=torch.float64, device=self._device)

        def part(logits: Tensor, targets: Tensor, number: int) -> Tensor:
            # Ranks' gradients are averaged: the number of ranks turns that into the sum of their parts.
            loss = self._mean_loss(logits, targets, counts[number])
            loss = loss * (counts[number] * order.world_size / num_targets)
            total.add_(loss.detach())
            return loss if self.scaling is None else self.scaling.scaled(loss)

        if self._parallel.pipeline is not None:
            self._seed_micro_batch(progress.step, 0)
            self._parallel.pipeline.train(batches, part)
            return total
        for number, batch in enumerate(batches):
            self._seed_micro_batch(progress.step, number)
            with self._parallel.micro_batch(is_last=number == order.accumulate - 1):
                inputs, targets, segments = batch.to(self._device)
                logits = self._parallel.logits(inputs, segments)
                assert logits is not None
                part(logits, targets, number).backward()
        return total

    def _overflowed(self, loss: Tensor) -> bool:
        """Sets the scale of the next step, on all ranks; returns whether to skip this one, and not to end the run."""
        assert self.scaling is not None
        # A smaller scale does not help if the loss itself is not finite.
        return self.scaling.update() and all(self._team.collect(bool(loss.isfinite())))

    def _num_targets(self, own_targets: int) -> float:
        """Returns the number of targets of a step over all ranks, given those of this rank."""
        if self._samples.targets_of_sample is not None:
            return self._samples.targets_of_sample * self._config.train.batch_size
        return max(1.0, self._team.sum(own_targets * self._grid.has_loss)[0])

    def _micro_batches(self, progress: Progress) -> Iterator[Batch]:
        """Yields this rank's micro-batches of a step."""
        order, rank = self._order, self._grid.data_rank
        for number in range(order.accumulate):
            yield self._samples.batch(order.samples(progress.samples, rank, number))

    def _seed_micro_batch(self, step: int, number: int) -> None:
        """Seeds dropout and the like by the step and the rank, so that there is no random state to save.

        With exact sums, by the step and the micro-batch instead.
        """
        order, rank = self._order, self._grid.data_rank
        if number == 0 or order.is_round_robin:
            seed = order.micro_batch_index(rank, number) if order.is_round_robin else rank
            torch.manual_seed((self._config.train.seed * 1_000_003 + step) * 4099 + seed)

    def _eval_loss(self, batch: Batch, num_targets: int) -> Tensor:
        logits = self._parallel.logits(batch.inputs, batch.segments)
        return torch.zeros(()) if logits is None else self._mean_loss(logits, batch.targets, num_targets)

    def _mean_loss(self, logits: Tensor, targets: Tensor, num_targets: int) -> Tensor:
        own = self._config.loss
        return whole(mean_loss(logits if own is None else whole(logits), targets, own, num_targets))


def sum_losses(
    samples: Samples,
    batches: Iterable[Sequence[int]],
    loss: Callable[[Batch, int], Tensor],
    device: torch.device,
) -> tuple[float, int]:
    """Returns the sum of the losses of all targets, and their number; a batch without samples counts nothing."""
    # In double precision, where products and sums of a few numbers in single precision are exact.
    total, num_targets = 0.0, 0
    for chosen in batches:
        batch = samples.batch(chosen or [0])
        count = count_targets(batch.targets) if chosen else 0
        total += float(loss(batch.to(device), count)) * count
        num_targets += count
    return total, num_targets


# --- gradients that are not finite ----------------------------------------------------------------------------------


def first_bad_unit(
    module: nn.Module,
    units: Mapping[str, nn.Module],
    forward: Callable[[], Any],
    team: Team,
    order: Sequence[str],
) -> str:
    """Says which unit produced the first value that is not finite. Called on every rank, before gradients are cleared.

    ``units`` are those of this rank, ``order`` the names of all.

    The forward runs again with a hook on every unit's output; if all outputs are finite, gradients are searched.
    """
    in_gradients = _units_with_bad_gradients(module, units)
    seen: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def look(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(output.isfinite().all()):
                seen.append(name)

        return look

    hooks = [unit.register_forward_hook(watch(name)) for name, unit in units.items()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    # Ranks see different data: the first unit that any rank has found counts.
    found = [name for of_rank in team.collect(seen[:1]) for name in of_rank]
    if found:
        return f"the output of unit '{min(found, key=order.index)}' is the first that is not finite"
    gradients = {name for of_rank in team.collect(in_gradients) for name in of_rank}
    # Backward runs from the end, so the last unit with bad gradients is where they began.
    for name in reversed(order):
        if name in gradients:
            return f"all unit outputs are finite, but gradients are not, from unit '{name}' backwards"
    return (
        "outputs and gradients of all units are finite; the cause is outside of them, in the root or the loss"
    )


def _units_with_bad_gradients(module: nn.Module, units: Mapping[str, nn.Module]) -> list[str]:
    bad = []
    for name, param in module.named_parameters():
        if param.grad is not None and not bool(part_of(param.grad).tensor.isfinite().all()):
            bad.append(name)
    return [unit for unit in units if any(name.startswith(f"{unit}.") for name in bad)]
