"""The settings of a run: frozen records, one for each concern, which can be changed by dotted name.

    config = with_settings(tiny(), ["train.steps=200", "sharding.mode=hybrid"])

Every value is checked here, before a process group or a model exists. The error for an unknown name suggests the
nearest one that exists; the error for an invalid value names the valid ones.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.train.callbacks import Callback
from shardwise.train.combinations import check_combinations
from shardwise.train.model import Llama, ModelSource

__all__ = [
    "Checkpoints",
    "Config",
    "Data",
    "Evaluation",
    "Mode",
    "Optimization",
    "Output",
    "Place",
    "Sharding",
    "Source",
    "Training",
    "as_json",
    "check",
    "parse_sources",
    "settings_of",
    "with_settings",
]

Mode = Literal["none", "optimizer", "gradients", "full", "hybrid"]
Place = Literal["everywhere", "end"]
Record = TypeVar("Record")
_UNION = type(typing.Optional[int])  # noqa: UP045  the type of unions made by typing, which differs from that of |


@dataclass(frozen=True)
class Source:
    """One of several sources of data."""

    path: str
    """As ``data.path``."""
    weight: float | None = None
    """Its part of the samples, relative to the other sources; None for all: by their sizes."""


@dataclass(frozen=True)
class Data:
    """The data to train on."""

    path: str = ""
    """Text, ``.jsonl`` or ``.parquet`` files, a folder, a ``.bin`` of tokens, ``hf:NAME``; empty: Python's sources."""
    sources: tuple[Source, ...] = ()
    """Several paths in place of one, with weights: ``web.jsonl*0.7, code/*0.3``."""
    format: Literal["text", "chat"] = "text"
    """chat: rows with ``messages``, or ``prompt`` and ``completion``; each conversation is a sequence."""
    train_on: Literal["answers", "all"] = "answers"
    """In chats: learn the assistant's answers only, or all tokens."""
    packing: bool = False
    """In chats: put several conversations into a sequence, unseen by each other, instead of padding."""
    tokenizer: str = "bytes"
    """``bytes``, or a Hugging Face tokenizer's name or folder."""
    token_dtype: Literal["uint8", "uint16", "int32", "int64"] = "uint16"
    """The dtype of tokens in a ``.bin``."""
    split: str = "train"
    """The split of a Hugging Face data set."""
    column: str = "text"
    """The column, or the key of JSON lines, that holds the text."""
    held_out: float = 0.05
    """The fraction of the data that is used only for evaluation."""
    held_out_from: Place = "everywhere"
    """everywhere: blocks all over the data; end: its last part, as in runs of versions before this setting."""
    shuffle: bool = True
    """Whether samples are used in a random order, which the seed decides, or in that of the data."""


@dataclass(frozen=True)
class Optimization:
    name: str | type[Optimizer] = "adamw"
    """adamw, sgd, muon (Muon for the blocks' matrices, AdamW for the rest), or a class such as torch.optim.Adagrad."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the optimizer: ``optimizer.arguments.nesterov=true``."""
    whole: bool = False
    """Whether the optimizer needs whole matrices, as Shampoo does; others work element by element."""
    lr: float = 3e-4
    """The learning rate after warmup."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] | Callable[[int, int], float] = "cosine"
    """After warmup; wsd: stable, then decay. Or a function from step and number of steps to a fraction of ``lr``."""
    min_lr: float = 0.1
    """Where the schedule ends, as a ratio: 0.1 is a tenth of ``lr``, not a learning rate of 0.1."""
    decay: float = 0.2
    """The part of the steps after warmup in which wsd decays."""
    warmup: int = 10
    """Steps in which the learning rate rises from 0 to ``lr``."""
    weight_decay: float = 0.1
    """For parameters of two or more dimensions, not for norms and biases."""
    beta1: float = 0.9
    """Of Adam's mean of gradients; the momentum of sgd."""
    beta2: float = 0.95
    """Of Adam's mean of squared gradients."""
    clip: float = 1.0
    """The gradient norm to clip to; 0: no clipping."""


@dataclass(frozen=True)
class Training:
    steps: int = 100
    """Steps of the whole run, those before a resume included."""
    batch_size: int = 16
    """Sequences per step, over all ranks: the run is the same on any number of ranks."""
    accumulate: int = 1
    """Micro-batches per rank and step."""
    exact_micro_batches: int = 0
    """Micro-batches per step, over all ranks, summed in one order: same bits on 1, 2, 4, ... ranks, in every mode."""
    seed: int = 0
    """Decides the first weights, the order of samples and dropout."""
    threads: int = 1
    """CPU threads per rank."""
    late_seconds: float = 0.0
    """How long ranks wait for one that is late but alive; 0: as long as the process group's own timeout."""


@dataclass(frozen=True)
class Sharding:
    mode: Mode = "full"
    """none: replicas; optimizer: ZeRO-1; gradients: ZeRO-2; full: ZeRO-3; hybrid: sharded within replicas."""
    replicas: int = 0
    """Replicas in mode hybrid; 0: one per host, or two on a single host."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What forward and backward compute in; weights and optimizer state stay fp32. fp16: with loss scaling."""
    float8: Literal["off", "on", "emulated"] = "off"
    """Multiply the units' matrices in float8, with torchao; emulated: the same roundings, slowly, on any device."""
    offload: bool = False
    """Keep shards and optimizer state in host memory."""
    group_bytes: int = 0
    """Units that follow each other are joined while their weights are at most this large: fewer, larger collectives."""
    recompute: bool = False
    """Activation checkpointing: run each unit again in backward instead of keeping its activations."""
    compile: bool = False
    """Compile each unit with torch.compile."""
    tensor_parallel: int = 1
    """Ranks that divide each matrix of the built-in Llama; they read the same data."""
    pipeline: int = 1
    """Stages of blocks of the built-in Llama, one after the other; train.accumulate micro-batches fill them."""
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """The pipeline's order of micro-batches; interleaved: two stages per rank, which wait less and send more."""


@dataclass(frozen=True)
class Checkpoints:
    every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 3
    """How many of the newest checkpoints to keep; 0: all."""
    asynchronous: bool = True
    """Whether training goes on while a checkpoint is written."""


@dataclass(frozen=True)
class Evaluation:
    every: int = 0
    """Steps between evaluations; 0: only at the end."""
    batches: int = 4
    """Micro-batches per rank and evaluation."""


@dataclass(frozen=True)
class Output:
    folder: str = ""
    """The run's folder; empty: ``runs/NAME``, or the first of ``runs/NAME-2``, ... that is free."""
    every: int = 1
    """Steps between lines in the log."""
    show: Literal["auto", "live", "lines", "json", "quiet"] = "auto"
    """auto: live in a terminal, lines elsewhere."""
    tensorboard: bool = False
    """Write events for TensorBoard to the run's folder."""
    wandb: bool = False
    """Log to Weights & Biases; WANDB_PROJECT and WANDB_MODE hold."""
    mlflow: bool = False
    """Log to MLflow: to the server of MLFLOW_TRACKING_URI, or to files in the run's folder."""


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    name: str = "run"
    """Names the folder of the run."""
    model: ModelSource = field(default_factory=Llama)
    data: Data = field(default_factory=Data)
    optimizer: Optimization = field(default_factory=Optimization)
    train: Training = field(default_factory=Training)
    sharding: Sharding = field(default_factory=Sharding)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    evaluate: Evaluation = field(default_factory=Evaluation)
    output: Output = field(default_factory=Output)
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    """Your own loss of logits and targets, each target's or their mean; targets of -100 do not count."""
    callbacks: tuple[Callback, ...] = ()
    """Your own code that the run calls, and loggers with arguments."""


# --- settings by name ---------------------------------------------------------------------------------------------


def settings_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields every setting of a config: dotted name, type, value."""
    hints = typing.get_type_hints(type(config))
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        kind = hints[entry.name]
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{prefix}{entry.name}.")
        elif isinstance(value, Mapping):
            yield prefix + entry.name, kind, dict(value)
        elif callable(value):
            # Code can be replaced by a setting where a name would do as well.
            if _as_text(kind) is not None:
                yield prefix + entry.name, kind, f"{value.__module__}.{value.__qualname__}"
        elif kind == tuple[Source, ...]:
            yield prefix + entry.name, kind, _sources_as_text(value)
        elif not isinstance(value, tuple) and value is not None:
            yield prefix + entry.name, kind, value


def with_settings(
    config: Config, assignments: Iterable[str], origins: Mapping[str, str] | None = None
) -> Config:
    """Returns the config with ``name=value`` assignments, checked; the last assignment to a name wins.

    ``origins`` says where an assignment is written, if not on the command line.
    """
    known = {name: kind for name, kind, _ in settings_of(config)}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name = name.strip()
        where = (origins or {}).get(assignment, f"--set {assignment}")
        if not equals:
            raise ConfigError(f"'{assignment}' sets nothing", where=where, fix="write --set name=value")
        if f"{name}.name" in known:
            # optimizer=muon
            name = f"{name}.name"
        head, _, key = name.rpartition(".")
        if head in known and typing.get_origin(known[head]) is Mapping and key.isidentifier():
            path = head.split(".")
            arguments = {**_value_of(config, path), key: _parse_any(text.strip())}
            config = _with_value(config, path, arguments)
            continue
        if name not in known:
            raise ConfigError(f"there is no setting '{name}'", where=where, fix=_suggestion(name, known))
        config = _with_value(config, name.split("."), _parse_value(text.strip(), known[name], where))
    check(config)
    return config


def _suggestion(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not near:
        last = name.rsplit(".", 1)[-1]
        lasts = {full.rsplit(".", 1)[-1]: full for full in names}
        near = [lasts[found] for found in difflib.get_close_matches(last, list(lasts), n=1, cutoff=0.5)]
    if near:
        return f"did you mean '{near[0]}'?"
    return "see them all with: shardwise train --settings"


def _as_text(kind: Any) -> Any | None:
    """Returns the part of a type that can be written in a setting: of ``str | type``, it is ``str``."""
    for option in typing.get_args(kind) if isinstance(kind, types.UnionType | _UNION) else (kind,):
        if option is str or typing.get_origin(option) is Literal:
            return option
    return None


def _value_of(record: Any, path: list[str]) -> Any:
    return functools.reduce(getattr, path, record)


def _with_value(record: Record, path: list[str], value: Any) -> Record:
    head, *rest = path
    if rest:
        value = _with_value(getattr(record, head), rest, value)
    return dataclasses.replace(record, **{head: value})  # type: ignore[type-var]


def _parse_any(text: str) -> Any:
    """Returns the value that a text means: a number, true or false, a tuple, or else the text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _sources_as_text(sources: tuple[Source, ...]) -> str:
    return ", ".join(
        source.path if source.weight is None else f"{source.path}*{source.weight:g}" for source in sources
    )


def parse_sources(text: str, where: str) -> tuple[Source, ...]:
    """Reads ``PATH*WEIGHT, PATH*WEIGHT``, or paths alone."""
    found = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        path, star, weight = entry.rpartition("*")
        try:
            found.append(Source(path.strip(), float(weight)) if star else Source(entry))
        except ValueError:
            raise ConfigError(
                f"'{weight}' is not a weight", where=where, fix="write PATH*WEIGHT, PATH*WEIGHT, ..."
            ) from None
    return tuple(found)


def _parse_value(text: str, kind: Any, where: str) -> Any:
    kind = _as_text(kind) or kind
    if kind == tuple[Source, ...]:
        return parse_sources(text, where)
    if typing.get_origin(kind) is Mapping:
        value = _parse_any(text)
        if not isinstance(value, dict):
            raise ConfigError(
                f"'{text}' is no dict", where=where, fix="set its entries one by one: name.key=value"
            )
        return value
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if text in choices:
            return text
        near = difflib.get_close_matches(text, choices, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ConfigError(
            f"'{text}' is not a valid value", where=where, fix=f"{hint}use one of {', '.join(choices)}"
        )
    if kind is bool:
        words = {"true": True, "yes": True, "on": True, "1": True}
        words |= {"false": False, "no": False, "off": False, "0": False}
        if text.lower() in words:
            return words[text.lower()]
        raise ConfigError(f"'{text}' is neither true nor false", where=where, fix="write true or false")
    if kind is str:
        return text
    if isinstance(kind, types.UnionType) and text.lower() == "none":
        return None
    try:
        value = ast.literal_eval(text.replace("_", "") if kind in (int, float) else text)
    except (ValueError, SyntaxError):
        value = text
    if kind is float and isinstance(value, int):
        value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(kind, type) and (not isinstance(value, kind) or isinstance(value, bool)):
        raise ConfigError(
            f"'{text}' is not {'a whole number' if kind is int else 'a number'}",
            where=where,
            fix=f"write one, such as {'100' if kind is int else '1e-3'}",
        )
    return value


# --- checks ---------------------------------------------------------------------------------------------------------


def check(config: Config) -> None:
    """Raises ConfigError for values that no run can have; what depends on the ranks is checked once they run."""

    def need(holds: bool, name: str, value: Any, fix: str) -> None:
        if not holds:
            raise ConfigError(f"{name} is {value}", where=f"the settings of '{config.name}'", fix=fix)

    train, optimizer, sharding = config.train, config.optimizer, config.sharding
    for name, value in (
        ("train.steps", train.steps),
        ("train.batch_size", train.batch_size),
        ("train.accumulate", train.accumulate),
        ("train.threads", train.threads),
        ("sharding.tensor_parallel", sharding.tensor_parallel),
        ("sharding.pipeline", sharding.pipeline),
        ("output.every", config.output.every),
    ):
        need(value >= 1, name, value, "use 1 or more")
    for name, number in (
        ("optimizer.lr", optimizer.lr),
        ("optimizer.min_lr", optimizer.min_lr),
        ("optimizer.warmup", optimizer.warmup),
        ("optimizer.decay", optimizer.decay),
        ("optimizer.weight_decay", optimizer.weight_decay),
        ("optimizer.clip", optimizer.clip),
        ("train.exact_micro_batches", train.exact_micro_batches),
        ("train.late_seconds", train.late_seconds),
        ("sharding.replicas", sharding.replicas),
        ("sharding.group_bytes", sharding.group_bytes),
        ("checkpoint.every", config.checkpoint.every),
        ("checkpoint.keep", config.checkpoint.keep),
        ("evaluate.every", config.evaluate.every),
        ("evaluate.batches", config.evaluate.batches),
    ):
        need(number >= 0, name, number, "use 0 or more")
    if isinstance(optimizer.name, str) and "." not in optimizer.name:
        _check_choice(
            optimizer.name, ("adamw", "sgd", "muon"), "optimizer.name", "or the full name of a class"
        )
    need(
        optimizer.schedule != "wsd" or 0 < optimizer.decay <= 1,
        "optimizer.decay",
        optimizer.decay,
        "use 0 to 1",
    )
    need(0 <= config.data.held_out < 1, "data.held_out", config.data.held_out, "use a fraction, such as 0.05")
    weights = [source.weight for source in config.data.sources]
    if any(weight is None or weight <= 0 for weight in weights) and weights.count(None) < len(weights):
        raise ConfigError(
            f"data.sources is {_sources_as_text(config.data.sources)}",
            where=f"the settings of '{config.name}'",
            fix="give every source a weight above 0, or none of them",
        )
    for name, is_set, does, default in (
        ("offload", sharding.offload, "moves shards to host memory", "false"),
        ("group_bytes", sharding.group_bytes, "joins units", "0"),
    ):
        if is_set and sharding.mode in ("none", "optimizer"):
            raise ConfigError(
                f"sharding.{name} {does}, but mode '{sharding.mode}' does not shard parameters",
                where=f"the settings of '{config.name}'",
                fix=f"use sharding.mode=full, gradients or hybrid, or sharding.{name}={default}",
            )
    if train.exact_micro_batches and train.accumulate > 1:
        raise ConfigError(
            f"train.exact_micro_batches is {train.exact_micro_batches}, which says how many micro-batches each of the "
            f"ranks takes, and train.accumulate is {train.accumulate}",
            where=f"the settings of '{config.name}'",
            fix="use train.accumulate=1, or train.exact_micro_batches=0",
        )
    config.model.check()
    check_combinations(config)


def _check_choice(value: str, choices: tuple[str, ...], where: str, others: str) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ConfigError(
            f"'{value}' is not a valid value",
            where=where,
            fix=f"{hint}use one of {', '.join(choices)}, {others}",
        )


def as_json(config: Config) -> dict[str, Any]:
    """Returns the settings as plain values, for files."""
    return {name: value for name, _, value in settings_of(config)}
