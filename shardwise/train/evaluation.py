"""``shardwise eval``: the loss of a trained model on data, on any number of ranks."""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.train.config import Data
from shardwise.train.losses import mean_loss
from shardwise.train.model_ranks import run_model_ranks
from shardwise.train.parallel import Parallel
from shardwise.train.records import json_line
from shardwise.train.samples import Batch, Samples
from shardwise.train.sources import open_samples, tokenize_sources
from shardwise.train.step import sum_losses
from shardwise.train.team import Team
from shardwise.train.tokenizers import IDS
from shardwise.train.trained_model import TrainedModel, find_model, load_model

__all__ = ["Evaluation", "EvaluationRequest", "evaluate", "evaluate_on_ranks"]


@dataclass(frozen=True)
class EvaluationRequest:
    """The arguments of ``shardwise eval``."""

    model: str
    sources: tuple[str, ...] = ()
    """Paths of data; empty: what the run held out."""
    batch_size: int = 8
    """Sequences per rank and forward."""
    recipe: str | None = None
    tokenizer: str | None = None
    ranks: int | None = None
    device: str = "auto"
    as_json: bool = False


@dataclass(frozen=True)
class Evaluation:
    """The mean loss of a source, in nats per token, over all of its whole sequences."""

    source: str
    loss: float
    perplexity: float
    tokens: int


def evaluate(request: EvaluationRequest) -> int:
    """Evaluates a model, prints a line per source, and returns the exit status."""
    if request.batch_size < 1:
        raise ConfigError(
            f"a batch of {request.batch_size} was asked for", where="--batch-size", fix="use 1 or more"
        )
    # Before any rank exists, so that a bad request fails at once.
    model = find_model(request.model, request.recipe, request.tokenizer)
    for source in request.sources or ("",):
        _data_of(model, source)
    return run_model_ranks(partial(_evaluate_and_print, request), request.ranks, request.device)


def _evaluate_and_print(request: EvaluationRequest, device: torch.device) -> None:
    team = Team()
    for found in evaluate_on_ranks(request, team, device):
        if team.rank == 0 and request.as_json:
            print(json_line(asdict(found)), flush=True)
        elif team.rank == 0:
            figures = f"loss {found.loss:.4f}  perplexity {found.perplexity:.2f}  {found.tokens} tokens"
            print(f"{figures}  {found.source}", flush=True)


def evaluate_on_ranks(request: EvaluationRequest, team: Team, device: torch.device) -> list[Evaluation]:
    """Evaluates each source, and all together if there are several; called on every rank."""
    model = team.together(lambda: find_model(request.model, request.recipe, request.tokenizer))
    parallel = load_model(model, team, device)
    totals = [
        (source, *_total(model, source, request, parallel, team, device))
        for source in request.sources or ("",)
    ]
    if len(totals) > 1:
        totals.append(("all", sum(total for _, total, _ in totals), sum(count for _, _, count in totals)))
    return [
        Evaluation(source or "held out", total / count, _exp(total / count), count)
        for source, total, count in totals
    ]


def _total(
    model: TrainedModel,
    source: str,
    request: EvaluationRequest,
    parallel: Parallel,
    team: Team,
    device: torch.device,
) -> tuple[float, int]:
    """Returns the sum of all targets' losses of a source, and their number."""
    data = team.together(partial(_data_of, model, source))
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        samples = team.together(partial(_open, data, model, Path(folder), holds_out=not source))
        first, count = (
            (samples.num_training, samples.num_held_out) if not source else (0, samples.num_training)
        )
        size, step = request.batch_size, request.batch_size * team.world_size
        # Every rank runs as many forwards, which they run together; those beyond the data count nothing.
        batches = [
            range(first + min(count, start), first + min(count, start + size))
            for start in range(team.rank * size, team.rank * size + math.ceil(count / step) * step, step)
        ]
        with torch.no_grad():
            total, num_targets = sum_losses(samples, batches, partial(_loss, parallel), device)
    total, all_targets = team.sum(total, num_targets)
    return total, int(all_targets)


def _loss(parallel: Parallel, batch: Batch, num_targets: int) -> Tensor:
    logits = parallel.logits(batch.inputs, batch.segments)
    assert logits is not None
    return mean_loss(logits, batch.targets, None, num_targets)


def _open(data: Data, model: TrainedModel, folder: Path, holds_out: bool) -> Samples:
    data = data if holds_out else replace(data, held_out=0.0)
    tokenize_sources(data, folder, lambda text: None, model.source.vocabulary)
    return open_samples(data, folder, model.source)


def _data_of(model: TrainedModel, source: str) -> Data:
    """Returns the settings of a source, which is read as the run's data is; empty: of what the run held out."""
    if not source and (model.data is None or not model.data.held_out):
        raise ConfigError(
            "there is no held-out data to evaluate on",
            where=str(model.path),
            fix="name data: --data FILE_OR_FOLDER",
        )
    data = model.data or Data(tokenizer=model.tokenizer)
    if model.tokenizer == IDS and not source.endswith(".bin") and source:
        raise ConfigError(
            f"the model's tokenizer is not known, and '{source}' is text",
            where=str(model.path),
            fix="pass --tokenizer bytes or the tokenizer's folder, or a .bin of tokens",
        )
    if source and not source.startswith("hf:") and not Path(source).expanduser().exists():
        raise ConfigError(f"there is no file or folder '{source}'", where="--data", fix="check the path")
    return replace(data, path=source, sources=()) if source else data


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
