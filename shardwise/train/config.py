"""The settings of a run: frozen records, one for each concern.

A recipe makes a ``Config``; `settings` changes it by dotted name, and `checks` says which values no run can have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from shardwise.train.callbacks import Callback
from shardwise.train.llama import Llama
from shardwise.train.model import ModelSource

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
    "sources_text",
]

Mode = Literal["none", "optimizer", "gradients", "full", "hybrid"]
Place = Literal["everywhere", "end"]


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


def sources_text(sources: tuple[Source, ...]) -> str:
    """Returns sources as ``data.sources`` is written."""
    return ", ".join(
        source.path if source.weight is None else f"{source.path}*{source.weight!r}" for source in sources
    )
