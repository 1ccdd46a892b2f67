"""Tries chosen settings on a GPU: none may run out of memory, and none may be slower than settings made by hand.

    PYTHONPATH=. python benchmarks/auto_plan.py --prepare              # predicts everything, on a CPU
    PYTHONPATH=. python benchmarks/auto_plan.py --device cuda          # measures it: random, tiny, then 1b
    PYTHONPATH=. python benchmarks/auto_plan.py --device cuda --part random --seconds 60

*random*: models and budgets drawn from a seed (transformers, encoders, perceptrons and convolutions, in float32 or
bfloat16). `shardwise.choose` has chosen settings for each budget. The model is sharded as chosen, torch's allocator is
given the budget and no more, and the model takes training steps. Where nothing was to fit, the settings that need the
least are tried: they must run out.

*tiny* and *1b*: fifty settings by hand for each, and the one that was chosen, without a limit. All of them take the
same tokens a step. Each runs alone first, for its peak. Then all of *tiny*'s take turns, in another order every round,
because a host is half as fast at one moment as at another; they are ranked by the medians of their turns. In the end
the fastest and the chosen one take turns: it is to be within 5 % of the fastest. A turn has an untimed step first.

Each predicted step and peak is written beside the measured one. A fake group of 8: communication takes no time. Steps
have forward, backward and torch's fused AdamW. The results file is written after every trial.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import auto_models
import torch
import torch.distributed as dist
from auto_summary import summary_of
from auto_trials import Trial, allow, clear, in_rounds, take_turns, tried, warm_up
from measuring import RESULTS, expect, machine
from models import start_group
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.forecast.choice import choose_for, least_memory
from shardwise.forecast.device_files import load_device, with_links
from shardwise.forecast.plan import Plan, Question, answer, question_of
from shardwise.forecast.rehearsal import block_bytes
from shardwise.forecast.settings import Settings

RANKS = 8
PREPARED = RESULTS / "auto_plan_prepared.json"
MEASURED = RESULTS / "auto_plan.json"
# How much a random model may need and how long its step may take, with nothing recomputed or offloaded, as predicted.
LEAST_BYTES, MOST_BYTES, MOST_SECONDS = 2**30, 100 * 2**30, 0.35
# What the models of a grid may hold together, so that all of them take turns.
ROOM_BYTES = 16 * 2**30
GIB = 2**30

# --- what is asked ------------------------------------------------------------------------------------------------


def question(spec: dict[str, Any], **settings: Any) -> Question:
    """The question that a model's description asks: its step on one H200 of a fake group."""
    device = with_links(load_device("h200"), within="fake", between="fake")
    batch = spec["batch"] // settings.get("micro_batches", 1)
    return question_of(
        lambda: auto_models.build(spec),
        auto_models.inputs(spec, batch, torch.device("meta")),
        ranks=RANKS,
        device=device,
        mp_policy=auto_models.precision(spec),
        **settings,
    )


def as_record(plan: Plan) -> dict[str, Any]:
    """What is needed to run a plan, and what it predicts."""
    settings = plan.question.settings.changed()
    settings.pop("mp_policy", None)
    return {
        "settings": settings,
        "predicted": {
            "ms": 1e3 * plan.seconds,
            "host_ms": 1e3 * plan.step.host,
            "allocated": plan.memory.allocated,
            "reserved": plan.memory.reserved,
            "by_kind": plan.memory.by_kind,
            "place": str(plan.memory.place),
        },
    }


def prepare_random(seed: int, count: int, save: Callable[[dict[str, Any]], None]) -> None:
    """Draws models and budgets until as many have been chosen for; those refused come on top."""
    draw, found, number = random.Random(seed), 0, 0
    while found < count:
        spec = auto_models.draw(draw)
        share = draw.uniform(-0.1, 1.05)
        free = answer(question(spec))
        number += 1
        if not LEAST_BYTES < free.memory.reserved < MOST_BYTES or free.seconds > MOST_SECONDS:
            continue
        least = least_memory(question(spec))
        budget = int(least.memory.reserved + share * (free.memory.reserved - least.memory.reserved))
        trial = {"number": number, "model": spec, "budget_bytes": budget, "least": as_record(least)}
        try:
            chosen = choose_for(question(spec), budget)
        except shardwise.ConfigError as error:
            save(trial | {"refused": str(error)})
            continue
        found += 1
        save(trial | {"tried": len(chosen.compared), **as_record(chosen.best)})


def by_hand(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Fifty settings: blocks in a unit, what is kept, recomputed, offloaded, gathered ahead; and micro-batches."""
    sizes = block_bytes(question(spec).job, Settings())
    group = {count: count * max(sizes) for count in (2, 4, 8)} | {1: 0, "all": sum(sizes)}
    for count in (1, 2, 4, 8, "all"):
        for frees in (True, False):
            for part in (0, 0.5, 1):
                yield {"group_bytes": group[count], "reshard_after_forward": frees, "recompute": part}
    for micro_batches in (2, 4):
        for count in (1, 4, "all"):
            for frees in (True, False):
                yield {
                    "group_bytes": group[count],
                    "reshard_after_forward": frees,
                    "micro_batches": micro_batches,
                }
    for units in (1, 2):
        for count in (1, 4):
            yield {"group_bytes": group[count], "reshard_after_forward": True, "forward_prefetch": units}
    for part in (0, 1):
        for count in (1, 4):
            yield {
                "group_bytes": group[count],
                "reshard_after_forward": True,
                "recompute": part,
                "offload": True,
            }


def prepare_grid(name: str, save: Callable[[dict[str, Any]], None]) -> None:
    spec = auto_models.GRIDS[name]
    chosen = choose_for(question(spec), None)
    save({"name": "chosen", "model": spec, "tried": len(chosen.compared), **as_record(chosen.best)})
    for number, settings in enumerate(by_hand(spec)):
        save({"name": f"by hand {number}", "model": spec, **as_record(answer(question(spec, **settings)))})


def prepare(args: argparse.Namespace) -> None:
    content: dict[str, Any] = {"seed": args.seed, "torch": torch.__version__}
    if args.part != "all" and args.prepared.exists():
        content |= json.loads(args.prepared.read_text())
    for part in PARTS if args.part == "all" else (args.part,):
        trials = content[part] = []

        def save(trial: dict[str, Any], trials: list[Any] = trials, part: str = part) -> None:
            trials.append(trial)
            predicted = trial.get("predicted", {"ms": 0, "reserved": 0})
            print(
                f"{part} {trial.get('name', trial.get('number'))}: {trial.get('settings', 'refused')}, "
                f"{predicted['ms']:.1f} ms, {predicted['reserved'] / GIB:.2f} GiB",
                flush=True,
            )
            args.prepared.write_text(json.dumps(content, indent=1) + "\n")

        if part == "random":
            prepare_random(args.seed, args.count, save)
        else:
            prepare_grid(part, save)


# --- what happens -------------------------------------------------------------------------------------------------


def shown(record: dict[str, Any], measured: dict[str, Any]) -> str:
    name = record.get("name", record.get("number"))
    predicted = record.get("predicted") or record["least"]["predicted"]
    ms, reserved = measured.get("median_ms", 0.0), measured["peak"].get("reserved", 0) / GIB
    return (
        f"{name}: {measured['ended']}, {ms:.1f} ms (predicted {predicted['ms']:.1f}), "
        f"{reserved:.2f} GiB (predicted {predicted['reserved'] / GIB:.2f}), took {measured['took_s']} s"
    )


class Report:
    """The results file, written after every trial."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.mesh = init_device_mesh(args.device, (RANKS,))
        self._out = args.out or MEASURED
        self._seconds = args.seconds
        self._end = 0.0
        self.content: dict[str, Any] = {}
        if args.part != "all" and self._out.exists():
            self.content = json.loads(self._out.read_text())
        self.content |= {
            "benchmark": "auto_plan",
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(args.device),
        }

    def begin(self, part: str) -> None:
        if part in PARTS:
            self.content.pop(part, None)
            for kind in ("turns", "final"):
                self.content.get(kind, {}).pop(part, None)
        self._end = time.monotonic() + self._seconds

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self._end

    def add(self, part: str, record: dict[str, Any], measured: dict[str, Any]) -> None:
        self.content.setdefault(part, []).append({**record, "measured": measured})
        print(f"{part} {shown(record, measured)}", flush=True)
        self.write()

    def note(self, kind: str, part: str, found: dict[str, Any]) -> None:
        self.content.setdefault(kind, {})[part] = found
        self.write()

    def write(self) -> None:
        self._out.write_text(json.dumps(self.content, indent=1) + "\n")


def measure_random(trials: list[dict[str, Any]], args: argparse.Namespace, report: Report) -> None:
    device = torch.device(args.device)
    warm_up(device)
    for record in trials:
        if report.is_late:
            break
        allow(device, record["budget_bytes"])
        if "refused" in record:
            least = {**record["least"], "model": record["model"]}
            report.add("random", record, tried(least, report.mesh, 2, 0))
        else:
            report.add("random", record, tried(record, report.mesh, 2, 1))
    allow(device, None)


def measure_grid(name: str, trials: list[dict[str, Any]], args: argparse.Namespace, report: Report) -> None:
    device = torch.device(args.device)
    warm_up(device)
    # What is predicted to be fast comes first: it is what the chosen one is compared with.
    order = sorted(trials, key=lambda record: (record["name"] != "chosen", record["predicted"]["ms"]))
    done = []
    for record in order:
        if report.is_late:
            break
        measured = tried(record, report.mesh, args.steps, 2)
        report.add(name, record, measured)
        if measured["ended"] == "ok":
            done.append((measured["median_ms"], record))
    final(name, done, args, report)


def final(
    name: str, done: list[tuple[float, dict[str, Any]]], args: argparse.Namespace, report: Report
) -> None:
    """Settings take turns, and so share whatever disturbs them: all if there is room, then the fastest of them."""
    device = torch.device(args.device)
    clear(device)
    fastest = [record for _, record in sorted(done, key=lambda item: item[0])]
    if sum(map(held_bytes, fastest)) > ROOM_BYTES:
        fastest = with_chosen(fastest, args.finalists)
    trials = [Trial(record, report.mesh) for record in fastest]
    report.begin("turns")
    if len(trials) > args.finalists + 1:
        times = take_turns(trials, args.rounds, 2, lambda: report.is_late)
        report.note("turns", name, times)
        order = {each: statistics.median(found) for each, found in times.items()}
        trials = with_chosen(sorted(trials, key=lambda trial: order[trial.name]), args.finalists)
    times = take_turns(trials, args.rounds, 3, lambda: False)
    medians = {each: statistics.median(found) for each, found in times.items()}
    if "chosen" in medians:
        best = min(medians, key=lambda each: medians[each])
        ratio = medians["chosen"] / medians[best]
        rounds = zip(in_rounds(times["chosen"], 3), in_rounds(times[best], 3), strict=True)
        by_round = sorted(one / other for one, other in rounds)
        found = {"chosen / fastest": ratio, "fastest": best, "by_round": by_round, "ms": times}
        report.note("final", name, found)
        print(
            f"{name}: chosen {medians['chosen']:.2f} ms, {ratio:.3f} of the fastest, {best}; "
            f"by round {by_round[0]:.3f} to {by_round[-1]:.3f}",
            flush=True,
        )


def held_bytes(record: dict[str, Any]) -> int:
    """What a model holds between steps."""
    kinds = record["predicted"]["by_kind"]
    return int(kinds.get("shards", 0) + kinds.get("optimizer", 0) + kinds.get("gathered parameters", 0))


def with_chosen(sorted_ones: list[Any], most: int) -> list[Any]:
    """The first ones, and the chosen one wherever it is."""

    def name_of(each: Any) -> str:
        return str(each["name"] if isinstance(each, dict) else each.name)

    return [each for at, each in enumerate(sorted_ones) if at < most or name_of(each) == "chosen"]


def summarize(report: Report) -> None:
    found = {
        part: summary_of(
            report.content[part], part != "random", report.content.get("turns", {}).get(part, {})
        )
        for part in PARTS
        if report.content.get(part)
    }
    report.content["summary"] = found
    report.write()
    print(json.dumps(found, indent=1), flush=True)


PARTS = ("random", "tiny", "1b")


def measure(args: argparse.Namespace) -> None:
    prepared = json.loads(args.prepared.read_text())
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(0)
    start_group("fake", RANKS, device)
    report = Report(args)
    for part in PARTS if args.part == "all" else (args.part,):
        report.begin(part)
        trials = prepared[part][: args.most] if args.most else prepared[part]
        expect(bool(trials), f"nothing is prepared for {part}")
        gc.disable()
        try:
            if part == "random":
                measure_random(trials, args, report)
            else:
                measure_grid(part, trials, args, report)
        except Exception:  # noqa: BLE001  the other parts go on
            report.content.setdefault("errors", {})[part] = traceback.format_exc()
            report.write()
            traceback.print_exc()
        clear(device)
    summarize(report)
    dist.destroy_process_group()


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    made.add_argument(
        "--prepare", action="store_true", help="predict and write the file of trials; needs no GPU"
    )
    made.add_argument("--prepared", type=Path, default=PREPARED, help="the file of trials")
    made.add_argument("--part", choices=["all", *PARTS], default="all")
    made.add_argument("--seed", type=int, default=22)
    made.add_argument(
        "--count", type=int, default=20, help="with --prepare: random models that are chosen for"
    )
    made.add_argument("--steps", type=int, default=4, help="timed steps of each setting of a grid")
    made.add_argument("--rounds", type=int, default=12, help="turns of each setting, and of each finalist")
    made.add_argument("--finalists", type=int, default=4)
    made.add_argument("--most", type=int, default=0, help="take only so many trials of a part")
    made.add_argument(
        "--seconds",
        type=float,
        default=55,
        help="begin no further trial of a part, and no further round of all, after so long",
    )
    made.add_argument("--out", type=Path)
    args = made.parse_args()
    warnings.simplefilter("ignore")
    (prepare if args.prepare else measure)(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
