"""The commands that run a model: ``shardwise train | generate | eval``."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

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
        "shardwise train tiny --settings > my.toml",
        "shardwise train my.toml --set train.steps=1000 --dry-run",
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        help="tiny, small, llama-125m, llama-1b, llama-8b, file.py:function, or file.toml (default: tiny)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="settings in TOML; with a recipe of your own, beside its name"
    )
    parser.add_argument(
        "--set", dest="settings", metavar="NAME=VALUE", action="append", default=[], help="change a setting"
    )
    parser.add_argument(
        "--settings", dest="lists", action="store_true", help="explain all settings of the recipe, as TOML"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would run, check what can be checked, train nothing"
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
        "--profile",
        type=int,
        nargs="?",
        const=3,
        metavar="N",
        help="profile N steps (default: 3), and write their trace and its picture",
    )
    parser.add_argument(
        "--auto-resume",
        action="store_true",
        help="continue the run in --out if it has a checkpoint, else begin it: for launchers that restart",
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
    recipe, config = options.recipe, options.config
    if recipe is not None and recipe.endswith(".toml") and config is None:
        recipe, config = None, recipe
    return Request(
        recipe=recipe,
        settings=tuple(settings),
        ranks=options.ranks,
        device=options.device,
        resume=options.resume,
        auto_resume=options.auto_resume,
        stop_after=options.stop_after,
        show="quiet" if options.quiet else "json" if options.json else None,
        config=config,
        profile=options.profile or 0,
    )


def _train(options: argparse.Namespace) -> int:
    _load_torch(says_so=not (options.quiet or options.json or options.lists))
    from shardwise.train.command import train

    request = request_of(options)
    if options.lists:
        from shardwise.cli.settings import settings_as_toml

        width = shutil.get_terminal_size().columns
        for line in settings_as_toml(request, min(width, 100)):
            print(line)
        return 0
    if options.auto:
        request = _with_chosen_settings(options, request)
    if options.dry_run:
        from shardwise.train.dry_run import dry_run

        return dry_run(request, as_json=options.json)
    return train(request)


def _load_torch(*, says_so: bool) -> None:
    """Imports torch, which takes seconds, and says at once that nothing else happens yet.

    Ctrl-C ends the program meanwhile: as an exception, an import may swallow it.
    """
    if "torch" in sys.modules:
        return
    is_first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    if says_so and is_first:
        with contextlib.suppress(OSError):
            print("loading torch …", file=sys.stderr, flush=True)
    raises = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch  # noqa: F401

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _are_terminals(*streams: TextIO | None) -> bool:
    """Returns whether all of these are terminals; a stream that is closed is None."""
    return all(stream is not None and stream.isatty() for stream in streams)


def _with_chosen_settings(options: argparse.Namespace, request: Request) -> Request:
    """Returns the request with the sharding that ``--auto`` chooses, and shows why."""
    from shardwise.train.prediction import as_settings, chosen_here
    from shardwise.train.request import resolve

    chosen = chosen_here(resolve(request).config, options.ranks, None)
    if not options.quiet and not options.json:
        print(chosen.text())
    options.settings = [*options.settings, *as_settings(chosen.best.question.settings)]
    return request_of(options)


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
    _load_torch(says_so=_are_terminals(sys.stderr) and not options.json)
    from shardwise.train.generate import Request, generate
    from shardwise.train.sampling import Sampling

    prompts = (*options.prompt, *(_read_prompts(options.prompts) if options.prompts else ()))
    return generate(
        Request(
            model=options.model,
            prompts=prompts,
            is_interactive=not prompts and not options.json and _are_terminals(sys.stdin, sys.stdout),
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
        text = (sys.stdin.read() if sys.stdin else "") if path == "-" else Path(path).expanduser().read_text()
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
    _load_torch(says_so=_are_terminals(sys.stderr) and not options.json)
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
