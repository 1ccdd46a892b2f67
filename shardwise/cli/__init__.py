"""The command line: parses arguments and calls packages. Nothing of torch is imported before a command needs it.

training     train, generate, eval
plan         plan
folders      runs, watch, convert
machine      doctor, run, trace
completion   of all of them, by the shell
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from shardwise.cli.completion import add_completion
from shardwise.cli.folders import add_convert, add_runs, add_watch
from shardwise.cli.machine import add_doctor, add_run, add_trace
from shardwise.cli.plan import add_plan
from shardwise.cli.training import add_eval, add_generate, add_train, request_of
from shardwise.errors import ShardwiseError
from shardwise.version import __version__

__all__ = ["main", "parser", "request_of"]

_COMMANDS = (
    ("train", "train a model from a recipe", add_train),
    ("plan", "predict the memory and time of a recipe's step, without a GPU", add_plan),
    ("generate", "let a trained model write text", add_generate),
    ("eval", "compute the loss of a trained model on data", add_eval),
    ("runs", "show runs and folders, compare, verify and prune them", add_runs),
    ("watch", "serve a page that shows runs as they train", add_watch),
    ("convert", "turn checkpoints into safetensors or torch files, and back", add_convert),
    ("doctor", "check what this machine has and what is missing", add_doctor),
    ("run", "run a script with shardwise in place of torch's FSDP and ZeRO", add_run),
    ("trace", "show what a rank did last before it failed", add_trace),
    (
        "completion",
        "complete commands and settings in bash, zsh or fish",
        lambda each: add_completion(each, parser),
    ),
)


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
        description="Train models that do not fit on one device, look at them, and manage their checkpoints.",
        epilog="shardwise COMMAND --help shows examples. To begin: shardwise train tiny",
    )
    top.set_defaults(shows_tracebacks=False)
    top.add_argument("--version", action=_Version, nargs=0, help="show the versions of shardwise and torch")
    commands = top.add_subparsers(required=True, metavar="command")
    for name, text, add in _COMMANDS:
        add(commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter))
    return top


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import torch

        print(f"shardwise {__version__}, torch {torch.__version__}")
        parser.exit()
