"""The command line: ``shardwise train | convert | doctor``. It reads arguments; the work is done by the rooms below."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shardwise.errors import ShardwiseError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except ShardwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardwise",
        description="Train models that do not fit on one device, and look after what they leave.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_train(commands.add_parser("train", help="train a model from a recipe"))
    return parser


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


def _train(options: argparse.Namespace) -> int:
    from shardwise.train.command import Request, resolve, train

    settings = list(options.settings)
    if options.out is not None:
        settings.append(f"output.folder={options.out}")
    show = "quiet" if options.quiet else "json" if options.json else None
    request = Request(
        recipe=options.recipe,
        settings=tuple(settings),
        ranks=options.ranks,
        device=options.device,
        resume=options.resume,
        stop_after=options.stop_after,
        show=show,
    )
    if options.lists:
        from shardwise.train.config import settings_of

        config, _ = resolve(request)
        for name, _, value in settings_of(config):
            print(f"{name} = {value}")
        return 0
    return train(request)


if __name__ == "__main__":
    sys.exit(main())
