"""Injects random faults into runs of ``shardwise train``: nothing may be lost, and the first error must be shown.

    python -m tests.fuzz.faults --runs 100 --seed 0 --result benchmarks/results/fuzz_faults.json
    python -m tests.fuzz.faults --only kill,raise --runs 10

Each run is small, on CPU ranks, and saves every second step. A fault is drawn from the seed:

    kill, crash, exit      a rank gets SIGKILL, a segmentation fault, or exits (possibly with status 0), in a step
    kill at any time       the same SIGKILL from outside, also while ranks start and end
    launcher               the process that started the ranks gets SIGKILL
    raise, data, thread    the model, the data, or a thread of a rank raises
    late, stop             a rank sleeps; a rank gets SIGSTOP and, later, SIGCONT: the run goes on
    files, disk            a rank cannot open files, or cannot write them, for a while or to the end
    interrupt, terminate   Ctrl-C, SIGTERM
    folder                 the run's folder is moved away, and the run makes another
    same folder            a second run in the folder of a run that is still active
    two at once            two new runs, started at the same time, without a folder

After each fault, every checkpoint must be readable to the last byte, no steps may be lost but those since the save
before the last, standard error must begin with the fault and not with its consequences, and the resumed run must end
with weights and optimizer state that are bitwise equal to those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from shardwise.checkpoint.manifest import first_damage, read_manifest
from shardwise.checkpoint.store import Store
from shardwise.policies import set_trust
from shardwise.train.command import Request, train
from shardwise.train.records import METRICS
from tests.fuzz import faulty
from tests.fuzz.faulty import EVERY, STEPS, WORDS, Fault

INSIDE = ("kill", "crash", "exit", "raise", "data", "thread", "late", "files", "disk")
OUTSIDE = (
    *("kill at any time", "launcher", "stop", "interrupt", "terminate"),
    *("folder", "same folder", "two at once"),
)
RECIPE = "tests.fuzz.faulty:recipe"

FIRST_WORDS = {
    "kill": "error: rank {rank} was killed by SIGKILL",
    "kill at any time": "error: rank {rank} was killed by SIGKILL",
    "crash": "error: rank {rank} was killed by SIGSEGV\nFatal Python error: Segmentation fault\n",
    "exit": "error: rank {rank} exited with status [07] before it was done",
    "raise": "error: rank {rank} failed\nTraceback",
    "data": "error: rank {rank} failed\nTraceback",
    "thread": "error: thread 'loader' of rank {rank} failed\nTraceback",
    "disk": r"error: (the last checkpoint could not be written|the run finished .* some files could not be)",
    "files": r"error: (the last checkpoint could not be written|the run finished .* some files could not be)",
    "folder": r"error: (the run finished .* some files could not be|.*config.json cannot be written)",
}


# --- one run --------------------------------------------------------------------------------------------------------


def attempt(folder, ranks, *, fault=None, outside=None):
    """Starts or resumes a run; returns its exit status and its output on standard error."""
    resume = bool(Store(folder / "checkpoints").checkpoints())
    request = Request(
        RECIPE,
        () if resume else (f"output.folder={folder}",),
        ranks=ranks,
        device="cpu",
        resume=str(folder) if resume else None,
        show="quiet",
    )
    faulty.fault = fault
    over = threading.Event()
    thread = None
    if outside is not None:
        thread = threading.Thread(target=outside, args=(over,))
        thread.start()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            status = train(request)
    finally:
        over.set()
        if thread is not None:
            thread.join()
        faulty.fault = None
    return status, said.getvalue()


def in_a_process(folder, ranks, results):
    """Calls `attempt` in a separate process, which can be killed, and puts its result into the queue."""
    results.put(attempt(folder, ranks))


def steps_done(folder):
    path = folder / METRICS
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for_step(folder, step, over, *, has_ranks=True):
    """Waits until a step is done and the ranks of this process have started, or until the run is over."""
    while not over.is_set() and (steps_done(folder) < step or (has_ranks and process_of(0) is None)):
        time.sleep(0.002)


def process_of(rank):
    return next((child for child in multiprocessing.active_children() if child.name == f"rank {rank}"), None)


def send(process, number):
    if process is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
            return True
    return False


# --- what must hold -------------------------------------------------------------------------------------------------


def check_readable(folder):
    store = Store(folder / "checkpoints")
    for path in store.checkpoints():
        damage = first_damage(path, read_manifest(path))
        assert damage is None, f"{path} is damaged: {damage}"
    # It may lag behind a folder that has just been renamed to its final name.
    assert store.latest() in (None, *store.checkpoints())
    for name in ("config.json", "summary.json"):
        if (folder / name).exists():
            json.loads((folder / name).read_text())


def check_little_is_lost(folder):
    """Checks that all saves but the last are complete: a save begins only when the previous one has ended."""
    saved = max((Store.step_of(path) for path in Store(folder / "checkpoints").checkpoints()), default=0)
    done = steps_done(folder)
    assert saved >= ((done - 1) // EVERY - 1) * EVERY, f"{done} steps were done, and {saved} are saved"


def check_first_words(kind, rank, status, said):
    shown = "\n".join(line for line in said.splitlines() if not line.startswith("warning: "))
    expected = FIRST_WORDS.get(kind)
    if status == 0 or expected is None:
        return
    # Python itself prints a thread's exception, as soon as it is raised.
    shown = shown[shown.index("error: ") :] if "error: " in shown else shown
    assert re.match(expected.format(rank=rank), shown, re.DOTALL), (
        f"{kind} on rank {rank} was told as\n{said}"
    )
    if kind in ("raise", "data", "thread"):
        before = shown.partition(WORDS)[0]
        assert before != shown, f"not told: {said}"
        assert "  then:" not in before, f"something else was told first: {said}"


def files_of(folder):
    last = Store(folder / "checkpoints").checkpoints()[0]
    return {path.name: path.read_bytes() for path in sorted(last.glob("rank-*.bin"))}, last.name


def steps_written(folder):
    return [json.loads(line)["step"] for line in (folder / METRICS).read_text().splitlines()]


def finish(folder, ranks, expected, tolerated=()):
    """Resumes the run without a fault until its end, and compares the result."""
    status, said = attempt(folder, ranks)
    assert status == 0, f"could not be resumed: {said}"
    check_readable(folder)
    assert files_of(folder) == expected, "the run ended with other weights than the undisturbed one"


# --- faults ---------------------------------------------------------------------------------------------------------


def disturb(kind, chance, folder, ranks, seconds):
    """Starts a run, injects one fault, and returns in one or two words how the run ended."""
    rank = chance.randrange(ranks)
    step = chance.randint(1, STEPS)
    if kind in INSIDE:
        return disturb_inside(kind, chance, folder, ranks, rank, step)
    if kind == "two at once":
        return start_two(folder, ranks)
    if kind == "same folder":
        return join_in(folder, ranks, step)
    if kind == "launcher":
        return end_launcher(folder, ranks, step)
    moment = chance.uniform(0.0, seconds)
    stopped_seconds = chance.uniform(0.1, 1.5)
    sent = threading.Event()

    def outside(over):
        if kind == "kill at any time":
            over.wait(moment)
            if send(process_of(rank), signal.SIGKILL):
                sent.set()
            return
        wait_for_step(folder, step - 1, over)
        if over.is_set():
            return
        if kind == "stop":
            process = process_of(rank)
            if send(process, signal.SIGSTOP):
                sent.set()
                time.sleep(stopped_seconds)
                send(process, signal.SIGCONT)
        elif kind == "folder":
            os.rename(folder, folder.with_name(f"{folder.name}-moved"))
            sent.set()
        else:
            sent.set()
            os.kill(os.getpid(), signal.SIGINT if kind == "interrupt" else signal.SIGTERM)

    status, said = attempt(folder, ranks, outside=outside)
    check_first_words(kind, rank, status, said)
    if kind == "kill at any time":
        assert status == 0 or sent.is_set(), f"failed without a fault: {said}"
    elif kind == "stop":
        assert (status, said) == (0, ""), f"a rank that was stopped for a while ended the run: {said}"
    elif kind == "folder":
        check_went_on_elsewhere(folder, status, said, sent.is_set())
    else:
        check_stopped(kind, status, said, sent.is_set())
    return "ended" if status else "went on"


def check_went_on_elsewhere(folder, status, said, was_moved):
    """Checks that a run whose folder was moved away went on: it makes another folder for its later saves."""
    if not was_moved:
        assert (status, said) == (0, ""), said
        return
    moved = folder.with_name(f"{folder.name}-moved")
    check_readable(moved)
    saved = [
        Store.step_of(path) for each in (folder, moved) for path in Store(each / "checkpoints").checkpoints()
    ]
    # The folder may also have been moved before the first save or after the last.
    has_begun, is_over = (moved / "config.json").exists(), (status, said) == (0, "")
    assert not has_begun or max(saved, default=0) == STEPS, said
    assert is_over or status == 1, said


def check_stopped(kind, status, said, was_sent):
    """Checks that Ctrl-C and SIGTERM made the run save and end normally, or just end outside of training."""
    early, late = (130, 130) if kind == "interrupt" else (143, 0)
    if not was_sent:
        assert status == 0, said
    elif "no step was running" in said:
        assert status == early, said
    else:
        assert (status, said) == (late, ""), (status, said)


def disturb_inside(kind, chance, folder, ranks, rank, step):
    lasts = chance.choice((0, 1, 3)) if kind in ("files", "disk") else 0
    fault = Fault(
        kind, rank, step, seconds=chance.uniform(0.1, 2.0), steps=lasts, status=chance.choice((0, 7))
    )
    status, said = attempt(folder, ranks, fault=fault)
    check_first_words(kind, rank, status, said)
    if kind == "late":
        assert (status, said) == (0, ""), f"a rank that came late ended the run: {said}"
    elif kind in ("files", "disk"):
        # Some ranks write nothing while the fault lasts. Failed writes never end training before its last step.
        assert steps_done(folder) == STEPS or rank == 0, said
        assert status == 0 or "warning: " in said or "checkpoint" in said, said
    else:
        assert status == 1, f"{fault} went unnoticed: {said}"
    return "ended" if status else "went on"


def end_launcher(folder, ranks, step):
    context = multiprocessing.get_context("fork")
    launcher = context.Process(target=in_a_process, args=(folder, ranks, context.SimpleQueue()))
    launcher.start()
    over = threading.Event()
    threading.Thread(target=lambda: (launcher.join(), over.set()), daemon=True).start()
    wait_for_step(folder, step, over, has_ranks=False)
    launcher.kill()
    launcher.join()
    return "ended"


def join_in(folder, ranks, step):
    """Starts a second run in the folder: it must be refused, new or resumed, without an effect on the first."""
    context = multiprocessing.get_context("fork")
    reported = context.SimpleQueue()
    is_busy, was_refused = threading.Event(), []

    def outside(over):
        wait_for_step(folder, step - 1, over)
        process = process_of(0)
        if not over.is_set() and send(process, signal.SIGSTOP):
            # Keeps the first run active while the second one tries.
            is_busy.set()
            second = context.Process(target=in_a_process, args=(folder, ranks, reported))
            second.start()
            was_refused.append(reported.get())
            second.join()
            send(process, signal.SIGCONT)

    status, said = attempt(folder, ranks, outside=outside)
    assert (status, said) == (0, ""), said
    assert steps_written(folder) == list(range(1, STEPS + 1)), "two runs wrote to one file"
    if is_busy.is_set():
        ((second_status, second_said),) = was_refused
        assert second_status == 1, second_said
        assert second_said.startswith("error: another run is active in"), second_said
    return "went on"


def start_two(folder, ranks):
    """Starts two runs without a folder at the same time: each must get its own folder, and finish."""
    place = folder.parent / f"{folder.name}-two"
    place.mkdir()
    context = multiprocessing.get_context("fork")
    reported, gate = context.SimpleQueue(), context.Barrier(2)
    both = [context.Process(target=begin_unnamed, args=(place, ranks, gate, reported)) for _ in range(2)]
    for process in both:
        process.start()
    ended = [reported.get() for _ in both]
    for process in both:
        process.join()
    assert ended == [(0, ""), (0, "")], ended
    found = sorted(path.name for path in (place / "runs").iterdir())
    assert found == ["faulty", "faulty-2"], found
    for name in found:
        assert steps_written(place / "runs" / name) == list(range(1, STEPS + 1))
    os.rename(place / "runs" / "faulty-2", folder)
    return "went on"


def begin_unnamed(place, ranks, gate, reported):
    os.chdir(place)
    said = io.StringIO()
    request = Request(RECIPE, ranks=ranks, device="cpu", show="quiet")
    gate.wait()
    with contextlib.redirect_stderr(said):
        status = train(request)
    reported.put((status, said.getvalue()))


# --- all of them ----------------------------------------------------------------------------------------------------


def run_all(kinds, runs, seed, ranks, temporary, verbose=False):
    chance = random.Random(seed)
    faulty.folder = temporary
    (temporary / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    begun = time.monotonic()
    status, said = attempt(temporary / "undisturbed", ranks)
    seconds = time.monotonic() - begun
    assert status == 0, said
    expected = files_of(temporary / "undisturbed")
    counts = collections.Counter()
    for number in range(runs):
        # Every kind once before any is repeated.
        kind = kinds[number % len(kinds)] if number < len(kinds) else chance.choice(kinds)
        folder = temporary / f"run-{number}"
        own = random.Random(f"{seed} {number} {kind}")
        begun = time.monotonic()
        try:
            outcome = disturb(kind, own, folder, ranks, seconds)
            check_readable(folder)
            if kind not in ("files", "disk", "folder"):
                check_little_is_lost(folder)
            finish(folder, ranks, expected)
        except BaseException:
            print(
                f"run {number} of seed {seed}, '{kind}', left in {folder} for as long as this lasts",
                file=sys.stderr,
            )
            raise
        counts[f"{kind}: {outcome}"] += 1
        if verbose:
            print(f"{number:>4} {kind:<18} {outcome:<8} {time.monotonic() - begun:.1f} s", flush=True)
    return {"runs": runs, "seed": seed, "ranks": ranks, "outcomes": dict(sorted(counts.items()))}


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--runs", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--only", help="kinds of faults, separated by commas")
    options.add_argument("--timeout-seconds", type=float, default=20.0, help="TrustPolicy's, for all ranks")
    options.add_argument("--quiet", action="store_true")
    options.add_argument("--result", type=Path)
    options = options.parse_args()
    kinds = tuple(options.only.split(",")) if options.only else INSIDE + OUTSIDE
    assert set(kinds) <= {*INSIDE, *OUTSIDE}, kinds
    set_trust(timeout_seconds=options.timeout_seconds)
    with tempfile.TemporaryDirectory() as temporary:
        result = run_all(
            kinds, options.runs, options.seed, options.ranks, Path(temporary), verbose=not options.quiet
        )
    # Failed checks have raised.
    result |= {
        "unreadable_checkpoints": 0,
        "runs_that_lost_more_than_the_last_save": 0,
        "runs_whose_first_error_was_not_first": 0,
        "runs_that_differ_by_a_bit": 0,
    }
    print(json.dumps(result))
    if options.result:
        options.result.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
