"""Opens a trained model on all ranks, to generate or evaluate: of a run, a checkpoint, an export or a file of weights.

What kind of model it is stands in the files, so that nothing but data is read from a folder that may come from anyone.
Only a model of your own needs its recipe named again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.manifest import MANIFEST, read_manifest
from shardwise.checkpoint.parts import part_of
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.weights import TOKENIZER, Weights, open_weights
from shardwise.engine.unit.binding import clean_name
from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.config import Data, Sharding
from shardwise.train.hugging_face import HuggingFaceModel
from shardwise.train.llama import Llama
from shardwise.train.model import ModelSource
from shardwise.train.optional_packages import require
from shardwise.train.parallel import Parallel
from shardwise.train.recipes import load_recipe
from shardwise.train.run_files import read_json
from shardwise.train.run_folder import CHECKPOINTS
from shardwise.train.settings import parse_sources, with_settings
from shardwise.train.team import Team
from shardwise.train.tokenizers import IDS, tokenizer_of

__all__ = ["TrainedModel", "find_model", "load_model"]

# Threads that wait for each other cost a smaller model more than they save it.
_NEEDS_THREADS = 20_000_000


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, found on disk and not yet loaded."""

    path: Path
    """What ``open_weights`` opens."""
    source: ModelSource
    tokenizer: str
    data: Data | None = None
    """The data that it was trained on, if it is of a run."""
    seed: int = 0
    precision: str = "fp32"
    step: int | None = None


def find_model(path: str, recipe: str | None = None, tokenizer: str | None = None) -> TrainedModel:
    """Finds out what model is at ``path``, without reading its weights.

    Args:
        path: a run's folder, a checkpoint, a folder of safetensors, or a file of weights.
        recipe: the recipe of the model, if the files do not say what it is.
        tokenizer: replaces the tokenizer that belongs to the model.

    Raises:
        ConfigError: there is no model, or its kind is not known.
        CheckpointError: the newest checkpoint cannot be read.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        raise ConfigError(
            f"there is no file or folder '{path}'",
            where=path,
            fix="pass a run's folder such as runs/tiny, a checkpoint, or an exported model; "
            "'shardwise runs' lists the runs here",
        )
    checkpoint = _checkpoint_in(folder)
    if checkpoint is not None:
        return _model_of_checkpoint(checkpoint, recipe, tokenizer)
    config = read_json(folder / "config.json") if folder.is_dir() else {}
    source = _source_of_recipe(recipe) if recipe else _source_of_export(folder, config)
    if tokenizer is None:
        tokenizer = str(folder) if (folder / "tokenizer_config.json").exists() else IDS
    return TrainedModel(folder, source, tokenizer)


def _checkpoint_in(folder: Path) -> Path | None:
    if (folder / MANIFEST).exists():
        return folder
    found = [*Store(folder / CHECKPOINTS).checkpoints(), *Store(folder).checkpoints()]
    return found[0] if found else None


def _model_of_checkpoint(checkpoint: Path, recipe: str | None, tokenizer: str | None) -> TrainedModel:
    run = read_manifest(checkpoint).run
    settings = run.get("config")
    settings = settings if isinstance(settings, dict) else {}
    source = (
        _source_of_recipe(recipe, run.get("settings"))
        if recipe
        else _source_of_run(run, settings, checkpoint)
    )
    data = _data_of_run(settings)
    if tokenizer is None:
        kept = checkpoint.parent.parent / TOKENIZER
        tokenizer = str(kept) if kept.is_dir() else (IDS if data is None else tokenizer_of(data))
    seed = settings.get("train.seed", 0)
    return TrainedModel(
        checkpoint,
        source,
        tokenizer,
        data,
        seed if isinstance(seed, int) else 0,
        "bf16" if settings.get("sharding.precision") == "bf16" else "fp32",
        int(run["step"]),
    )


# --- what kind of model -------------------------------------------------------------------------------------------


def _source_of_recipe(recipe: str, settings: Any = None) -> ModelSource:
    texts = [text for text in settings if isinstance(text, str)] if isinstance(settings, list) else []
    return with_settings(load_recipe(recipe), texts).model.resolved()


def _source_of_run(run: Mapping[str, Any], settings: Mapping[str, Any], checkpoint: Path) -> ModelSource:
    hugging_face = run.get("hugging_face")
    llama: Llama | None = _record_of(Llama, settings, "model.")
    if llama is not None:
        llama.check()
        return llama
    if isinstance(hugging_face, dict):
        context = settings.get("model.context")
        return _source_of_config(hugging_face, context if isinstance(context, int) else None)
    raise ConfigError(
        "the checkpoint does not say what its model is: it is a module of your own",
        where=str(checkpoint),
        fix=f"name its recipe: --recipe {run.get('recipe') or 'file.py:function'}",
    )


def _source_of_export(folder: Path, config: Mapping[str, Any]) -> ModelSource:
    if config.get("model_type"):
        return _source_of_config(config)
    raise ConfigError(
        f"there is no model in '{folder}' that says what it is"
        if folder.is_dir()
        else f"'{folder}' holds only weights, which do not say what model they are of",
        where=str(folder),
        fix="pass a run's folder, a checkpoint or a folder with config.json, or name the model: --recipe NAME",
    )


def _source_of_config(config: Mapping[str, Any], context: int | None = None) -> ModelSource:
    """Returns our own Llama if it computes what ``config`` describes, or else a model of ``transformers``."""
    llama = Llama.of_hugging_face(config)
    if llama is not None:
        return llama if context is None else dataclasses.replace(llama, context=context)
    longest = config.get("max_position_embeddings") or config.get("n_positions") or 1024
    vocabulary = int(config.get("vocab_size") or 1 << 31)
    return _ConfiguredModel(context=context or int(longest), vocabulary=vocabulary, config=dict(config))


@dataclass(frozen=True)
class _ConfiguredModel(HuggingFaceModel):
    """A model of ``transformers`` from the contents of a ``config.json``; its weights are loaded later."""

    config: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        transformers = require("transformers", f"a model of type '{self.config['model_type']}'")
        config = transformers.AutoConfig.for_model(**self.config)
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(config).float()
        return module


def _record_of(kind: type[Any], settings: Mapping[str, Any], prefix: str) -> Any:
    """Returns a record of this kind from settings by dotted name; None if any is missing or of another type."""
    values = {}
    for entry in dataclasses.fields(kind):
        name = prefix + entry.name
        if name not in settings or type(settings[name]) is not type(entry.default):
            return None
        values[entry.name] = settings[name]
    return kind(**values)


def _data_of_run(settings: Mapping[str, Any]) -> Data | None:
    """Returns the data that a run names; None if it names none. Settings that came later are at their defaults."""
    known = {entry.name: entry.default for entry in dataclasses.fields(Data)}
    named = {name: settings[f"data.{name}"] for name in known if f"data.{name}" in settings}
    if named:
        # Before there was this setting, it was the end.
        named.setdefault("held_out_from", "end")
    sources = named.pop("sources", "")
    is_sound = isinstance(sources, str) and all(
        type(value) is type(known[name]) for name, value in named.items()
    )
    if not named or not is_sound:
        return None
    return Data(**named, sources=parse_sources(sources, "data.sources"))


# --- loading ------------------------------------------------------------------------------------------------------


def load_model(model: TrainedModel, team: Team, device: torch.device) -> Parallel:
    """Builds the model and loads its weights, on every rank; sharded, unless there is only one rank."""
    weights = team.together(lambda: open_weights(model.path))
    mode = "full" if team.world_size > 1 else "none"
    sharding = Sharding(mode=mode, precision=model.precision)  # type: ignore[arg-type]
    parallel = Parallel(model.source, sharding, device, seed=0)
    if parallel.num_parameters < _NEEDS_THREADS:
        torch.set_num_threads(1)
    team.together(lambda: _load_weights(parallel.module, weights, str(model.path)))
    parallel.module.eval()
    return parallel


def _load_weights(module: nn.Module, weights: Weights, where: str) -> None:
    """Copies weights into a module's parameters and buffers, each rank its own parts.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    found = {weight.name: weight for weight in weights.tensors}
    names = set(module.state_dict())
    entries: dict[str, torch.Tensor] = {clean_name(name): value for name, value in module.named_parameters()}
    entries |= {clean_name(name): value for name, value in module.named_buffers() if name in names}
    for name, value in entries.items():
        weight = found.get(name)
        if weight is None or weight.shape != tuple(value.shape):
            shape = "is missing" if weight is None else f"has shape {weight.shape}"
            raise CheckpointError(
                f"the weights are of another model: '{name}' {shape}, and has shape {tuple(value.shape)} in the model",
                where=where,
                fix="pass the recipe and settings that the model was trained with",
            )
        weight.copy_into(part_of(value))
