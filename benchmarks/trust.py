"""Shows how jobs end whose ranks diverge, fail or stall: torch FSDP2 and shardwise's three APIs, case by case.

    PYTHONPATH=. python benchmarks/trust.py                         # 2 ranks, the first one errs
    PYTHONPATH=. python benchmarks/trust.py --ranks 4 --errs last --only killed --only slow

Every case runs in new gloo processes with a time limit. The result says how the surviving ranks ended:

    named       all of them raised an error that names the rank, unit or cause, or their own error
    right       no error, and the numbers are right
    an error    some raised, but not all of them an error that names anything
    died        a rank that did nothing wrong crashed (C++ abort)
    hung        a rank was still waiting at the limit
    SILENT      all went on without an error, with different parameters or gradients
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import RESULTS, machine

# The value of the tests' switch between libraries, and the API with which the catalogue of cases runs.
PEERS = {
    "FSDP2": ("torch", "fully_shard"),
    "shardwise": ("shardwise", "fully_shard"),
    "wrapper": ("shardwise", "wrapper"),
    "ZeRO": ("shardwise", "zero"),
}
ENDS_ITSELF = (
    "a_rank_that_is_killed",
    "a_rank_that_is_stopped",
    "a_rank_that_is_terminated",
    "a_rank_that_exits",
    "a_closed_port",
)


def catalogue(api: str) -> dict[str, Any]:
    """Returns the cases of an API, by name; None for those defined in this file."""
    from tests.ranks import divergence, divergence_zero

    cases_module: Any = divergence_zero if api == "zero" else divergence
    groups = [
        cases_module.DIVERGING,
        cases_module.DIFFERING,
        cases_module.BREAKING_OFF,
        divergence.STRIKING,
        divergence.HARMLESS,
    ]
    found = {case.__name__: case for group in groups for case in group}
    if api == "zero":
        # An optimizer does not see data.
        del found["an_empty_batch"]
        found["a_state_dict_on_one"] = divergence_zero.a_state_dict_on_one
    return {**found, "a_late_rank": None, "a_closed_port": None}


def make_run(api: str) -> Any:
    from tests.ranks import divergence, divergence_zero

    return divergence_zero.ZeroRun() if api == "zero" else divergence.Run(api)


def be_rank(rank: int, world: int, who: int, port: int, api: str, name: str, report: Any) -> None:
    """Runs one rank of one case and sends the caller how it ended."""
    torch.set_num_threads(1)
    from tests.ranks import divergence

    errs = rank == who
    if name == "a_late_rank" and errs:
        time.sleep(5)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    begun = time.monotonic()
    try:
        run = make_run(api)
        if name in ("a_late_rank", "a_closed_port"):
            run.good_step()
            if name == "a_closed_port":
                report.send(("ready", "", 0.0))
                time.sleep(2)
                if errs:
                    os.kill(os.getpid(), signal.SIGKILL)
            run.good_step()
        else:
            run.optim.zero_grad()
            catalogue(api)[name](run, errs)
        ended, text = "finished", ""
    except BaseException as error:  # noqa: BLE001  any exception is a result: how this rank ended
        kind = type(error)
        is_own = isinstance(error, (divergence.Boom, SystemExit, KeyboardInterrupt)) and errs
        is_named = kind.__module__.startswith("shardwise")
        ended = "own" if is_own else "named" if is_named else "error"
        if isinstance(error, AssertionError):
            ended = "different"
        text = (
            f"{kind.__name__}: {error}" if not isinstance(error, AssertionError) else traceback.format_exc()
        )
    report.send((ended, text[:2000], time.monotonic() - begun))
    if ended == "finished":
        # As in a job that goes on, this rank's connections stay open.
        time.sleep(600)
    os._exit(1)


def run_case(api: str, name: str, world: int, who: int, limit_seconds: float) -> dict[str, Any]:
    """Starts the ranks of one case, waits until they end or the limit has passed, and kills the rest."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "shardwise", "tests.ranks.divergence_zero"])
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, ranks = [], []
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=be_rank, args=(rank, world, who, server.port, api, name, there))
        process.start()
        there.close()
        pipes.append(here)
        ranks.append(process)
    deadline = time.monotonic() + limit_seconds
    ended: dict[int, tuple[str, str, float]] = {}
    innocent = [rank for rank in range(world) if rank != who or name not in ENDS_ITSELF]
    while not all(rank in ended for rank in innocent) and time.monotonic() < deadline:
        for rank, pipe in enumerate(pipes):
            if rank in ended or not pipe.poll(0.05):
                continue
            try:
                told = pipe.recv()
            except EOFError:
                ranks[rank].join(2)
                ended[rank] = ("died", f"exit code {ranks[rank].exitcode}", 0.0)
                continue
            if told[0] == "ready":
                # Drops the last reference: the store's server ends, and its port is closed.
                server = None
            else:
                ended[rank] = told
    for process in ranks:
        process.kill()
        process.join()
    for rank in range(world):
        ended.setdefault(rank, ("hung", f"still waiting after {limit_seconds:g} s", limit_seconds))
    return {
        "case": name,
        "outcome": _outcome(name, [ended[rank][0] for rank in innocent]),
        "seconds": round(max(ended[rank][2] for rank in innocent), 1),
        "ranks": [
            (how, text.partition("\n")[0][:200], round(seconds, 1)) for how, text, seconds in _in_order(ended)
        ],
    }


def _in_order(ended: dict[int, tuple[str, str, float]]) -> list[tuple[str, str, float]]:
    return [ended[rank] for rank in sorted(ended)]


def _outcome(name: str, ends: list[str]) -> str:
    from tests.ranks import divergence

    if "hung" in ends:
        return "hung"
    if "died" in ends:
        return "died"
    if all(end in ("named", "own") for end in ends):
        return "named"
    harmless = {case.__name__ for case in divergence.HARMLESS} | {"a_late_rank"}
    if all(end == "finished" for end in ends):
        return "right" if name in harmless else "SILENT"
    return "SILENT" if all(end in ("finished", "different") for end in ends) else "an error"


def contend(peer: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs all cases with one implementation. The tests' switch makes the catalogue use torch's `fully_shard`."""
    who = 0 if given.errs == "first" else given.ranks - 1
    rows = []
    for name in chosen(given, PEERS[peer][1]):
        row = run_case(PEERS[peer][1], name, given.ranks, who, given.limit)
        rows.append(row)
        print(f"{peer:<10} {name:<36} {row['outcome']} ({row['seconds']:.1f} s)", flush=True)
    return rows


def chosen(given: argparse.Namespace, api: str) -> list[str]:
    return [name for name in catalogue(api) if not given.only or any(part in name for part in given.only)]


def options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--errs", choices=("first", "last"), default="first")
    made.add_argument("--limit", type=float, default=40.0, help="seconds after which a case counts as hung")
    made.add_argument("--only", action="append", default=[], help="cases whose name has this in it")
    made.add_argument("--peer", action="append", default=[], choices=list(PEERS), help="default: all")
    made.add_argument("--out", type=Path, help="default: a file in results/ beside this one")
    made.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    return made.parse_args()


def print_table(results: dict[str, list[dict[str, Any]]]) -> None:
    names = list(dict.fromkeys(row["case"] for rows in results.values() for row in rows))
    width = max(map(len, names))
    print(f"\n{'':<{width}}  " + "  ".join(f"{peer:<18}" for peer in results))
    for name in names:
        cells = [
            next((f"{row['outcome']} ({row['seconds']:.1f} s)" for row in rows if row["case"] == name), "")
            for rows in results.values()
        ]
        print(f"{name.replace('_', ' '):<{width}}  " + "  ".join(f"{cell:<18}" for cell in cells))


def main() -> None:
    given = options()
    if given.alone:
        given.out.write_text(json.dumps(contend(given.peer[-1], given)))
        return
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for peer in given.peer or PEERS:
            # In its own process, whose environment selects the library that the catalogue uses.
            file = Path(folder) / peer
            subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--peer", peer, "--out", str(file), "--alone"],
                env={**os.environ, "SHARDWISE_TEST_PEER": PEERS[peer][0]},
                check=True,
            )
            results[peer] = json.loads(file.read_text())
    print_table(results)
    record = {
        "ranks": given.ranks,
        "errs": given.errs,
        "limit_seconds": given.limit,
        "machine": machine("cpu"),
    }
    out = given.out or RESULTS / f"trust_{given.ranks}_{given.errs}.json"
    out.write_text(json.dumps({**record, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
