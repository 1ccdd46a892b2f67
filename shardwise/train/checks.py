"""Checks the settings of a run, and how they go together, before a process group or a model exists."""

from __future__ import annotations

import difflib
import math
from operator import attrgetter
from typing import Any

from shardwise.errors import ConfigError
from shardwise.train.callbacks import Callback
from shardwise.train.config import Config, Sharding, sources_text
from shardwise.train.llama import Llama

__all__ = ["check"]

_AT_LEAST_1 = (
    "train.steps",
    "train.batch_size",
    "train.accumulate",
    "train.threads",
    "sharding.tensor_parallel",
    "sharding.pipeline",
    "output.every",
)
_AT_LEAST_0 = (
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.warmup",
    "optimizer.decay",
    "optimizer.weight_decay",
    "optimizer.clip",
    "train.exact_micro_batches",
    "train.late_seconds",
    "sharding.replicas",
    "sharding.group_bytes",
    "checkpoint.every",
    "checkpoint.keep",
    "evaluate.every",
    "evaluate.batches",
)
_OPTIMIZERS = ("adamw", "sgd", "muon")


def check(config: Config) -> None:
    """Raises ConfigError for values that no run can have; what depends on the ranks is checked once they run."""
    for names, least in ((_AT_LEAST_1, 1), (_AT_LEAST_0, 0)):
        for name in names:
            _need(config, name, attrgetter(name)(config) >= least, f"use {least} or more")
    _check_optimizer(config)
    _check_data(config)
    _check_callbacks(config)
    config.model.check()
    _check_combinations(config)


def _need(config: Config, name: str, holds: bool, fix: str, shown: Any = None) -> None:
    if not holds:
        value = attrgetter(name)(config) if shown is None else shown
        raise ConfigError(f"{name} is {value}", where=f"the settings of '{config.name}'", fix=fix)


def _check_optimizer(config: Config) -> None:
    choice = config.optimizer
    is_possible = choice.schedule != "wsd" or 0 < choice.decay <= 1
    _need(config, "optimizer.decay", is_possible, "use more than 0 and at most 1")
    if isinstance(choice.name, str) and "." not in choice.name and choice.name not in _OPTIMIZERS:
        near = difflib.get_close_matches(choice.name, _OPTIMIZERS, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ConfigError(
            f"'{choice.name}' is not a valid value",
            where="optimizer.name",
            fix=f"{hint}use one of {', '.join(_OPTIMIZERS)}, or the full name of a class",
        )


def _check_data(config: Config) -> None:
    data = config.data
    _need(config, "data.held_out", 0 <= data.held_out < 1, "use a fraction, such as 0.05")
    weights = [source.weight for source in data.sources]
    _need(
        config,
        "data.sources",
        all(weight is None for weight in weights)
        or all(weight is not None and 0 < weight < math.inf for weight in weights),
        "give every source a weight above 0, or none of them",
        shown=sources_text(data.sources),
    )
    if data.path and data.sources:
        raise ConfigError(
            f"data.path is {data.path}, and data.sources is {sources_text(data.sources)}",
            where=f"the settings of '{config.name}'",
            fix="use one of them: data.path= leaves the path out, data.sources= the sources",
        )


def _check_callbacks(config: Config) -> None:
    callbacks: tuple[Any, ...] = config.callbacks
    for number, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            is_class = isinstance(callback, type)
            name = callback.__name__ if is_class else type(callback).__name__
            raise ConfigError(
                f"callbacks[{number}] is {'the class' if is_class else 'a'} {name}, not a Callback",
                where=f"the settings of '{config.name}'",
                fix=f"write {name}(...)" if is_class else f"derive {name} from shardwise.train.Callback",
            )


# --- combinations ---------------------------------------------------------------------------------------------------


def _check_combinations(config: Config) -> None:
    sharding, train = config.sharding, config.train
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
    if sharding.tensor_parallel > 1 or sharding.pipeline > 1:
        name = _name_of(sharding)
        _check_model_and_mode(config, name)
        if sharding.tensor_parallel > 1:
            _check_tensor_parallel(config, name)
        if sharding.pipeline > 1:
            _check_pipeline(config, name)


def _name_of(sharding: Sharding) -> str:
    if sharding.tensor_parallel > 1:
        return f"sharding.tensor_parallel={sharding.tensor_parallel}"
    return f"sharding.pipeline={sharding.pipeline}"


def _check_model_and_mode(config: Config, name: str) -> None:
    sharding = config.sharding
    if not isinstance(config.model, Llama):
        raise ConfigError(
            f"{name} divides the built-in Llama, and the model is a {type(config.model).__name__}",
            where=f"the settings of '{config.name}'",
            fix="use a Llama(...), or leave the setting at 1: every model can be sharded",
        )
    if sharding.mode in ("none", "optimizer"):
        raise ConfigError(
            f"{name} cannot be combined with mode '{sharding.mode}', which copies whole parameters",
            where=f"the settings of '{config.name}'",
            fix="use sharding.mode=full, gradients or hybrid",
        )
    if config.train.exact_micro_batches:
        raise ConfigError(
            f"{name} divides sums, which train.exact_micro_batches={config.train.exact_micro_batches} keeps in one "
            "order",
            where=f"the settings of '{config.name}'",
            fix="use train.exact_micro_batches=0 with train.accumulate, or leave the setting at 1",
        )


def _check_tensor_parallel(config: Config, name: str) -> None:
    model, size = config.model, config.sharding.tensor_parallel
    assert isinstance(model, Llama)
    for what in ("kv_heads", "heads", "hidden", "vocabulary"):
        value = getattr(model, what)
        if value % size:
            raise ConfigError(
                f"model.{what} is {value}, which cannot be divided by {size}",
                where=name,
                fix=f"use a multiple, such as model.{what}={value + -value % size}, or another size",
            )
    if config.sharding.compile:
        raise ConfigError(
            f"{name} cannot be combined with sharding.compile",
            where=f"the settings of '{config.name}'",
            fix="use sharding.compile=false",
        )


def _check_pipeline(config: Config, name: str) -> None:
    model, sharding, accumulate = config.model, config.sharding, config.train.accumulate
    assert isinstance(model, Llama)
    is_interleaved = sharding.schedule == "interleaved"
    num_stages = sharding.pipeline * (2 if is_interleaved else 1)
    where = f"sharding.pipeline={sharding.pipeline}, sharding.schedule={sharding.schedule}"
    if model.layers < num_stages:
        raise ConfigError(
            f"{model.layers} layers cannot be cut into {num_stages} stages",
            where=where,
            fix="use fewer stages, or more of model.layers",
        )
    if model.tied:
        raise ConfigError(
            "the embedding and the head share their weight, and would be in different stages",
            where=where,
            fix="use model.tied=false, or sharding.tensor_parallel instead",
        )
    if accumulate < sharding.pipeline or (is_interleaved and accumulate % sharding.pipeline):
        least = max(2 * sharding.pipeline, accumulate + -accumulate % sharding.pipeline)
        needs = "a multiple of it" if is_interleaved else "as many at least"
        raise ConfigError(
            f"train.accumulate is {accumulate}: {accumulate} micro-batch{'es' if accumulate > 1 else ''} cannot fill "
            f"{sharding.pipeline} stages, which need {needs}",
            where=where,
            fix=f"use more, such as train.accumulate={least}; stages wait less, the more there are",
        )
