"""Kill ranks of a run with SIGKILL, at random moments, and see that nothing is ever lost.

    python -m tests.soak.kill_ranks --kills 30 --result benchmarks/results/kill_soak.json

A small run on CPU ranks saves after every second step. Again and again one rank is killed, at a random moment after its
process started or a little after a random step; then the run is resumed. After each kill every checkpoint that has its
name must be readable to the last byte, and the weights and optimizer state at the end must be, to the last bit, those
of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from shardwise.checkpoint.manifest import first_damage, read_manifest
from shardwise.checkpoint.store import Store
from shardwise.train.command import Request, train
from shardwise.train.records import METRICS

SETTINGS = (
    "model.layers=2",
    "model.width=32",
    "model.hidden=48",
    "model.context=16",
    "train.batch_size=4",
    "evaluate.batches=1",
    "checkpoint.every=2",
    "checkpoint.keep=2",
)


def run(folder, steps, ranks, *, resume, moment=None, victim=0):
    """One attempt at the run; its exit status, how long it took, and what it said."""
    request = Request(
        "tiny",
        () if resume else (*SETTINGS, f"train.steps={steps}", f"output.folder={folder}"),
        ranks=ranks,
        device="cpu",
        resume=str(folder) if resume else None,
        show="quiet",
    )
    killed, over = threading.Event(), threading.Event()

    def kill():
        step, seconds = moment
        while step and steps_done(folder) < step and not over.is_set():
            time.sleep(0.002)
        over.wait(seconds)
        processes = [child for child in multiprocessing.active_children() if child.name == f"rank {victim}"]
        if processes and processes[0].is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[0].pid, signal.SIGKILL)
                killed.set()

    said = io.StringIO()
    thread = threading.Thread(target=kill)
    begun = time.monotonic()
    if moment is not None:
        thread.start()
    with contextlib.redirect_stderr(said):
        status = train(request)
    seconds = time.monotonic() - begun
    over.set()
    if moment is not None:
        thread.join()
    return status, seconds, killed.is_set(), said.getvalue()


def steps_done(folder):
    path = Path(folder) / METRICS
    return len(path.read_text().splitlines()) if path.exists() else 0


def check_readable(store):
    for path in store.checkpoints():
        damage = first_damage(path, read_manifest(path))
        assert damage is None, f"{path} is damaged: {damage}"
    # It may lag behind a folder that has just got its name.
    assert store.latest() in (None, *store.checkpoints())


def files_of(folder):
    last = Store(folder / "checkpoints").checkpoints()[0]
    return {path.name: path.read_bytes() for path in sorted(last.glob("rank-*.bin"))}, last.name


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--kills", type=int, default=30)
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--result", type=Path)
    options = options.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        status, seconds, _, said = run(
            Path(temporary) / "undisturbed", options.steps, options.ranks, resume=False
        )
        assert status == 0, said
        expected = files_of(Path(temporary) / "undisturbed")

        kills = runs = resumes = number = 0
        saved_steps = []
        while kills < options.kills:
            number += 1
            folder = Path(temporary) / f"disturbed-{number}"
            store = Store(folder / "checkpoints")
            finished, kills_here = False, 0
            while not finished:
                resume = bool(store.checkpoints())
                resumes += resume
                # A run that is near its end would only ever be killed there.
                wanted = kills < options.kills and kills_here < 4
                latest = store.latest()
                saved = 0 if latest is None else store.step_of(latest)
                moment = (0, chance.uniform(0.0, seconds))
                if chance.random() < 0.75:
                    moment = (
                        chance.randint(saved + 1, max(saved + 1, options.steps)),
                        chance.uniform(0.0, 0.1),
                    )
                moment = moment if wanted else None
                victim = chance.randrange(options.ranks)
                status, _, killed, said = run(
                    folder, options.steps, options.ranks, resume=resume, moment=moment, victim=victim
                )
                kills += killed
                kills_here += killed
                finished = status == 0
                if not finished:
                    assert killed, f"failed without a kill: {said}"
                    assert f"rank {victim} was ended by SIGKILL" in said, said
                    latest = store.latest()
                    saved_steps.append(0 if latest is None else store.step_of(latest))
                check_readable(store)
            runs += 1
            assert files_of(folder) == expected, "the run ended with other weights than the undisturbed one"
    result = {
        "kills": kills,
        "runs_finished": runs,
        "resumes": resumes,
        "ranks": options.ranks,
        "last_saved_step_at_each_kill": saved_steps,
        "unreadable_checkpoints": 0,
        "runs_that_differ_by_a_bit": 0,
    }
    print(json.dumps(result))
    if options.result:
        options.result.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
