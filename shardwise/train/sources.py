"""Opens the data of a run: one source or several, each tokenized first if it has to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardwise.errors import ConfigError
from shardwise.train.config import Config, Data
from shardwise.train.data import Corpus, open_bounds, open_corpus
from shardwise.train.documents import left_out_files
from shardwise.train.model import ModelSource
from shardwise.train.records import counted
from shardwise.train.sample_order import Mix, SampleOrder, plan_order
from shardwise.train.samples import Conversations, Mixture, Samples, Texts, check_vocabulary
from shardwise.train.tokenizers import BYTES, check_tokenizer
from shardwise.train.tokenizing import needs_tokenizing, remove_unfinished, tokenize, tokens_state

__all__ = ["RunData", "open_data", "open_samples", "sources_of", "tokenize_sources"]


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    samples: Samples
    order: SampleOrder
    num_tokens: int
    fingerprint: str
    """Tells data from other data, cheaply."""


def sources_of(data: Data) -> list[Data]:
    """Returns the settings of each source."""
    return [replace(data, path=source.path, sources=()) for source in data.sources] or [data]


def tokenize_sources(
    data: Data, folder: Path, note: Callable[[str], None], vocabulary: int | None = None
) -> None:
    """Writes the tokens of all sources that need it to a run's folder, unless they are there; on one rank.

    Raises:
        ConfigError: the data cannot be read, or its tokenizer has tokens beyond ``vocabulary``.
    """
    remove_unfinished(folder)
    if vocabulary is not None and data.tokenizer != BYTES and any(map(needs_tokenizing, sources_of(data))):
        check_tokenizer(data.tokenizer, vocabulary)
    for number, source in enumerate(sources_of(data)):
        if source.path and (left_out := left_out_files(Path(source.path).expanduser())):
            others = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
            note(f"left out of {source.path}, as empty or binary: {left_out[0].name}{others}")
        if not needs_tokenizing(source):
            continue
        target = _tokens_path(folder, number)
        state = tokens_state(source, target)
        if state == "stale":
            note("the data or its tokenizer has changed: tokenizing again")
        if state == "missing":
            note(f"making tokens of {source.path or 'Python'} with '{source.tokenizer}' …")
        if state != "good" and (counts := tokenize(source, target)).left_out:
            what = "nothing in them is to be learnt" if source.format == "chat" else "they have no text"
            note(f"left out {counts.left_out} of {counted(counts.all, 'row')} of {source.path}: {what}")


def open_data(config: Config, folder: Path, world_size: int) -> RunData:
    """Opens all sources, and plans the order of their samples on ``world_size`` ranks."""
    sources = sources_of(config.data)
    opened = [_open_source(source, folder, number, config.model) for number, source in enumerate(sources)]
    parts, corpora = [samples for samples, _ in opened], [corpus for _, corpus in opened]
    samples = _together(parts, config.data)
    seed = config.train.seed if config.data.shuffle else None
    order = plan_order(samples.num_training, config.train, world_size, seed, _mix(config.data, parts))
    num_tokens = sum(corpus.num_tokens for corpus in corpora)
    return RunData(samples, order, num_tokens, "+".join(corpus.fingerprint() for corpus in corpora))


def open_samples(data: Data, folder: Path, model: ModelSource) -> Samples:
    """Opens all sources, whose tokens are in ``folder`` if they had to be tokenized."""
    sources = sources_of(data)
    return _together(
        [_open_source(source, folder, number, model)[0] for number, source in enumerate(sources)], data
    )


def _open_source(source: Data, folder: Path, number: int, model: ModelSource) -> tuple[Samples, Corpus]:
    tokens = _tokens_path(folder, number)
    if source.format == "chat":
        _check_chat(source, model)
    corpus = open_corpus(source, tokens, model.vocabulary)
    check_vocabulary(corpus, model.vocabulary, is_chat=source.format == "chat")
    limits = model.context, model.vocabulary, source.held_out, source.held_out_from
    if source.format == "chat":
        return Conversations(corpus, open_bounds(tokens), *limits, packing=source.packing), corpus
    return Texts(corpus, *limits), corpus


def _together(parts: list[Samples], data: Data) -> Samples:
    return parts[0] if len(parts) == 1 else Mixture(parts, data.held_out_from)


def _mix(data: Data, parts: list[Samples]) -> Mix | None:
    sizes = [part.num_training for part in parts]
    if len(parts) < 2 or data.sources[0].weight is None:
        # Samples of all sources as one list: each is drawn as often as its size.
        return None
    return Mix.of(sizes, [source.weight or 0.0 for source in data.sources])


def _check_chat(source: Data, model: ModelSource) -> None:
    if source.packing:
        # Raises if the model cannot.
        model.segment_arguments(torch.zeros(1, 1, dtype=torch.int64))
    if source.path.endswith(".bin"):
        raise ConfigError(
            f"'{source.path}' has tokens, which are no conversations",
            where="data.format=chat",
            fix="pass .jsonl or .parquet files, or a data set hf:NAME",
        )


def _tokens_path(folder: Path, number: int) -> Path:
    return folder / ("tokens.bin" if number == 0 else f"tokens-{number + 1}.bin")
