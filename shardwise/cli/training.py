"""The commands that run a model: ``shardwise train | generate | eval``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.wording import describe
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.train.command import Request

__all__ = ["add_eval", "add_generate", "add_train", "request_of"]


# --- train --------------------------------------------------------------------------------------------------------


def add_train(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Train a model from a recipe, on all GPUs of this machine or on two CPU ranks. "
        "Under torchrun or srun, join their ranks.",
        "shardwise train tiny",
        "shardwise train tiny --set data.path=my_texts/ --set train.steps=500 --out runs/mine",
        "shardwise train --resume runs/mine --set train.steps=1000",
        "shardwise train tiny --settings",
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        help="tiny, small, llama-125m, llama-1b, llama-8b, or file.py:function (default: tiny)",
    )
    parser.add_argument(
        "--set", dest="settings", metavar="NAME=VALUE", action="append", default=[], help="change a setting"
    )
    parser.add_argument(
        "--settings", dest="lists", action="store_true", help="list all settings of the recipe"
    )
    parser.add_argument(
        "--ranks", type=int, help="ranks to start here (default: one per GPU, else 2 on the CPU)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="continue a run (default: the recipe's newest)",
    )
    parser.add_argument(
        "--auto", action="store_true", help="choose the fastest sharding that fits these GPUs, by prediction"
    )
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="save and stop there, as SIGTERM does")
    parser.add_argument(
        "--out", metavar="FOLDER", help="the run's folder, short for --set output.folder=FOLDER"
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--quiet", action="store_true", help="show only warnings")
    shown.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.set_defaults(run=_train)


def request_of(options: argparse.Namespace) -> Request:
    """Returns the request that the arguments of ``shardwise train`` describe."""
    from shardwise.train.command import Request

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
    from shardwise.train.command import resolve, train
    from shardwise.train.config import settings_of

    request = request_of(options)
    if options.auto:
        from shardwise.train.prediction import as_settings, chosen_here

        chosen = chosen_here(resolve(request)[0], options.ranks, None)
        if not options.quiet and not options.json:
            print(chosen.text())
        options.settings = [*options.settings, *as_settings(chosen.best.question.settings)]
        request = request_of(options)
    if not options.lists:
        return train(request)
    config, _ = resolve(request)
    for name, _, value in settings_of(config):
        print(f"{name} = {value}")
    return 0


# --- generate -----------------------------------------------------------------------------------------------------


def add_generate(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Let a trained model go on with a text. Without a prompt, ask for prompts in the terminal; where there is no "
        "terminal, begin from nothing.",
        "shardwise generate runs/tiny 'def main('",
        "shardwise generate runs/tiny",
        "shardwise generate exported --prompts prompts.txt --temperature 0 --json",
    )
    _add_model(parser)
    parser.add_argument("prompt", nargs="*", help="the beginning of a text; several make several texts")
    parser.add_argument(
        "--prompts", metavar="FILE", help="a file with a prompt in each line; -: standard input"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=200, metavar="N", help="of each text (default: 200)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest token (default: 0.8)"
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="draw from the K likeliest tokens (default: from all)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens up to probability P",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per text")
    parser.set_defaults(run=_generate)


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that all commands on a trained model have."""
    parser.add_argument("model", help="a run's folder, a checkpoint, or an exported model")
    parser.add_argument("--recipe", help="the recipe of a model of your own: file.py:function")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="bytes, ids, or a tokenizer's folder (default: the model's)"
    )
    parser.add_argument("--ranks", type=int, help="ranks to shard the model over (default: 1)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def _generate(options: argparse.Namespace) -> int:
    from shardwise.train.generate import Request, generate
    from shardwise.train.sampling import Sampling

    prompts = (*options.prompt, *(_read_prompts(options.prompts) if options.prompts else ()))
    return generate(
        Request(
            model=options.model,
            prompts=prompts,
            is_interactive=not prompts and not options.json and sys.stdin.isatty() and sys.stdout.isatty(),
            sampling=Sampling(options.temperature, options.top_k, options.top_p, options.seed),
            max_tokens=options.max_tokens,
            recipe=options.recipe,
            tokenizer=options.tokenizer,
            ranks=options.ranks,
            device=options.device,
            as_json=options.json,
        )
    )


def _read_prompts(path: str) -> list[str]:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the prompts cannot be read: {error}", where=f"--prompts {path}", fix="pass a text file"
        ) from None
    prompts = [line for line in text.splitlines() if line]
    if not prompts:
        raise ConfigError(
            "there are no prompts in it", where=f"--prompts {path}", fix="write one in each line"
        )
    return prompts


# --- eval ---------------------------------------------------------------------------------------------------------


def add_eval(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Compute the loss of a trained model: on all whole sequences of some data, or on what its run held out.",
        "shardwise eval runs/tiny",
        "shardwise eval runs/tiny --data new.txt --data more_texts/ --json",
    )
    _add_model(parser)
    parser.add_argument(
        "--data",
        metavar="PATH",
        action="append",
        default=[],
        help="text, a folder or a .bin; may be repeated",
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="sequences per rank at a time (default: 8)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per source")
    parser.set_defaults(run=_eval)


def _eval(options: argparse.Namespace) -> int:
    from shardwise.train.evaluation import EvaluationRequest, evaluate

    return evaluate(
        EvaluationRequest(
            model=options.model,
            sources=tuple(options.data),
            batch_size=options.batch_size,
            recipe=options.recipe,
            tokenizer=options.tokenizer,
            ranks=options.ranks,
            device=options.device,
            as_json=options.json,
        )
    )
