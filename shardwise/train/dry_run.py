"""``shardwise train --dry-run``: says what would run, and checks all that can be checked without training.

Nothing is written, and no rank is started. The model is built without memory, and its optimizer takes a step there.
"""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint.manifest import Manifest, read_manifest
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.training_state import MODEL
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.train.checkpointing import refuse_fewer_steps
from shardwise.train.config import Config, Data, Sharding
from shardwise.train.config_file import differing, toml_lines, toml_value
from shardwise.train.documents import existing_path, text_files
from shardwise.train.hugging_face import HuggingFaceModel
from shardwise.train.launch import given_ranks, plan_ranks
from shardwise.train.model import ModelSource
from shardwise.train.optimizers import make_optimizer
from shardwise.train.optional_packages import require
from shardwise.train.parallel import Parallel
from shardwise.train.rank_grid import described, plan_grid
from shardwise.train.records import counted, format_bytes, format_count, short_path
from shardwise.train.request import Request, Resolved, find_run_to_resume, resolve
from shardwise.train.run_folder import CHECKPOINTS, is_locked, lock_holder, refuse_checkpoints_in
from shardwise.train.sample_order import plan_order
from shardwise.train.sources import open_data, sources_of
from shardwise.train.tokenizers import BYTES, load_tokenizer
from shardwise.train.tokenizing import needs_tokenizing, token_lists

__all__ = ["dry_run"]


def dry_run(request: Request, *, as_json: bool = False) -> int:
    """Prints what ``shardwise train`` would do, then every problem that is found; returns the exit status."""
    assigned = given_ranks(os.environ) if request.ranks is None else None
    if assigned is not None and assigned.rank:
        return 0
    check = _DryRun(request)
    check.run(None if assigned is None else assigned.world_size)
    if as_json:
        print(
            json.dumps(
                {"kind": "dry run", "good": not check.problems, **check.values, "problems": check.problems}
            )
        )
        return 1 if check.problems else 0
    width = min(100, shutil.get_terminal_size().columns)
    for name, text in check.rows:
        indent = f"{'':<13}"
        for number, line in enumerate(text.split("\n")):
            first = f"{name if not number else '':<13}"
            wrapped = textwrap.wrap(
                line, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
            )
            print("\n".join(wrapped))
    for problem in check.problems:
        print(f"error: {problem}")
    if not check.problems:
        print("no problem found; to train, leave out --dry-run")
    return 1 if check.problems else 0


class _DryRun:
    """Looks at one thing after the other; a problem with one does not hide those with the next."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.rows: list[tuple[str, str]] = []
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []

    def run(self, world_size: int | None) -> None:
        self._try(lambda: require("numpy", "shardwise train"))
        resolved = self._try(self._resolve)
        if resolved is None:
            return
        # Without what the model's files say, the other checks still find what is wrong.
        model = self._try(resolved.config.model.resolved) or resolved.config.model
        config = replace(resolved.config, model=model)
        ranks = self._try(lambda: self._ranks(config, world_size))
        module = self._try(lambda: self._model(config))
        grid = None if ranks is None else self._try(lambda: plan_grid(config.sharding, 0, ranks))
        if grid is not None:
            if module is not None:
                self._try(lambda: self._memory(config, module, ranks))
            self._try(lambda: self._steps(config, grid.data_world_size))
            self._try(lambda: self._data(config, grid.data_world_size))
        self._try(lambda: self._folder(config, module))

    def _try(self, look: Callable[[], Any]) -> Any:
        try:
            return look()
        except (ShardwiseError, OSError) as error:
            self.problems.append(str(error))
            return None

    def _add(self, name: str, text: str, **values: Any) -> None:
        self.rows.append((name, text))
        self.values |= values

    # --- settings and ranks -----------------------------------------------------------------------------------------

    def _resolve(self) -> Resolved:
        self._request = find_run_to_resume(self._request)
        resolved = resolve(self._request)
        changed = differing(resolved.config, resolved.base)
        lines = []
        for name, value, before in changed:
            told = "" if isinstance(before, dict) else f"  (recipe: {toml_value(before)})"
            lines += [line + told for line in toml_lines(name, value)]
        self._add("recipe", resolved.recipe, recipe=resolved.recipe)
        self._add(
            "settings",
            "\n".join(lines) or "as in the recipe",
            settings={name: value for name, value, _ in changed},
        )
        return resolved

    def _ranks(self, config: Config, world_size: int | None) -> int:
        request = self._request
        ranks, kind = plan_ranks(request.ranks, request.device, torch.cuda.device_count())
        ranks = ranks if world_size is None else world_size
        sharding = config.sharding
        text = (
            f"{counted(ranks, kind.upper() + ' rank')}, sharding {described(sharding)}, {sharding.precision}"
        )
        self._add("ranks", text, ranks=ranks, device=kind, mode=sharding.mode, precision=sharding.precision)
        return ranks

    # --- model ------------------------------------------------------------------------------------------------------

    def _model(self, config: Config) -> nn.Module:
        module = _build_without_memory(config.model)
        if not any(isinstance(each, config.model.units(module)) for each in module.modules()):
            raise ConfigError(
                "the model has no module of the classes that are its units",
                where=type(config.model).__name__,
                fix="name the class of its blocks as unit",
            )
        parameters = sum(param.numel() for param in module.parameters())
        name = type(config.model).__name__
        text = f"{name}, {format_count(parameters)} parameters, context {config.model.context}"
        self._add("model", text, model=name, parameters=parameters)
        return module

    def _memory(self, config: Config, module: nn.Module, ranks: int) -> None:
        weights = sum(param.numel() * param.element_size() for param in module.parameters())
        state = _state_bytes(config, module)
        parts = _shards(config.sharding, ranks)
        sizes = {
            "weights": weights // parts["weights"],
            "gradients": weights // parts["gradients"],
            "optimizer state": (state or 0) // parts["optimizer state"],
        }
        text = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
        unknown = " (not known)" if state is None else ""
        self._add(
            "memory",
            f"{format_bytes(sum(sizes.values()))} per rank: {text}{unknown}; besides activations"
            + ("" if config.sharding.mode in ("none", "optimizer") else " and the units in use"),
            bytes_per_rank={name.replace(" ", "_"): size for name, size in sizes.items()},
        )
        _refuse_too_large(sum(sizes.values()), ranks, config.sharding, self.values["device"])

    def _steps(self, config: Config, data_world_size: int) -> None:
        train = config.train
        order = plan_order(1, train, data_world_size, None)
        tokens = train.batch_size * config.model.context
        micro_batches = counted(order.accumulate, "micro-batch", "micro-batches")
        text = (
            f"{train.steps} of {counted(train.batch_size, 'sequence')} of {counted(config.model.context, 'token')}: "
            f"{format_count(tokens)} tokens a step, {format_count(tokens * train.steps)} in all; "
            f"{order.micro_batch_size * order.accumulate} per rank in {micro_batches}"
        )
        self._add("steps", text, steps=train.steps, tokens_of_step=tokens, micro_batches=order.accumulate)

    # --- data -------------------------------------------------------------------------------------------------------

    def _data(self, config: Config, data_world_size: int) -> None:
        sources = sources_of(config.data)
        if any(needs_tokenizing(source) for source in sources):
            for source in sources:
                self._add("data", _look_at(source), data=config.data.path)
            return
        data = open_data(config, Path(), data_world_size)
        samples = data.samples
        samples.batch([0])
        text = (
            f"{format_count(data.num_tokens)} tokens: {format_count(samples.num_training)} sequences to train on, "
            f"{format_count(samples.num_held_out)} held out"
        )
        where = ", ".join(source.path or "the source code of Python's library" for source in sources)
        self._add("data", f"{where}\n{text}", tokens=data.num_tokens, sequences=samples.num_training)

    # --- folder -----------------------------------------------------------------------------------------------------

    def _folder(self, config: Config, module: nn.Module | None) -> None:
        if self._request.resume:
            self._continued(Path(self._request.resume).expanduser(), config, module)
            return
        folder = _new_folder(config)
        refuse_checkpoints_in(folder)
        _refuse_unusable(folder)
        every = f"every {counted(config.checkpoint.every, 'step')} and " if config.checkpoint.every else ""
        self._add("folder", f"{short_path(folder)}, a checkpoint {every}at the end", folder=str(folder))

    def _continued(self, folder: Path, config: Config, module: nn.Module | None) -> None:
        _refuse_unusable(folder)
        latest = Store(folder / CHECKPOINTS).latest()
        if latest is None:
            raise ConfigError(
                "there is no checkpoint to continue from",
                where=str(folder),
                fix="start again without --resume",
            )
        manifest = read_manifest(latest)
        step = int(manifest.run["step"])
        self._add("folder", f"{short_path(folder)}, from {latest.name}", folder=str(folder), first_step=step)
        refuse_fewer_steps(config.train.steps, step, "train.steps")
        if self._request.stop_after is not None:
            refuse_fewer_steps(self._request.stop_after, step, "--stop-after")
        if module is not None:
            _refuse_other_model(module, manifest, latest)


# --- model --------------------------------------------------------------------------------------------------------


def _build_without_memory(source: ModelSource) -> nn.Module:
    if isinstance(source, HuggingFaceModel):
        source = replace(source, pretrained=False)
    try:
        with torch.device("meta"):
            return source.build()
    except ShardwiseError:
        raise
    except Exception:  # noqa: BLE001  a model of one's own may do anything with its values
        return source.build()


def _state_bytes(config: Config, module: nn.Module) -> int | None:
    """Returns the bytes of the optimizer's state for the whole model; None if it takes values to know them.

    Raises:
        ConfigError: the optimizer cannot be made.
    """
    units = {
        name: unit for name, unit in module.named_modules() if isinstance(unit, config.model.units(module))
    }
    stand_in = SimpleNamespace(module=module, units=units, mode="none", home=torch.device("cpu"))
    optimizer = make_optimizer(cast(Parallel, stand_in), config.optimizer)
    try:
        for param in module.parameters():
            param.grad = torch.empty_like(param, device="meta")
        optimizer.step()
    except Exception:  # noqa: BLE001  what an optimizer of one's own does without values
        return None
    return sum(tensor.numel() * tensor.element_size() for tensor in _state_tensors(optimizer))


def _state_tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _shards(sharding: Sharding, ranks: int) -> dict[str, int]:
    """Returns among how many ranks each kind of tensor is divided."""
    mode, grid = sharding.mode, plan_grid(sharding, 0, ranks)
    divided = grid.stages * grid.tensor
    parts = divided * grid.shards
    return {
        "weights": divided if mode in ("none", "optimizer") else parts,
        "gradients": divided if mode in ("none", "optimizer") else parts,
        "optimizer state": divided if mode == "none" else parts,
    }


def _refuse_too_large(size: int, ranks: int, sharding: Sharding, kind: str) -> None:
    """Raises ConfigError if what every rank holds all the time is more than its device has."""
    if kind == "cuda" and not sharding.offload:
        place, limit = "a GPU of this machine", torch.cuda.get_device_properties(0).total_memory
    else:
        place = "a rank's part of this machine's memory"
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // here
    if size > limit:
        raise ConfigError(
            f"a rank needs {format_bytes(size)}, and {place} is {format_bytes(limit)}",
            where=f"the model on {counted(ranks, 'rank')}, sharding {sharding.mode}",
            fix="use more ranks, sharding.mode=full or a smaller model"
            + ("" if sharding.offload or kind == "cpu" else ", or sharding.offload=true"),
        )


def _refuse_other_model(module: nn.Module, manifest: Manifest, checkpoint: Path) -> None:
    for name, param in module.named_parameters():
        found = manifest.tensors.get(MODEL + name)
        if found is None or tuple(found.shape) != tuple(param.shape):
            has = "no such tensor" if found is None else f"one of shape {list(found.shape)}"
            raise ConfigError(
                f"the model's '{name}' has shape {list(param.shape)}, and the checkpoint has {has}",
                where=str(checkpoint),
                fix="use the recipe and the model's settings that the run had",
            )


# --- data and folder ----------------------------------------------------------------------------------------------


def _look_at(source: Data) -> str:
    """Looks at data that becomes tokens when the run starts: files, the tokenizer, and the first row."""
    if source.path.startswith("hf:"):
        require("datasets", f"the data set '{source.path}'")
        return f"{source.path}: a data set, loaded when the run starts"
    files = text_files(existing_path(source.path)) if source.path else []
    if source.tokenizer != BYTES:
        load_tokenizer(source.tokenizer)
    if files and files[0].suffix in (".jsonl", ".parquet"):
        # Raises if it cannot be read.
        next(token_lists(source), None)
    size = sum(file.stat().st_size for file in files)
    return (
        f"{source.path or 'Python'}: {counted(len(files), 'file')}, {format_bytes(size)}; "
        f"becomes tokens of '{source.tokenizer}' when the run starts"
    )


def _new_folder(config: Config) -> Path:
    """Returns the folder that a new run would have."""
    if config.output.folder:
        return Path(config.output.folder).expanduser().resolve()
    folder, number = Path("runs") / config.name, 1
    while folder.exists():
        number += 1
        folder = folder.with_name(f"{config.name}-{number}")
    return folder.resolve()


def _refuse_unusable(folder: Path) -> None:
    """Raises ConfigError if a run could not write to a folder, or another run does."""
    if folder.is_dir() and is_locked(folder):
        raise ConfigError(
            f"another run is active in {folder}: {lock_holder(folder)}",
            where="the run's folder",
            fix="wait for it or stop it, or choose another folder",
        )
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"cannot create a run in '{folder}': {existing} is not a folder that can be written to",
            where="output.folder",
            fix="choose a folder that can be written to: --out FOLDER",
        )
