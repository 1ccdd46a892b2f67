"""Runs training steps, evaluates the model on held-out samples, and finds where gradients stop being finite.

The configuration and the number of a step alone decide its samples, its learning rate and its random seed. So a
checkpoint has to restore only two numbers and the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.parts import part_of
from shardwise.train.config import Config
from shardwise.train.data import Samples
from shardwise.train.parallel import Parallel, learning_rate
from shardwise.train.sample_order import SampleOrder
from shardwise.train.team import Team

__all__ = ["Progress", "StepResult", "Stepper"]


@dataclass
class Progress:
    """The two numbers of a run, step and samples, and what it has measured so far."""

    step: int = 0
    samples: int = 0
    losses: list[float] = field(default_factory=list)
    eval_loss: float | None = None
    saved_step: int = -1
    stop_requested: bool = False
    """Whether any rank was asked to stop; all ranks learn of it in the same step."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step."""

    loss: float
    """The mean over this rank's samples."""
    lr: float
    grad_norm: float


class Stepper:
    """Runs the steps of a run, on every rank.

    Args:
        config: the settings of the run.
        parallel: the model on all ranks.
        optimizer: the optimizer of its parameters.
        samples: the data.
        order: the samples of each micro-batch.
        team: all ranks of the run.
        device: the device of this rank.
    """

    def __init__(
        self,
        config: Config,
        parallel: Parallel,
        optimizer: Optimizer,
        samples: Samples,
        order: SampleOrder,
        team: Team,
        device: torch.device,
    ) -> None:
        self._config, self._parallel, self._optimizer = config, parallel, optimizer
        self._samples, self._order, self._team, self._device = samples, order, team, device

    def step(self, progress: Progress) -> StepResult | None:
        """Runs the next step; returns None, with the weights unchanged, if its gradients are not finite."""
        optimizer, config = self._optimizer, self._config
        rate = learning_rate(config.optimizer, progress.step, config.train.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = self._forward_backward(progress)
        norm = self._parallel.clip(config.optimizer.clip)
        if norm is None:
            return None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.samples += config.train.batch_size
        return StepResult(float(loss), rate, norm)

    def evaluate(self) -> float | None:
        """Returns the mean loss of held-out samples over all ranks; None if there is nothing to evaluate."""
        samples, order = self._samples, self._order
        # With exact sums, the total number of batches must not depend on the number of ranks.
        num_batches = self._config.evaluate.batches * (order.accumulate if order.is_round_robin else 1)
        if not samples.num_held_out or not num_batches:
            return None
        self._parallel.module.eval()
        total = 0.0
        try:
            with torch.no_grad():
                for number in range(num_batches):
                    start = (number * self._team.world_size + self._team.rank) * order.micro_batch_size
                    chosen = [
                        samples.num_training + (start + offset) % samples.num_held_out
                        for offset in range(order.micro_batch_size)
                    ]
                    inputs, targets = samples.batch(chosen)
                    total += float(self._loss(inputs.to(self._device), targets.to(self._device)))
        finally:
            self._parallel.module.train()
        return self._team.sum(total)[0] / (self._team.world_size * num_batches)

    def explain_bad_gradients(self, progress: Progress) -> str:
        """Says which unit the bad gradients come from, then clears them; the weights have not changed."""

        def forward() -> None:
            for inputs, _ in self._micro_batches(progress):
                self._parallel.logits(inputs)

        where = first_bad_unit(self._parallel.module, self._parallel.units, forward, self._team)
        self._optimizer.zero_grad(set_to_none=True)
        return where

    def _forward_backward(self, progress: Progress) -> Tensor:
        """Runs all micro-batches of a step, and returns the mean loss of this rank."""
        accumulate = self._order.accumulate
        # In double precision, so that the reported loss does not depend on how a batch is cut.
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, (inputs, targets) in enumerate(self._micro_batches(progress)):
            with self._parallel.micro_batch(is_last=number == accumulate - 1):
                loss = self._loss(inputs, targets) / accumulate
                loss.backward()
            total += loss.detach()
        return total

    def _micro_batches(self, progress: Progress) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields inputs and targets of this rank's micro-batches of a step, and seeds the random numbers for them."""
        order, rank = self._order, self._team.rank
        for number in range(order.accumulate):
            # Dropout and the like depend only on the step and the rank, so there is no random state to save. With
            # exact sums they depend on the step and the micro-batch instead.
            if number == 0 or order.is_round_robin:
                self._seed(
                    progress.step, order.micro_batch_index(rank, number) if order.is_round_robin else rank
                )
            inputs, targets = self._samples.batch(order.samples(progress.samples, rank, number))
            yield inputs.to(self._device), targets.to(self._device)

    def _seed(self, step: int, number: int) -> None:
        torch.manual_seed((self._config.train.seed * 1_000_003 + step) * 4099 + number)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self._parallel.logits(inputs)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- gradients that are not finite ----------------------------------------------------------------------------------


def first_bad_unit(
    module: nn.Module, units: Mapping[str, nn.Module], forward: Callable[[], Any], team: Team
) -> str:
    """Says which unit produced the first value that is not finite. Called on every rank, before gradients are cleared.

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
    order = list(units)
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
