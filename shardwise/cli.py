"""The command line: ``shardwise train | run | convert | doctor | trace``. It parses arguments and calls packages."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import runpy
import sys
from collections.abc import Sequence

import torch

from shardwise.checkpoint import convert
from shardwise.checkpoint.weights import open_weights
from shardwise.compat import install
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.train.command import Request, resolve, train
from shardwise.train.config import settings_of
from shardwise.train.doctor import examine
from shardwise.version import __version__

__all__ = ["main", "parser", "request_of"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except ShardwiseError as error:
        if options.shows_tracebacks:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="shardwise",
        description="Train models that do not fit on one device, and look after what they leave.",
    )
    top.set_defaults(shows_tracebacks=False)
    top.add_argument(
        "--version", action="version", version=f"shardwise {__version__}, torch {torch.__version__}"
    )
    commands = top.add_subparsers(required=True, metavar="command")
    _add_train(commands.add_parser("train", help="train a model from a recipe"))
    _add_run(commands.add_parser("run", help="run a script with shardwise in place of torch's FSDP and ZeRO"))
    _add_convert(
        commands.add_parser("convert", help="turn checkpoints into safetensors or torch files, and back")
    )
    _add_doctor(commands.add_parser("doctor", help="say what this machine has and what is missing"))
    _add_trace(commands.add_parser("trace", help="show what a rank did last before it failed"))
    return top


# --- train --------------------------------------------------------------------------------------------------------


def _add_train(train: argparse.ArgumentParser) -> None:
    train.description = (
        "Train a model from a recipe, on all GPUs of this machine or on two CPU ranks. "
        "Under torchrun or srun, join their ranks."
    )
    train.add_argument(
        "recipe",
        nargs="?",
        help="tiny, small, llama-125m, llama-1b, llama-8b, or file.py:function (default: tiny)",
    )
    train.add_argument(
        "--set", dest="settings", metavar="NAME=VALUE", action="append", default=[], help="change a setting"
    )
    train.add_argument(
        "--settings", dest="lists", action="store_true", help="list all settings of the recipe"
    )
    train.add_argument(
        "--ranks", type=int, help="ranks to start here (default: one a GPU, else 2 on the CPU)"
    )
    train.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    train.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="continue a run (default: the recipe's newest)",
    )
    train.add_argument("--stop-after", type=int, metavar="STEP", help="save and stop there, as SIGTERM does")
    train.add_argument(
        "--out", metavar="FOLDER", help="the run's folder, short for --set output.folder=FOLDER"
    )
    shown = train.add_mutually_exclusive_group()
    shown.add_argument("--quiet", action="store_true", help="show warnings alone")
    shown.add_argument("--json", action="store_true", help="print one JSON object a line")
    train.set_defaults(run=_train)


def request_of(options: argparse.Namespace) -> Request:
    """Returns the request that the arguments of ``shardwise train`` describe."""
    settings = list(options.settings)
    if options.out is not None:
        settings.append(f"output.folder={options.out}")
    return Request(
        recipe=options.recipe,
        settings=tuple(settings),
        ranks=options.ranks,
        device=options.device,
        resume=options.resume,
        stop_after=options.stop_after,
        show="quiet" if options.quiet else "json" if options.json else None,
    )


def _train(options: argparse.Namespace) -> int:
    request = request_of(options)
    if not options.lists:
        return train(request)
    config, _ = resolve(request)
    for name, _, value in settings_of(config):
        print(f"{name} = {value}")
    return 0


# --- run ----------------------------------------------------------------------------------------------------------


def _add_run(run: argparse.ArgumentParser) -> None:
    run.description = (
        "Run a Python script with shardwise in place of torch's FSDP and ZeRO, for libraries that import those from "
        "torch: shardwise.install(), then the script. Under a launcher: torchrun ... -m shardwise run script.py"
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module, as in python -m")
    run.add_argument("script", help="a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    run.set_defaults(run=_run, shows_tracebacks=True)


def _run(options: argparse.Namespace) -> int:
    if not options.is_module and not os.path.exists(options.script):
        print(f"error: there is no file '{options.script}'", file=sys.stderr)
        return 2
    installation = install()
    if os.environ.get("RANK", "0") == "0":
        print(installation, file=sys.stderr, flush=True)
    sys.argv[:] = [options.script, *options.arguments]
    if options.is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        # As python does: the script finds what lies beside it, wherever it goes.
        script = os.path.abspath(options.script)
        sys.path[0] = os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")
    return 0


# --- convert ------------------------------------------------------------------------------------------------------


def _add_convert(convert: argparse.ArgumentParser) -> None:
    convert.description = (
        "Convert weights. A run or a checkpoint becomes a folder of safetensors in Hugging Face's layout, one "
        ".safetensors file or one .pt file, by TARGET's name. Any of these becomes a run to continue with "
        "'shardwise train RECIPE --resume TARGET'."
    )
    convert.add_argument("source", help="a run's folder, a checkpoint, a folder of safetensors, a file")
    convert.add_argument("target", help="what to make; it must not be there yet")
    convert.add_argument(
        "--shard-size", default="5GB", metavar="SIZE", help="the most a file holds (default: 5GB)"
    )
    convert.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="of the weights written")
    convert.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> int:
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
        raise ConfigError(f"'{text}' is no size", where="--shard-size", fix="write one such as 5GB or 500MB")
    power = " KMGT".index(match[2].upper() or " ")
    return max(1, int(float(match[1]) * 1000**power))


# --- doctor -------------------------------------------------------------------------------------------------------


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.description = "Look at this machine: versions, devices, disk, and whether ranks can talk."
    doctor.add_argument("--json", action="store_true", help="print one JSON object a line")
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    marks = {True: "ok", False: "NO", None: "--"}
    bad = 0
    for finding in examine():
        bad += finding.good is False
        if options.json:
            print(json.dumps(dataclasses.asdict(finding)), flush=True)
            continue
        print(f"  {marks[finding.good]}  {finding.name:<13} {finding.text}", flush=True)
        if finding.fix:
            print(f"      {'':<13} fix: {finding.fix}", flush=True)
    if not options.json:
        print("all that training needs is there" if not bad else f"{bad} to fix before training", flush=True)
    return 1 if bad else 0


# --- trace --------------------------------------------------------------------------------------------------------


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show what ranks did last, from the files that they left when they failed."
    parser.add_argument(
        "files", nargs="+", metavar="file", help="shardwise-failure-rank0-….json, as the error named it"
    )
    parser.set_defaults(run=_trace)


def _trace(options: argparse.Namespace) -> int:
    from shardwise.trace import read_failure

    print("\n\n".join(read_failure(file).text() for file in options.files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
