"""The commands about what runs leave on disk: ``shardwise runs | watch | convert``."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.wording import describe
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.train.runs import Run

__all__ = ["add_convert", "add_runs", "add_watch"]


# --- convert ------------------------------------------------------------------------------------------------------


def add_convert(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Convert weights. A run or a checkpoint becomes a folder of safetensors in Hugging Face's layout, one "
        ".safetensors file or one .pt file, by TARGET's name. Any of these becomes a run to continue with "
        "'shardwise train RECIPE --resume TARGET'.",
        "shardwise convert runs/tiny exported",
        "shardwise convert runs/tiny model.safetensors --dtype bfloat16",
        "shardwise convert exported runs/again",
    )
    parser.add_argument("source", help="a run's folder, a checkpoint, a folder of safetensors, a file")
    parser.add_argument("target", help="what to write; it must not exist yet")
    parser.add_argument(
        "--shard-size", default="5GB", metavar="SIZE", help="maximum size of a file (default: 5GB)"
    )
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="of the weights written")
    parser.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> int:
    import torch

    from shardwise.checkpoint import convert
    from shardwise.checkpoint.weights import open_weights

    weights = open_weights(options.source)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.target.endswith((".pt", ".pth")):
        written = [convert.export_torch(weights, options.target, dtype=dtype)]
    elif weights.is_checkpoint or options.target.endswith(".safetensors"):
        size = _bytes(options.shard_size)
        written = convert.export_safetensors(weights, options.target, shard_bytes=size, dtype=dtype)
    else:
        written = [convert.import_weights(weights, options.target)]
    for path in written:
        print(path)
    return 0


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(
            f"'{text}' is not a size", where="--shard-size", fix="write one such as 5GB or 500MB"
        )
    power = " KMGT".index(match[2].upper() or " ")
    return max(1, int(float(match[1]) * 1000**power))


# --- runs ---------------------------------------------------------------------------------------------------------


def add_runs(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Look at runs and folders. One run, or a folder with one, is shown in full, several as a list; a folder "
        "without runs is described.",
        "shardwise runs",
        "shardwise runs runs/tiny",
        "shardwise runs runs/tiny runs/tiny-2 --compare",
        "shardwise runs runs/tiny runs/tiny-2 --compare --picture losses.png",
        "shardwise runs runs/tiny --verify",
        "shardwise runs runs/tiny --prune 1",
    )
    parser.add_argument(
        "folders", nargs="*", metavar="folder", help="default: runs, or else the current folder"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--compare", action="store_true", help="show what differs between runs, and their curves on one scale"
    )
    action.add_argument(
        "--verify", action="store_true", help="compare every byte of checkpoints with its checksum"
    )
    action.add_argument(
        "--prune", type=int, metavar="N", help="delete all but the N newest checkpoints of each run"
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the losses of the runs in one picture, a PNG")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run or checkpoint")
    parser.set_defaults(run=_runs)


def _runs(options: argparse.Namespace) -> int:
    from shardwise.train import runs, runs_as_text
    from shardwise.train.records import json_line

    default = ["runs"] if Path("runs").is_dir() else ["."]
    folders = [Path(folder).expanduser() for folder in options.folders or default]
    for folder in folders:
        if not folder.is_dir():
            what = f"'{folder}' is a file" if folder.exists() else f"there is no folder '{folder}'"
            raise ConfigError(
                what, where="shardwise runs", fix="pass a folder; without one, all runs here are shown"
            )
    found = [runs.read_run(path) for path in runs.runs_in(folders)]
    _check_number(options, len(found), folders[0])
    if options.verify:
        return _verify(found, options.json)
    if options.prune is not None:
        return _prune(found, options.prune, options.json)
    if options.picture is not None:
        _draw(found, Path(options.picture).expanduser())
    width = shutil.get_terminal_size().columns
    if options.json:
        lines: Iterable[str] = (json_line(run.as_json()) for run in found)
    elif options.compare:
        lines = runs_as_text.compare_runs(found, width)
    elif len(found) == 1:
        lines = runs_as_text.show_run(found[0])
    elif found:
        lines = runs_as_text.list_runs(found, width)
    else:
        lines = (line for folder in folders for line in runs_as_text.describe_folder(folder))
    for line in lines:
        print(line)
    if options.picture is not None and not options.json:
        print(f"\ndrawn: {options.picture}")
    return 0


def _check_number(options: argparse.Namespace, count: int, folder: Path) -> None:
    """Raises ConfigError if there are too few runs for what was asked for."""
    asked = ("compare", "verify", "picture", "prune")
    needs = (
        2
        if options.compare
        else 1
        if any(getattr(options, name) not in (None, False) for name in asked)
        else 0
    )
    if count < needs:
        raise ConfigError(
            f"there is {'one run' if count else 'no run'} in '{folder}', and two are needed to compare"
            if needs == 2
            else f"there is no run in '{folder}'",
            where="shardwise runs",
            fix="pass the folders of runs, such as runs/tiny; 'shardwise runs' lists those here",
        )


def _draw(found: list[Run], path: Path) -> None:
    from shardwise.train.loss_picture import loss_picture
    from shardwise.train.optional_packages import require
    from shardwise.train.run_files import replace_file

    require("matplotlib", "--picture")
    drawn = loss_picture({run.folder: run.records for run in found})
    assert drawn is not None
    try:
        replace_file(path, drawn)
    except OSError as error:
        raise ConfigError(
            f"the picture cannot be written: {error.strerror}",
            where=f"--picture {path}",
            fix="name a file in a folder that can be written to",
        ) from None


def _verify(found: list[Run], as_json: bool) -> int:
    from shardwise.train.runs import verify_run

    status = 0
    for run in found:
        for name, damage in verify_run(run):
            status = status if damage is None else 1
            if as_json:
                print(
                    json.dumps({"folder": str(run.folder), "checkpoint": name, "damage": damage}), flush=True
                )
            else:
                print(f"{run.folder / 'checkpoints' / name}: {damage or 'good'}", flush=True)
    return status


def _prune(found: list[Run], keep: int, as_json: bool) -> int:
    from shardwise.train.runs import prune_run

    status = 0
    for run in found:
        try:
            deleted = prune_run(run, keep)
        except ConfigError as error:
            # A run that is active keeps its checkpoints; the others are pruned all the same.
            print(f"error: {error}", file=sys.stderr, flush=True)
            status = 1
            continue
        if as_json:
            print(json.dumps({"folder": str(run.folder), "deleted": deleted}))
        else:
            print(f"{run.folder}: deleted {', '.join(deleted) or 'nothing'}")
    return status


# --- watch --------------------------------------------------------------------------------------------------------


def add_watch(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Serve a page that shows runs as they train: loss, throughput, memory, ranks and logs. It is served on this "
        "machine only; from another, open a tunnel: ssh -L 8080:localhost:8080 HOST",
        "shardwise watch runs",
        "shardwise watch runs/tiny runs/tiny-2 --port 8080",
    )
    parser.add_argument(
        "folders", nargs="*", metavar="folder", help="runs, or folders of runs (default: runs)"
    )
    parser.add_argument("--port", type=int, default=8080, help="default: 8080; 0: any that is free")
    parser.set_defaults(run=_watch)


def _watch(options: argparse.Namespace) -> int:
    from shardwise.train.watch import watch

    return watch([Path(folder).expanduser() for folder in options.folders or ["runs"]], options.port)
