"""What stays of a run beside its checkpoints: metrics, a summary, a picture of the loss, TensorBoard's events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.train.extras import optional, require
from shardwise.train.records import METRICS, StepRecord, Summary, read_metrics

__all__ = ["Report"]


class Report:
    """Written by rank 0 as the run goes; a crash loses at most the line being written."""

    def __init__(self, folder: Path, *, tensorboard: bool) -> None:
        self._folder = folder
        self._metrics = (folder / METRICS).open("a", encoding="utf-8", buffering=1)
        self._events: Any = None
        if tensorboard:
            require("tensorboard", "output.tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder / "tensorboard"))

    def step(self, record: StepRecord) -> None:
        self._metrics.write(record.to_json() + "\n")
        if self._events is not None:
            for name in ("loss", "lr", "grad_norm", "tokens_per_second", "eval_loss"):
                value = getattr(record, name)
                if value is not None:
                    self._events.add_scalar(name, value, record.step)

    def draw_curve(self) -> str | None:
        """The loss of the whole run, resumed parts and all, as a PNG; None where matplotlib is not installed."""
        if optional("matplotlib") is None:
            return None
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        records = read_metrics(self._folder)
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot([record.step for record in records], [record.loss for record in records], label="training")
        evaluated = [record for record in records if record.eval_loss is not None]
        if evaluated:
            axes.plot(
                [record.step for record in evaluated],
                [record.eval_loss or 0.0 for record in evaluated],
                "o-",
                label="held out",
            )
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3)
        axes.legend()
        path = self._folder / "loss.png"
        FigureCanvasAgg(figure).print_png(str(path))
        return str(path)

    def end(self, summary: Summary) -> None:
        (self._folder / "summary.json").write_text(json.dumps(summary.as_json(), indent=2) + "\n")

    def close(self) -> None:
        self._metrics.close()
        if self._events is not None:
            self._events.close()
