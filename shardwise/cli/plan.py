"""``shardwise plan``: what a recipe's step needs and how long it takes, without a GPU."""

from __future__ import annotations

import argparse
import json
from itertools import product
from typing import TYPE_CHECKING

from shardwise.cli.wording import describe
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.forecast.plan import Plan
    from shardwise.train.config import Config

__all__ = ["add_plan"]


def add_plan(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Predict the memory and the time of a recipe's step on any number of ranks: what fits, how fast it is, and "
        "which settings are better. Runs anywhere; nothing is allocated.",
        "shardwise plan llama-8b --device h200 --ranks 64 --nodes 8",
        "shardwise plan my.py:recipe --ranks 8 --set sharding.recompute=true --html step.html",
        "shardwise plan llama-8b --ranks 8 --compare sharding.recompute=true,false --compare device=h100,h200",
        "shardwise plan llama-8b --ranks 64 --nodes 8 --what-if ranks=8..4096",
        "shardwise plan llama-8b --ranks 16 --device h100 --choose",
    )
    parser.add_argument("recipe", help="tiny, small, llama-125m, llama-1b, llama-8b, or file.py:function")
    parser.add_argument(
        "--device",
        default="h200",
        help="h100, h200, a100, b200, l40s, ..., or a file of prices (default: h200)",
    )
    parser.add_argument(
        "--ranks", type=int, help="devices (default: 8, or as many of them as the batch can be divided among)"
    )
    parser.add_argument("--nodes", type=int, help="machines that they are on (default: one for every 8)")
    parser.add_argument(
        "--set", dest="settings", metavar="NAME=VALUE", action="append", default=[], help="change a setting"
    )
    parser.add_argument(
        "--compare",
        metavar="NAME=A,B",
        action="append",
        default=[],
        help="one line for each value of a setting, or of device, ranks or nodes; may be repeated",
    )
    parser.add_argument("--what-if", metavar="ranks=8..4096", help="one line for 8, 16, 32, ... ranks")
    parser.add_argument(
        "--choose", action="store_true", help="find the fastest settings that fit, to copy into a run"
    )
    parser.add_argument(
        "--budget-gb", type=float, metavar="GIB", help="with --choose: what torch may reserve"
    )
    parser.add_argument("--html", metavar="FILE", help="write the step as a picture")
    parser.add_argument(
        "--over",
        metavar="TRACE",
        action="append",
        default=[],
        help="with --html: draw it over a measured step, a file of Recorder.save_chrome or torch.profiler",
    )
    parser.add_argument("--json", action="store_true", help="print numbers as JSON")
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from shardwise.train.prediction import assumptions
    from shardwise.train.recipes import load_recipe

    if sum(map(bool, (options.choose, options.compare, options.what_if))) > 1:
        raise ConfigError(
            "--choose, --compare and --what-if are one question at a time",
            where="shardwise plan",
            fix="ask one of them",
        )
    if options.over and not options.html:
        raise ConfigError(
            "--over draws a measured step into a page, and there is none",
            where="shardwise plan --over",
            fix="name the page with --html FILE",
        )
    config = load_recipe(options.recipe)
    if options.ranks is None:
        options.ranks = _ranks_for(_with(config, options.settings))
    if options.choose:
        return _choose(options, _with(config, options.settings))
    named = _plans(options, config)
    if options.json:
        print(json.dumps([plan.as_json() | {"name": name} for name, plan in named], indent=1))
    elif len(named) > 1 or options.compare or options.what_if:
        from shardwise.forecast.report import comparison_text

        print(comparison_text(named))
    else:
        print(_text(named[0][1]))
    if not options.json:
        for line in assumptions(_with(config, options.settings)):
            print(f"assumed: {line}")
    _draw(options, [plan for _, plan in named])
    return 0


def _draw(options: argparse.Namespace, plans: list[Plan]) -> None:
    """Writes the page that ``--html`` asks for."""
    if not options.html:
        return
    from shardwise.forecast.measured import read_timeline
    from shardwise.forecast.page import write_page

    write_page(
        options.html,
        [*(plan.timeline for plan in plans), *map(read_timeline, options.over)],
        title=f"One step of {plans[0].question.name}, predicted",
        capacity_bytes=plans[0].question.device.memory_bytes,
    )
    if not options.json:
        print(f"written to {options.html}")


def _choose(options: argparse.Namespace, config: Config) -> int:
    from shardwise.train.prediction import as_settings, choose_settings

    where = {"device": options.device, "ranks": options.ranks, "nodes": options.nodes}
    chosen = choose_settings(config, *_place(where), options.budget_gb)
    settings = as_settings(chosen.best.question.settings)
    if options.json:
        print(json.dumps(chosen.best.as_json() | {"choice": settings}, indent=1))
    else:
        print(chosen.text())
        flags = " ".join(f"--set {setting}" for setting in (*options.settings, *settings))
        print(f"\nshardwise train {options.recipe} {flags}")
    _draw(options, [chosen.best])
    return 0


def _ranks_for(config: Config) -> int:
    """Up to eight ranks, of which each has equally many samples of a batch."""
    train = config.train
    return max(
        ranks for ranks in range(1, 9) if ranks == 1 or train.batch_size % (ranks * train.accumulate) == 0
    )


def _with(config: Config, settings: list[str]) -> Config:
    from shardwise.train.settings import with_settings

    return with_settings(config, settings)


def _plans(options: argparse.Namespace, config: Config) -> list[tuple[str, Plan]]:
    from shardwise.forecast.alternatives import over_ranks
    from shardwise.train.prediction import predict, question_of

    where = {"device": options.device, "ranks": options.ranks, "nodes": options.nodes}
    if options.what_if:
        first, last = _range(options.what_if)
        question = question_of(_with(config, options.settings), *_place(where))
        return over_ranks(question, first, last)
    named = []
    for choice in product(*(_values(text) for text in options.compare)):
        own = dict(where)
        settings = list(options.settings)
        for name, value in choice:
            if name in own:
                own[name] = value if name == "device" else int(value)
            else:
                settings.append(f"{name}={value}")
        plan = predict(_with(config, settings), *_place(own))
        named.append((", ".join(f"{name}={value}" for name, value in choice) or config.name, plan))
    return named


def _place(where: dict[str, object]) -> tuple[str, int, int]:
    ranks = int(str(where["ranks"]))
    nodes = where["nodes"]
    return str(where["device"]), ranks, -(-ranks // 8) if nodes is None else int(str(nodes))


def _values(text: str) -> list[tuple[str, str]]:
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(
            f"'{text}' compares nothing", where=f"--compare {text}", fix="write --compare name=value,value"
        )
    return [(name, value) for value in values.split(",")]


def _range(text: str) -> tuple[int, int]:
    first, dots, last = text.removeprefix("ranks=").partition("..")
    if not (text.startswith("ranks=") and dots and first.isdigit() and last.isdigit() and int(first)):
        raise ConfigError(
            f"'{text}' is no range of ranks", where=f"--what-if {text}", fix="write --what-if ranks=8..4096"
        )
    return int(first), int(last)


def _text(plan: Plan) -> str:
    if plan.fits:
        return plan.text()
    from shardwise.forecast.alternatives import smallest_change
    from shardwise.train.prediction import as_settings

    found = smallest_change(plan)
    if found is None:
        return f"{plan.text()}\nno change of settings was found that fits"
    before, after = plan.question, found[1].question
    had = as_settings(before.settings)
    flags = [f"--set {setting}" for setting in as_settings(after.settings) if setting not in had]
    if after.ranks != before.ranks:
        flags += [f"--ranks {after.ranks}", f"--nodes {after.nodes}"]
    spare, ms = found[1].spare_bytes / 2**30, 1e3 * found[1].seconds
    change = " ".join(flags)
    return (
        f"{plan.text()}\nsmallest change that fits: {change}: {spare:,.2f} GiB to spare, {ms:,.1f} ms a step"
    )
