"""One step of a run: which samples, what becomes of them, and how held-out ones are judged.

A step is decided by the configuration and its number alone: its samples, its learning rate, its random seed. So what a
checkpoint must bring back is two numbers and the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows
from torch import Tensor
from torch.optim import Optimizer

from shardwise.train.config import Config
from shardwise.train.data import Samples
from shardwise.train.non_finite import first_bad_unit
from shardwise.train.parallel import Parallel, learning_rate
from shardwise.train.sample_order import SampleOrder
from shardwise.train.team import Team

__all__ = ["Progress", "StepResult", "Stepper"]


@dataclass
class Progress:
    """The two numbers of a run, and what it measured so far."""

    step: int = 0
    samples: int = 0
    losses: list[float] = field(default_factory=list)
    eval_loss: float | None = None
    saved_step: int = -1
    stops: bool = False
    """Whether some rank was asked to stop; all learn of it in the same step."""


@dataclass(frozen=True)
class StepResult:
    """What a step came to."""

    loss: float
    """The mean of this rank's samples."""
    lr: float
    grad_norm: float


class Stepper:
    """Steps a model, on every rank.

    Args:
        config: of the run.
        parallel: the model on all ranks.
        optimizer: of its parameters.
        samples: the data.
        order: which of them come when.
        team: the ranks.
        device: of this rank.
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
        """The step that comes next; None if its gradients are not finite: then nothing was stepped."""
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
        """The loss of held-out samples, all ranks' mean; None if there are none."""
        samples, order = self._samples, self._order
        # Where ranks must not show, as many batches in all whatever their number.
        num_batches = self._config.evaluate.batches * (order.accumulate if order.takes_turns else 1)
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
        """Which unit they come from; the step's gradients are still there, and gone afterwards."""

        def forward() -> None:
            for inputs, _ in self._micro_batches(progress):
                self._parallel.logits(inputs)

        where = first_bad_unit(self._parallel.module, self._parallel.units, forward, self._team)
        self._optimizer.zero_grad(set_to_none=True)
        return where

    def _forward_backward(self, progress: Progress) -> Tensor:
        """All micro-batches of a step; the mean loss of this rank."""
        accumulate = self._order.accumulate
        # In double precision, so that how a batch is cut does not show in the loss that is told.
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, (inputs, targets) in enumerate(self._micro_batches(progress)):
            with self._parallel.micro_batch(is_last=number == accumulate - 1):
                loss = self._loss(inputs, targets) / accumulate
                loss.backward()
            total += loss.detach()
        return total

    def _micro_batches(self, progress: Progress) -> Iterator[tuple[Tensor, Tensor]]:
        """The micro-batches of this rank for a step: inputs and targets, and random numbers seeded for them."""
        order, rank = self._order, self._team.rank
        for number in range(order.accumulate):
            # Dropout and the like depend on the step and the rank alone, so that there is no random state to save; if
            # ranks must not show, on the step and the micro-batch.
            if number == 0 or order.takes_turns:
                self._seed(progress.step, order.number(rank, number) if order.takes_turns else rank)
            inputs, targets = self._samples.batch(order.samples(progress.samples, rank, number))
            yield inputs.to(self._device), targets.to(self._device)

    def _seed(self, step: int, number: int) -> None:
        torch.manual_seed((self._config.train.seed * 1_000_003 + step) * 4099 + number)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self._parallel.logits(inputs)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
