"""Callbacks that send a run's figures to TensorBoard, Weights & Biases or MLflow.

``output.tensorboard``, ``output.wandb`` and ``output.mlflow`` choose them by setting; a recipe can give them with
arguments: ``Config(..., callbacks=(WandB(project="mine"),))``. A resumed run continues the logger's run that it had.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from shardwise.train.callbacks import Callback, Run
from shardwise.train.config import Output
from shardwise.train.optional_packages import require
from shardwise.train.records import LOGGED_RUNS, TENSORBOARD, StepRecord, Summary
from shardwise.train.run_files import replace_file

__all__ = ["MLflow", "TensorBoard", "WandB", "chosen_loggers"]


def figures_of(record: StepRecord) -> dict[str, float]:
    """Returns the figures of a step that loggers show."""
    names = ("loss", "lr", "grad_norm", "loss_scale", "seconds", "tokens_per_second", "memory_bytes", "mfu")
    values = {name: getattr(record, name) for name in (*names, "eval_loss")}
    return {name: float(value) for name, value in values.items() if value is not None}


def known_run(folder: Path, logger: str) -> str | None:
    """Returns the id under which a logger knows the run in a folder, if it has logged it before."""
    try:
        known = json.loads((folder / LOGGED_RUNS).read_text())[logger]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return known if isinstance(known, str) else None


def remember_run(folder: Path, logger: str, identity: str) -> None:
    path = folder / LOGGED_RUNS
    try:
        known = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        known = {}
    replace_file(path, json.dumps({**known, logger: identity}, indent=2) + "\n")


def chosen_loggers(output: Output) -> list[Callback]:
    """Returns the loggers that the settings ask for."""
    known: list[tuple[bool, type[Callback]]] = [
        (output.tensorboard, TensorBoard),
        (output.wandb, WandB),
        (output.mlflow, MLflow),
    ]
    return [kind() for is_chosen, kind in known if is_chosen]


class TensorBoard(Callback):
    """Writes events to a folder: ``FOLDER/tensorboard`` unless another is named."""

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._writer: Any = None

    def on_start(self, run: Run) -> None:
        require("tensorboard", "output.tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        folder = self._folder or str(run.folder / TENSORBOARD)
        # Events of steps that will run again are hidden by their readers.
        self._writer = SummaryWriter(folder, purge_step=run.facts.first_step + 1)

    def on_step(self, run: Run, record: StepRecord) -> None:
        for name, value in figures_of(record).items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time)

    def on_end(self, run: Run, summary: Summary | None) -> None:
        self._writer.close()


class WandB(Callback):
    """Logs to Weights & Biases; its own environment variables hold, such as WANDB_MODE=offline.

    Args:
        project: the project; otherwise WANDB_PROJECT, or ``shardwise``.
        options: more arguments of ``wandb.init``, such as ``mode="offline"``.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        self._project, self._options = project, options
        self._run: Any = None

    def on_start(self, run: Run) -> None:
        wandb = require("wandb", "output.wandb")
        options = {
            "project": self._project or os.environ.get("WANDB_PROJECT") or "shardwise",
            "name": run.folder.name,
            "dir": str(run.folder),
            "config": dict(run.settings),
            "id": known_run(run.folder, "wandb"),
            "resume": "allow",
            **self._options,
        }
        self._run = wandb.init(**options)
        remember_run(run.folder, "wandb", self._run.id)
        # A resumed run may repeat steps, and wandb's own step never goes back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_step(self, run: Run, record: StepRecord) -> None:
        self._run.log({"step": record.step, **figures_of(record)})

    def on_end(self, run: Run, summary: Summary | None) -> None:
        if summary is not None:
            self._run.summary["ended"] = summary.ended
        self._run.finish(exit_code=1 if summary is None else 0)


class MLflow(Callback):
    """Logs to MLflow: to the server of MLFLOW_TRACKING_URI, otherwise to files in ``FOLDER/mlruns``.

    Args:
        experiment: the experiment; otherwise MLFLOW_EXPERIMENT_NAME, or ``shardwise``.
        tracking_uri: where to log, in place of the above.
    """

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        self._experiment, self._tracking_uri = experiment, tracking_uri
        self._client: Any = None
        self._entities: Any = None
        self._id = ""

    def on_start(self, run: Run) -> None:
        require("mlflow", "output.mlflow")
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        uri = self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            # MLflow's small package has no database, and its newer versions want to be told that files are meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.folder / "mlruns").resolve().as_uri()
        self._client, self._entities = MlflowClient(tracking_uri=uri), entities
        known = known_run(run.folder, "mlflow")
        self._id = known or self._create_run(run)
        if known:
            self._client.update_run(self._id, status="RUNNING")

    def _create_run(self, run: Run) -> str:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "shardwise"
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        identity: str = self._client.create_run(experiment, run_name=run.folder.name).info.run_id
        params = [self._entities.Param(key, str(value)) for key, value in run.settings.items()]
        self._client.log_batch(identity, params=params)
        remember_run(run.folder, "mlflow", identity)
        return identity

    def on_step(self, run: Run, record: StepRecord) -> None:
        milliseconds = round((record.time or time.time()) * 1000)
        metrics = [
            self._entities.Metric(name, value, milliseconds, record.step)
            for name, value in figures_of(record).items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def on_end(self, run: Run, summary: Summary | None) -> None:
        ended = "FAILED" if summary is None else "FINISHED" if summary.ended == "finished" else "KILLED"
        self._client.set_terminated(self._id, ended)
