"""The training loop: data in, steps, checkpoints out. Runs on every rank of a process group that is there already.

    set up ─ resume ─┬─ step ─ step ─ … ─┬─ save ─ evaluate ─ summary
                     └── save every n ───┘

A step is decided by the configuration and its number alone: its samples, its learning rate, its random seed. So what
a checkpoint must bring back is two numbers and the tensors, and a run that was stopped, or killed, and resumed on as
many ranks is, to the last bit, the run that was never stopped.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows
from torch import Tensor

import shardwise.train.data as data_room
from shardwise.checkpoint.saver import Saver
from shardwise.checkpoint.state import TrainingState
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError, StateError
from shardwise.train.config import Config, as_json
from shardwise.train.diagnosis import first_bad_unit
from shardwise.train.display import Display, Quiet
from shardwise.train.hardware import memory_bytes, peak_flops
from shardwise.train.interrupt import Interrupt
from shardwise.train.order import SampleOrder, plan_order
from shardwise.train.parallel import Parallel, learning_rate
from shardwise.train.records import RunFacts, StepRecord, Summary, keep_metrics_up_to, read_metrics
from shardwise.train.report import Report
from shardwise.train.resume import CHECKPOINTS, find_good_checkpoint
from shardwise.train.team import Team

__all__ = ["Trainer"]

_TOKENS = "tokens.bin"


@dataclass
class _Progress:
    """The two numbers of a run, and what it measured so far."""

    step: int = 0
    samples: int = 0
    losses: list[float] = field(default_factory=list)
    eval_loss: float | None = None
    saved_step: int = -1
    stops: bool = False
    """Whether some rank was asked to stop; all learn of it in the same step."""


class Trainer:
    """One run on this rank.

    Args:
        config: what to do.
        folder: of the run; the same on every rank, on a file system that all of them see.
        team: the ranks.
        device: of this rank.
        display: what rank 0 shows; other ranks show nothing.
        origin: how the run was asked for, kept in its checkpoints.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        team: Team,
        device: torch.device,
        display: Display | None = None,
        origin: dict[str, Any] | None = None,
    ) -> None:
        self.config, self.folder, self.team, self.device = config, folder, team, device
        self.display: Display = Quiet() if display is None or team.rank else display
        self._origin = origin or {}
        torch.set_num_threads(config.train.threads)
        if data_room.needs_tokenizing(config.data):
            self._tokenize()
        self._corpus, self._samples, self._order = team.together(self._open_data)
        is_exact = config.train.exact_micro_batches > 0
        self.parallel = Parallel(config.model, config.sharding, device, config.train.seed, is_exact)
        self.optimizer = self.parallel.make_optimizer(config.optimizer)
        self.state = TrainingState(self.parallel.module, self.optimizer)
        self._store = Store(folder / CHECKPOINTS)
        self._saver = Saver(
            self._store,
            team.new_group(),
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
        )
        self.progress = _Progress()

    # --- set-up -------------------------------------------------------------------------------------------------

    def _tokenize(self) -> None:
        def once() -> None:
            if not (self.folder / _TOKENS).exists():
                data_room.tokenize(self.config.data, self.folder / _TOKENS)

        self.team.from_first(once)

    def _open_data(self) -> tuple[data_room.Corpus, data_room.Samples, SampleOrder]:
        model, data, train = self.config.model, self.config.data, self.config.train
        corpus = data_room.open_corpus(data, self.folder / _TOKENS)
        samples = data_room.Samples(corpus, model.context, model.vocabulary, data.held_out)
        seed = train.seed if data.shuffle else None
        order = plan_order(samples.num_training, train, self.team.world_size, seed)
        return corpus, samples, order

    def resume(self) -> None:
        """Goes on from the newest good checkpoint."""
        found = find_good_checkpoint(self._store, self.team)
        for warning in found.warnings:
            self.display.warn(warning)
        had_state = self.state.load(found.path, found.manifest, self.team.group)
        run = found.manifest.run
        self.progress.step = self.progress.saved_step = int(run["step"])
        self.progress.samples = int(run["samples"])
        if not had_state:
            self.display.note("the checkpoint holds weights alone: the optimizer begins anew")
        if run.get("corpus") not in (None, self._corpus.fingerprint()):
            self.display.warn("the data is not what the checkpoint was trained on")
        self.display.note(
            f"resumed {found.path.name}, saved on {run.get('world_size', '?')} ranks in mode {run.get('mode', '?')}"
        )

    # --- the run ------------------------------------------------------------------------------------------------

    def run(self, stop_after: int | None = None) -> Summary:
        """Trains to the last step, or until told to stop, and leaves a checkpoint of where it got to.

        Args:
            stop_after: a step to stop after, as a signal would.

        Raises:
            StateError: gradients stopped being finite; the weights before that step are saved.
            CheckpointError: the last checkpoint could not be written.
        """
        config, progress = self.config, self.progress
        begun = time.perf_counter()
        first_step, first_samples = progress.step, progress.samples
        if self.team.rank == 0:
            keep_metrics_up_to(self.folder, progress.step)
        facts = self._facts()
        report = self._begin(facts)
        ended = "finished"
        try:
            with Interrupt() as interrupt:
                while progress.step < config.train.steps:
                    if progress.stops or progress.step == stop_after:
                        ended = "stopped"
                        break
                    record = self._step(facts, interrupt)
                    if report is not None:
                        report.step(record)
                    self.display.step(record)
                    if config.checkpoint.every and progress.step % config.checkpoint.every == 0:
                        self._save()
                    self._tell_outcomes()
                problem = self._save_and_wait()
            if problem is not None:
                raise CheckpointError(
                    f"the last checkpoint could not be written: {problem}",
                    where=str(self._store.folder),
                    fix="make room and continue with --resume; "
                    + (
                        f"the newest checkpoint is {latest.name}"
                        if (latest := self._store.latest())
                        else "none exists"
                    ),
                )
            seconds = time.perf_counter() - begun
            tokens = (progress.samples - first_samples) * config.model.context
            latest = self._store.latest()
            summary = Summary(
                ended=ended,
                folder=str(self.folder),
                step=progress.step,
                num_steps=config.train.steps,
                first_loss=next(iter((*facts.losses_before, *progress.losses)), None),
                last_loss=progress.losses[-1] if progress.losses else None,
                eval_loss=progress.eval_loss,
                seconds=seconds,
                tokens=tokens,
                tokens_per_second=tokens / seconds,
                memory_bytes=max(self.team.collect(memory_bytes(self.device))),
                checkpoint=str(latest) if latest else None,
                curve=report.draw_curve() if report is not None and progress.step > first_step else None,
            )
            if report is not None:
                report.end(summary)
            self.display.end(summary)
            return summary
        finally:
            self.display.close()
            if report is not None:
                report.close()

    def _begin(self, facts: RunFacts) -> Report | None:
        if self.team.rank:
            return None
        self._store.sweep()
        (self.folder / "config.json").write_text(
            json.dumps({**self._origin, "config": as_json(self.config)}, indent=2) + "\n"
        )
        self.display.begin(facts)
        return Report(self.folder, tensorboard=self.config.output.tensorboard)

    def _facts(self) -> RunFacts:
        config = self.config
        return RunFacts(
            name=config.name,
            folder=str(self.folder),
            model=type(config.model).__name__,
            num_parameters=self.parallel.num_parameters,
            num_tokens=self._corpus.num_tokens,
            mode=config.sharding.mode,
            precision=config.sharding.precision,
            device=self.device.type.upper(),
            world_size=self.team.world_size,
            num_steps=config.train.steps,
            first_step=self.progress.step,
            tokens_of_step=config.train.batch_size * config.model.context,
            peak_flops=peak_flops(self.device, config.sharding.precision),
            flops_of_token=self.parallel.flops_of_token,
            losses_before=tuple(record.loss for record in read_metrics(self.folder)),
        )

    # --- a step -------------------------------------------------------------------------------------------------

    def _step(self, facts: RunFacts, interrupt: Interrupt) -> StepRecord:
        config, progress = self.config, self.progress
        begun = time.perf_counter()
        rate = learning_rate(config.optimizer, progress.step, config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._forward_backward()
        norm = self.parallel.clip(config.optimizer.clip)
        if norm is None:
            raise self._bad_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.samples += config.train.batch_size
        sum_of_losses, num_asked = self.team.sum(float(loss), float(interrupt.requested))
        progress.losses.append(sum_of_losses / self.team.world_size)
        progress.stops = num_asked > 0
        is_last = progress.step == config.train.steps
        seconds = time.perf_counter() - begun
        eval_loss = None
        if is_last or (config.evaluate.every and progress.step % config.evaluate.every == 0):
            eval_loss = progress.eval_loss = self._evaluate()
        speed = facts.tokens_of_step / seconds
        peak = facts.peak_flops
        return StepRecord(
            step=progress.step,
            loss=progress.losses[-1],
            lr=rate,
            grad_norm=norm,
            seconds=seconds,
            tokens_per_second=speed,
            memory_bytes=memory_bytes(self.device),
            mfu=None if peak is None else speed * facts.flops_of_token / (peak * self.team.world_size),
            saving=self._saver.is_busy,
            eval_loss=eval_loss,
        )

    def _forward_backward(self) -> Tensor:
        """All micro-batches of a step; the mean loss of this rank."""
        accumulate = self._order.accumulate
        # In double precision, so that how a batch is cut does not show in the loss that is told.
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, (inputs, targets) in enumerate(self._micro_batches()):
            with self.parallel.micro_batch(is_last=number == accumulate - 1):
                loss = self._loss(inputs, targets) / accumulate
                loss.backward()
            total += loss.detach()
        return total

    def _micro_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The micro-batches of this rank for a step: inputs and targets, and random numbers seeded for them."""
        order, rank = self._order, self.team.rank
        for number in range(order.accumulate):
            # Dropout and the like depend on the step and the rank alone, so that there is no random state to save; if
            # ranks must not show, on the step and the micro-batch.
            if number == 0 or order.takes_turns:
                self._seed(order.number(rank, number) if order.takes_turns else rank)
            inputs, targets = self._samples.batch(order.samples(self.progress.samples, rank, number))
            yield inputs.to(self.device), targets.to(self.device)

    def _seed(self, number: int) -> None:
        torch.manual_seed((self.config.train.seed * 1_000_003 + self.progress.step) * 4099 + number)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.parallel.logits(inputs)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _evaluate(self) -> float | None:
        samples, order = self._samples, self._order
        # Where ranks must not show, as many batches in all whatever their number.
        num_batches = self.config.evaluate.batches * (order.accumulate if order.takes_turns else 1)
        if not samples.num_held_out or not num_batches:
            return None
        self.parallel.module.eval()
        total = 0.0
        try:
            with torch.no_grad():
                for number in range(num_batches):
                    start = (number * self.team.world_size + self.team.rank) * order.micro_batch_size
                    chosen = [
                        samples.num_training + (start + offset) % samples.num_held_out
                        for offset in range(order.micro_batch_size)
                    ]
                    inputs, targets = samples.batch(chosen)
                    total += float(self._loss(inputs.to(self.device), targets.to(self.device)))
        finally:
            self.parallel.module.train()
        return self.team.sum(total)[0] / (self.team.world_size * num_batches)

    def _bad_gradients(self) -> StateError:
        """The weights are still those of the step before: they are saved, and the run is to end with this error."""

        def forward() -> None:
            for inputs, _ in self._micro_batches():
                self.parallel.logits(inputs)

        where = first_bad_unit(self.parallel.module, self.parallel.units, forward, self.team)
        self.optimizer.zero_grad(set_to_none=True)
        self._save_and_wait()
        return StateError(
            f"the gradients of step {self.progress.step + 1} are not finite: {where}",
            where=f"step {self.progress.step + 1}, samples from {self.progress.samples}",
            fix="lower optimizer.lr or look at the data, and continue with --resume "
            f"{self.folder}: the weights before this step are saved",
        )

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _save_and_wait(self) -> str | None:
        """Leaves a checkpoint of this very step, trying again if one failed; the problem, if there was one."""
        # First of all the save under way ends, and so it has ended for every rank that asks what became of it.
        self._saver.wait()
        problem = self._tell_outcomes()
        if self.progress.saved_step != self.progress.step:
            self._save()
            self._saver.wait()
            problem = self._tell_outcomes()
        return problem

    def _save(self) -> None:
        progress = self.progress
        progress.saved_step = progress.step
        run = {
            "step": progress.step,
            "samples": progress.samples,
            "corpus": self._corpus.fingerprint(),
            "world_size": self.team.world_size,
            "mode": self.config.sharding.mode,
            "config": as_json(self.config),
            "hugging_face": self.config.model.hugging_face_config(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            **self._origin,
        }
        self._saver.save(progress.step, self.state.parts(), run)

    def _tell_outcomes(self) -> str | None:
        """Says what became of saves; the problem of the last one, if it had one."""
        problem = None
        for outcome in self._saver.outcomes():
            problem = outcome.problem
            if problem is None:
                self.display.note(f"saved {outcome.path.name} in {outcome.seconds:.1f} s")
            else:
                if self.progress.saved_step == outcome.step:
                    self.progress.saved_step = -1
                if self.team.rank == 0:
                    self.display.warn(
                        f"the checkpoint of step {outcome.step} could not be written, training goes on: {problem}"
                    )
        return problem
