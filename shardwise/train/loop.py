"""The training loop, which runs on every rank of an existing process group: data, steps, checkpoints, summary.

    set up ─ resume ─┬─ step ─ step ─ … ─┬─ save ─ evaluate ─ summary
                     └── save every n ───┘

A run that was stopped or killed, and resumed on the same number of ranks, is bitwise equal to one that was never
stopped: see `step` and `checkpointing`. Ranks are started, and the run's folder is locked, by `command`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.store import Store
from shardwise.checkpoint.training_state import TrainingState
from shardwise.errors import CheckpointError, StateError
from shardwise.policies import set_trust
from shardwise.train.callbacks import CallbackList, Run
from shardwise.train.checkpointing import RunCheckpoints
from shardwise.train.config import Config
from shardwise.train.display import Display, FaultTolerantDisplay, Quiet
from shardwise.train.float8 import check_float8
from shardwise.train.hardware import memory_bytes, peak_flops
from shardwise.train.interrupt import Interrupt
from shardwise.train.kept_files import KeptFiles
from shardwise.train.llama import Llama
from shardwise.train.loggers import chosen_loggers
from shardwise.train.optimizers import make_optimizer
from shardwise.train.packing_check import check_packing
from shardwise.train.parallel import Parallel
from shardwise.train.prediction import PeakCheck
from shardwise.train.profiling import StepProfiler
from shardwise.train.rank_grid import described, own_grid
from shardwise.train.records import (
    RunFacts,
    StepRecord,
    Summary,
    command_to_go_on,
    counted,
    format_count,
    read_metrics,
    recent_loss,
    short_path,
)
from shardwise.train.report import Report, Unwritten
from shardwise.train.run_folder import CHECKPOINTS, PROFILE
from shardwise.train.settings import as_json
from shardwise.train.sources import open_data, tokenize_sources
from shardwise.train.step import Progress, Stepper
from shardwise.train.team import Team

__all__ = ["Trainer"]

Tell = Callable[..., None]


class Trainer:
    """One run, on this rank.

    Args:
        config: the settings of the run.
        folder: the run's folder, the same on every rank, on a file system that all ranks see.
        team: all ranks of the run.
        device: the device of this rank.
        display: shows the run on rank 0; other ranks show nothing.
        origin: the recipe and settings asked for, kept in ``config.json`` and in checkpoints.
        tell: called with what this rank begins to do, and the most memory it has had.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        team: Team,
        device: torch.device,
        display: Display | None = None,
        origin: dict[str, Any] | None = None,
        tell: Tell = lambda *_: None,
    ) -> None:
        # Before anything is read or written: the model's files say how long sequences and tokens may be.
        config = replace(config, model=team.together(config.model.resolved))
        self.config, self.folder, self.team, self.device = config, folder, team, device
        self._unwritten = Unwritten()
        self.display: Display = FaultTolerantDisplay(
            Quiet() if display is None or team.rank else display, self._on_display_error
        )
        self._origin = origin or {}
        self._tell = tell
        self._tell("reading the data")
        torch.set_num_threads(config.train.threads)
        team.together(lambda: check_float8(config.sharding.float8, device))
        if config.train.late_seconds:
            set_trust(late_seconds=config.train.late_seconds)
        vocabulary = config.model.vocabulary
        team.from_first(lambda: tokenize_sources(config.data, folder, self.display.note, vocabulary))
        grid = team.together(lambda: own_grid(config.sharding))
        self._data = team.together(lambda: open_data(config, folder, grid.data_world_size))
        if self._data.samples.remark:
            self.display.note(self._data.samples.remark)
        self._kept = KeptFiles(folder, config, self._origin, self.display, self._unwritten)
        team.from_first(self._kept.keep_tokenizer)
        self._tell("building the model")
        is_exact = config.train.exact_micro_batches > 0
        self.parallel = Parallel(config.model, config.sharding, device, config.train.seed, is_exact)
        if config.data.packing and not isinstance(config.model, Llama):
            limits = config.model.context, config.model.vocabulary
            team.together(lambda: check_packing(self.parallel, *limits, device))
        self.optimizer = make_optimizer(self.parallel, config.optimizer)
        self.state = TrainingState(self.parallel.module, self.optimizer, self.parallel.elsewhere)
        self._stepper = Stepper(config, self.parallel, self.optimizer, self._data, team, device)
        self._store = Store(folder / CHECKPOINTS)
        entries = {"corpus": self._data.fingerprint, **self._origin}
        self._checkpoints = RunCheckpoints(
            self._store,
            self.state,
            config,
            team,
            self.display,
            entries,
            self._kept.ensure_folder,
            self._on_saved,
            self._stepper.scaling,
        )
        self.progress = Progress()
        self._profiler: StepProfiler | None = None
        self._on_stop = "stopping after this step …  (Ctrl-C again: at once, without saving)"
        self._callbacks: CallbackList | None = None

    # --- set-up -------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Loads the newest good checkpoint, to continue from it.

        Raises:
            ConfigError: it has more steps than the run is to have.
        """
        progress = self.progress
        self._tell("reading a checkpoint")
        self._checkpoints.resume(progress)
        for record in read_metrics(self.folder):
            if record.eval_loss is not None and record.step <= progress.step:
                progress.eval_loss, progress.eval_step = record.eval_loss, record.step

    # --- the run ------------------------------------------------------------------------------------------------

    def run(self, stop_after: int | None = None, profile: int = 0) -> Summary:
        """Trains to the last step, or until asked to stop, and saves a checkpoint of the step it has reached.

        Args:
            stop_after: the step to stop after, as after a signal.
            profile: how many steps to profile.

        Raises:
            StateError: gradients are not finite, and the weights before that step are saved; or, on rank 0 at the
                end, something other than checkpoints could not be written.
            CheckpointError: the last checkpoint could not be written.
        """
        begun = time.perf_counter()
        first_samples = self.progress.samples
        facts = self._facts()
        report = self._begin_report(facts)
        callbacks, summary = self._begin_callbacks(facts), None
        self._profiler = self._make_profiler(profile, facts) if profile else None
        try:
            self.team.together(callbacks.start)
            with Interrupt(self._on_stop_request) as interrupt:
                ended = self._train(facts, report, stop_after, interrupt)
                summary = self._summary(facts, ended, time.perf_counter() - begun, first_samples, report)
                if report is not None:
                    report.end(summary)
                self.display.end(summary)
        finally:
            callbacks.end(summary)
            self.display.close()
            if report is not None:
                report.close()
        self._unwritten.raise_if_any(summary)
        return summary

    def _train(
        self, facts: RunFacts, report: Report | None, stop_after: int | None, interrupt: Interrupt
    ) -> str:
        """Runs the steps, saves the last checkpoint, and returns how the run ended."""
        config, progress = self.config, self.progress
        ended = "finished"
        peak = PeakCheck(config, self.team, self.device, self.display.note)
        while progress.step < config.train.steps:
            if progress.stop_requested or progress.step == stop_after:
                ended = "stopped"
                break
            with self._profiler.step(progress.step + 1) if self._profiler else contextlib.nullcontext():
                record = self._step(facts, interrupt)
            peak.compare()
            if report is not None:
                report.step(record)
            self.display.step(record)
            if self._callbacks is not None:
                self._callbacks.step(record)
            if config.checkpoint.every and progress.step % config.checkpoint.every == 0:
                self._checkpoints.save(progress)
            self._checkpoints.report_outcomes(progress)
            if self._profiler is not None and self._profiler.is_done:
                self._write_profile()
        self._write_profile()
        self._on_stop = "stopping after the checkpoint …  (Ctrl-C again: at once, without it)"
        self._tell(f"saving step {progress.step}", memory_bytes(self.device))
        problem = self._checkpoints.save_and_wait(progress)
        self._on_stop = "stopping after the summary …  (Ctrl-C again: at once, without it)"
        if problem is None:
            return ended
        raise CheckpointError(
            f"the last checkpoint could not be written: {problem}",
            where=str(self._store.folder),
            fix="free disk space or make the folder writable, and "
            + (
                f"continue from {latest.name} with --resume {self.folder}"
                if (latest := self._store.latest())
                else "start again: there is no checkpoint of this run"
            ),
        )

    def _summary(
        self, facts: RunFacts, ended: str, seconds: float, first_samples: int, report: Report | None
    ) -> Summary:
        progress = self.progress
        tokens = (progress.samples - first_samples) * self.config.model.context
        latest = self._store.latest()
        losses = [*facts.losses_before, *progress.losses]
        return Summary(
            ended=ended,
            folder=str(self.folder),
            step=progress.step,
            num_steps=self.config.train.steps,
            first_loss=losses[0] if losses else None,
            last_loss=recent_loss(losses),
            eval_loss=progress.eval_loss,
            seconds=seconds,
            tokens=tokens,
            tokens_per_second=tokens / seconds,
            memory_bytes=max(self.team.collect(memory_bytes(self.device))),
            checkpoint=str(latest) if latest else None,
            curve=report.draw_curve() if report is not None and progress.step > facts.first_step else None,
            unwritten=self._unwritten.lines(),
            skipped=0 if self._stepper.scaling is None else self._stepper.scaling.skipped,
            eval_step=progress.eval_step,
            go_on_with=command_to_go_on(
                str(self._origin.get("recipe", "")), self.folder, progress.step, self.config.train.steps
            )
            if latest
            else "",
        )

    def _begin_report(self, facts: RunFacts) -> Report | None:
        self.team.from_first(self._kept.write_config)
        if self.team.rank:
            return None
        self._store.sweep()
        self.display.begin(facts)
        return Report(
            self.folder,
            self.display,
            self._unwritten,
            self._kept.other_run,
            from_step=facts.first_step,
        )

    def _begin_callbacks(self, facts: RunFacts) -> CallbackList:
        settings = as_json(self.config)
        run = Run(self.folder, facts, settings, self.team.rank, self.parallel.module, self.optimizer)
        callbacks = (*chosen_loggers(self.config.output), *self.config.callbacks)
        self._callbacks = CallbackList(callbacks, run, self._on_callback_error)
        return self._callbacks

    def _make_profiler(self, num_steps: int, facts: RunFacts) -> StepProfiler:
        told = {
            "model": f"{facts.model}, {format_count(facts.num_parameters)} parameters",
            "ranks": f"{counted(facts.world_size, facts.device + ' rank')}, sharding {facts.mode}",
            "tokens": f"{format_count(facts.tokens_of_step)} per step",
        }
        module = self.parallel.module
        return StepProfiler(module, self.optimizer, num_steps, self.folder, self.team, told)

    def _write_profile(self) -> None:
        """Writes what was profiled, once; a disk that is full does not end the run."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        try:
            written = profiler.write()
        except OSError as error:
            self._unwritten.add(PROFILE, error)
            self.display.warn(f"the profile cannot be written, training continues: {error.strerror or error}")
        else:
            self.display.note(
                "the run was too short to profile a step"
                if written is None
                else f"profile: {short_path(written)}"
            )

    def _on_saved(self, step: int, path: Path) -> None:
        if self._callbacks is not None:
            self._callbacks.checkpoint(step, path)

    def _on_stop_request(self) -> None:
        self.display.note(self._on_stop)

    def _stop_is_asked(self) -> bool:
        return self._callbacks is not None and self._callbacks.stop_requested

    def _on_callback_error(self, name: str, error: Exception) -> None:
        name += f" on rank {self.team.rank}" if self.team.rank else ""
        if self._unwritten.add(name, error, is_file=False):
            self.display.warn(f"{name} failed, training continues: {type(error).__name__}: {error}")

    def _on_display_error(self, error: OSError) -> None:
        # If standard output cannot be written to, standard error may go to the same place.
        if self._unwritten.add("standard output", error):
            with contextlib.suppress(OSError):
                print(
                    f"warning: standard output cannot be written to, training continues: {error}",
                    file=sys.stderr,
                    flush=True,
                )

    def _facts(self) -> RunFacts:
        config = self.config
        return RunFacts(
            name=config.name,
            folder=str(self.folder),
            model=type(config.model).__name__,
            num_parameters=self.parallel.num_parameters,
            num_tokens=self._data.num_tokens,
            mode=described(config.sharding),
            precision=config.sharding.precision,
            device=self.device.type.upper(),
            world_size=self.team.world_size,
            num_steps=config.train.steps,
            first_step=self.progress.step,
            tokens_of_step=config.train.batch_size * config.model.context,
            peak_flops=peak_flops(self.device, config.sharding.precision),
            flops_of_token=self.parallel.flops_of_token,
            losses_before=tuple(
                record.loss for record in read_metrics(self.folder) if record.step <= self.progress.step
            ),
        )

    # --- a step -------------------------------------------------------------------------------------------------

    def _step(self, facts: RunFacts, interrupt: Interrupt) -> StepRecord:
        config, progress = self.config, self.progress
        begun = time.perf_counter()
        self._tell(f"in step {progress.step + 1}", memory_bytes(self.device))
        stepped = self._stepper.step(progress)
        if stepped is None:
            raise self._save_and_explain_bad_gradients()
        if stepped.grad_norm is None and self._stepper.scaling is not None:
            scale = f"the loss scale is now {self._stepper.scaling.scale:g}"
            self.display.note(f"step {progress.step} was skipped: its gradients overflowed in fp16; {scale}")
        sum_of_losses, num_asked = self.team.sum(
            stepped.loss, float(interrupt.requested or self._stop_is_asked())
        )
        progress.losses.append(sum_of_losses / self.parallel.grid.data_world_size)
        progress.stop_requested = num_asked > 0
        is_last = progress.step == config.train.steps
        seconds = time.perf_counter() - begun
        eval_loss = None
        if is_last or (config.evaluate.every and progress.step % config.evaluate.every == 0):
            self._tell(f"evaluating after step {progress.step}", memory_bytes(self.device))
            eval_loss = progress.eval_loss = self._stepper.evaluate()
            progress.eval_step = progress.step
        speed = facts.tokens_of_step / seconds
        peak = facts.peak_flops
        return StepRecord(
            step=progress.step,
            loss=progress.losses[-1],
            lr=stepped.lr,
            grad_norm=stepped.grad_norm,
            seconds=seconds,
            tokens_per_second=speed,
            memory_bytes=memory_bytes(self.device),
            mfu=None if peak is None else speed * facts.flops_of_token / (peak * self.team.world_size),
            saving=self._checkpoints.is_busy,
            eval_loss=eval_loss,
            loss_scale=None if self._stepper.scaling is None else self._stepper.scaling.scale,
            time=round(time.time(), 3),
        )

    def _save_and_explain_bad_gradients(self) -> StateError:
        """Saves the weights, which are still those of the step before, and returns the error that ends the run."""
        progress = self.progress
        where = self._stepper.explain_bad_gradients(progress)
        self._checkpoints.save_and_wait(progress)
        return StateError(
            f"the gradients of step {progress.step + 1} are not finite: {where}",
            where=f"step {progress.step + 1}, samples from {progress.samples}",
            fix="lower optimizer.lr or look at the data, and continue with --resume "
            f"{self.folder}: the weights before this step are saved",
        )
