"""Recipes, which are functions that return a config: built-in ones, and how to load one of your own.

shardwise train tiny
shardwise train my.py:recipe          # a function in a file
shardwise train package.module:recipe
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.train.config import Checkpoints, Config, Evaluation, Optimization, Sharding, Training
from shardwise.train.llama import Llama

__all__ = ["RECIPES", "load_recipe"]


def tiny() -> Config:
    """Under a million parameters; seconds on a laptop's CPU."""
    return Config(
        name="tiny",
        model=Llama(layers=4, width=96, heads=4, kv_heads=2, hidden=256, context=64),
        optimizer=Optimization(lr=4e-3, warmup=10),
        train=Training(steps=120, batch_size=12),
        checkpoint=Checkpoints(every=40),
        evaluate=Evaluation(every=40),
    )


def small() -> Config:
    """Ten million parameters; minutes on a GPU."""
    return Config(
        name="small",
        model=Llama(layers=6, width=384, heads=6, kv_heads=6, hidden=1024, context=256),
        optimizer=Optimization(lr=1e-3, warmup=100),
        train=Training(steps=2000, batch_size=48),
        checkpoint=Checkpoints(every=500),
        evaluate=Evaluation(every=250, batches=8),
    )


def llama_125m() -> Config:
    return Config(
        name="llama-125m",
        model=Llama(
            layers=12,
            width=768,
            heads=12,
            kv_heads=12,
            hidden=2048,
            vocabulary=32000,
            context=1024,
            tied=True,
        ),
        optimizer=Optimization(lr=6e-4, warmup=500),
        train=Training(steps=10_000, batch_size=480, accumulate=1),
        sharding=Sharding(precision="bf16", compile=True),
        checkpoint=Checkpoints(every=1000),
        evaluate=Evaluation(every=500, batches=16),
    )


def llama_1b() -> Config:
    """16 blocks of width 2048."""
    return Config(
        name="llama-1b",
        model=Llama(
            layers=16, width=2048, heads=32, kv_heads=32, hidden=5632, vocabulary=32000, context=2048
        ),
        optimizer=Optimization(lr=3e-4, warmup=1000),
        train=Training(steps=50_000, batch_size=512, accumulate=8),
        sharding=Sharding(precision="bf16", compile=True),
        checkpoint=Checkpoints(every=1000),
        evaluate=Evaluation(every=1000, batches=16),
    )


def llama_8b() -> Config:
    """32 blocks of width 4096, with the shape of Llama 3."""
    return Config(
        name="llama-8b",
        model=Llama(
            layers=32,
            width=4096,
            heads=32,
            kv_heads=8,
            hidden=14336,
            vocabulary=128256,
            context=4096,
            theta=500000.0,
        ),
        optimizer=Optimization(lr=3e-4, warmup=2000),
        train=Training(steps=100_000, batch_size=512, accumulate=8),
        sharding=Sharding(precision="bf16", compile=True, recompute=True),
        checkpoint=Checkpoints(every=1000),
        evaluate=Evaluation(every=1000, batches=16),
    )


RECIPES: dict[str, Callable[[], Config]] = {
    "tiny": tiny,
    "small": small,
    "llama-125m": llama_125m,
    "llama-1b": llama_1b,
    "llama-8b": llama_8b,
}


def load_recipe(name: str) -> Config:
    """Returns the config of a recipe: a built-in one, ``file.py:function``, or ``module:function``."""
    if name in RECIPES:
        return RECIPES[name]()
    source, colon, function = name.rpartition(":")
    if not colon:
        near = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.4)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ConfigError(
            f"there is no recipe '{name}'",
            where=f"shardwise train {name}",
            fix=f"{hint}use one of {', '.join(RECIPES)}, or your own as file.py:function",
        )
    module = _load_file(Path(source)) if source.endswith(".py") else _import(source, name)
    recipe = getattr(module, function, None)
    if not callable(recipe):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(function, known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "name a function that returns a Config"
        raise ConfigError(
            f"'{source}' has no function '{function}'", where=f"shardwise train {name}", fix=hint
        )
    config = recipe()
    if not isinstance(config, Config):
        raise ConfigError(
            f"'{function}' returned a {type(config).__name__}",
            where=f"shardwise train {name}",
            fix="return a shardwise.train.Config",
        )
    return config


def _load_file(path: Path) -> object:
    if not path.is_file():
        raise ConfigError(f"there is no file '{path}'", where=f"shardwise train {path}", fix="check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Classes of the recipe look up their module by name, and the file may import files beside it.
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _import(source: str, name: str) -> object:
    try:
        return importlib.import_module(source)
    except ImportError as error:
        raise ConfigError(
            f"'{source}' cannot be imported: {error}",
            where=f"shardwise train {name}",
            fix="use file.py:function, or a module that is on Python's path",
        ) from None
