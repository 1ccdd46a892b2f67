"""Refuses settings of ``sharding`` that cannot work together, or with the model, before any rank exists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import ConfigError
from shardwise.train.model import Llama

if TYPE_CHECKING:
    from shardwise.train.config import Config, Sharding

__all__ = ["check_combinations"]


def check_combinations(config: Config) -> None:
    """Raises ConfigError for a combination that cannot work."""
    sharding = config.sharding
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
