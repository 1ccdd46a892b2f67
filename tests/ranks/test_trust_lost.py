"""A rank that is killed, stopped, late or slow: those who wait say who is missing and where it is, or just wait."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise import PeerFailure, set_trust, trace
from shardwise.cli import main
from shardwise.comm import collectives, watch
from shardwise.comm.agreement import check_same_model
from shardwise.comm.collectives import GroupCalls
from shardwise.comm.native import NativeWire
from shardwise.testing import exchange, run_ranks
from shardwise.testing.failures import RankFailure
from tests.ranks.parting import Run, Struck, in_a_debugger, timeouts_of
from tests.ranks.subject import beyond_torch

pytestmark = beyond_torch

TIMEOUT_SECONDS = 1.5
LONGEST_SECONDS = 40.0
"""What nobody waits for where all is well."""


def keep_the_store(who, file):
    """A group anew, whose store is kept by the rank that will be struck, as without torchrun."""
    watch._STORE_ANSWERS_SECONDS = 1.0
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == who else None
    if store is not None:
        file.with_suffix(".tmp").write_text(str(store.port))
        file.with_suffix(".tmp").rename(file)
    while not file.exists():
        time.sleep(0.02)
    store = store or dist.TCPStore("127.0.0.1", int(file.read_text()))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def lose_a_rank(who, signal_number, folder, keeps_store):
    """Trains; then rank `who` is struck in forward. The others hand on what they were told."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if keeps_store:
        keep_the_store(who, folder / "port")
    run = Run()
    run.good_step()
    set_trust(timeout_seconds=TIMEOUT_SECONDS)
    if dist.get_rank() == who:
        run.model.blocks[2].register_forward_pre_hook(Struck(signal_number, 60.0))
    begun = time.monotonic()
    try:
        run.loss().backward()
    except PeerFailure as error:
        # The pool keeps the story of a rank that raised, not of one that returned; and the first to raise ends all.
        (folder / str(dist.get_rank())).touch()
        num_others, until = dist.get_world_size() - 1, begun + LONGEST_SECONDS
        while len(list(folder.glob("[0-9]"))) < num_others and time.monotonic() < until:
            time.sleep(0.02)
        raise AssertionError(f"TOLD in {time.monotonic() - begun:.1f} s: {error}") from None


def stories(world_size, who, signal_number, folder, keeps_store=False):
    arguments = (who, signal_number, folder, keeps_store)
    with pytest.MonkeyPatch.context() as patch:
        if signal_number != signal.SIGSTOP:
            # The others are left to tell theirs, however long it takes them; one that is stopped never would.
            patch.setattr(exchange, "_GRACE_SECONDS", LONGEST_SECONDS)
        with pytest.raises(RankFailure) as failure:
            run_ranks(lose_a_rank, world_size, *arguments, kind="gloo", timeout_seconds=60)
    return {report.rank: report.details for report in failure.value.reports if report.rank != who}


@pytest.mark.parametrize(
    ("world_size", "who", "signal_number", "state"),
    [
        (2, 0, signal.SIGKILL, "dead"),
        (4, 3, signal.SIGTERM, "dead"),
        (4, 0, signal.SIGSTOP, "stopped"),
    ],
    ids=lambda value: str(value),
)
def test_those_who_wait_for_a_rank_that_is_gone_say_so(world_size, who, signal_number, state, tmp_path):
    told = stories(world_size, who, signal_number, tmp_path)
    assert len(told) == world_size - 1
    for rank, text in told.items():
        assert "TOLD in" in text, f"rank {rank}: {text}"
        assert f"rank {who} is {state}" in text
        assert "gather 'blocks.3' in forward" in text


def test_a_stopped_rank_that_keeps_the_store_holds_nobody_up(tmp_path):
    (told,) = stories(2, 0, signal.SIGSTOP, tmp_path, keeps_store=True).values()
    assert "did not come to gather 'blocks.3' in forward" in told
    assert "the store cannot be asked" in told


class Told(logging.Handler):
    """Keeps what is logged, and lets other processes know."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def emit(self, record):
        self.file.with_suffix(".tmp").write_text(record.getMessage())
        self.file.with_suffix(".tmp").rename(self.file)


def dawdle(seconds):
    time.sleep(seconds)


def dawdle_until_all_are_told(folder):
    while len(list(folder.glob("told-*"))) < dist.get_world_size() - 1:
        dawdle(0.02)


def slow_ranks(folder):
    """The last rank sits in a debugger, is late until it is missed, and is given up; all other steps must be right."""
    is_slow = dist.get_rank() == dist.get_world_size() - 1
    told = {}
    said = Told(Path(folder, "said"))
    logging.getLogger("shardwise").addHandler(said)
    with timeouts_of(
        timeout_seconds=LONGEST_SECONDS, debugger_grace_seconds=LONGEST_SECONDS, trace_dir=folder
    ):
        if is_slow:
            dawdle(0.3)
        run = Run()
        run.good_step()
        set_trust(timeout_seconds=1.0, late_seconds=1.5)
        if is_slow:
            in_a_debugger(2.1)
        run.good_step()
        set_trust(late_seconds=None)
        dist.barrier()
        said.file.unlink(missing_ok=True)
        dist.barrier()
        # Long after the others have said that it is late: they wait for as long as the group does.
        while is_slow and not (said.file.exists() and "in dawdle" in said.file.read_text()):
            dawdle(0.02)
        run.good_step()
        logging.getLogger("shardwise").removeHandler(said)
        set_trust(late_seconds=2.5)
        try:
            if is_slow:
                dawdle_until_all_are_told(Path(folder))
            run.loss().backward()
        except PeerFailure as error:
            Path(folder, f"told-{dist.get_rank()}").touch()
            told = {"error": str(error), "file": re.search(r"events are in (\S+)", str(error)).group(1)}
            told["events"] = [event for event, _ in trace.read_failure(told["file"]).events]
            told["text"] = trace.read_failure(told["file"]).text()
        run.good_step()
    return told


@pytest.mark.parametrize(("world_size", "kind"), [(2, "gloo"), (3, "threads")])
def test_a_slow_rank_is_missed_aloud_and_waited_for_until_its_time_is_up(world_size, kind, tmp_path, capsys):
    slow = world_size - 1
    of_ranks = run_ranks(slow_ranks, world_size, str(tmp_path), kind=kind, timeout_seconds=60)
    said = (tmp_path / "said").read_text()
    # On a busy machine others may be late, too.
    assert re.search(
        rf"goes on waiting: ranks? [\d, ]*{slow} did not come to gather the root in forward within", said
    )
    assert f"rank {slow} is alive, the last it did was to let an optimizer use the step" in said
    for told in of_ranks:
        assert f"rank {slow} did not come to gather the root in forward within" in told["error"]
        assert f"rank {slow} is alive, the last it did was to let an optimizer use the step" in told["error"]
        assert "in dawdle" in told["error"]
        assert "PeerFailure" in told["text"]
    # One that comes late may find what the others have left for it there, and be told in its next wait.
    told = of_ranks[0]
    assert told["events"][-1] == "gather the root in forward"
    assert main(["trace", told["file"]]) == 0
    assert told["text"] in capsys.readouterr().out
    assert main(["trace", str(tmp_path / "nothing.json")]) == 1


def out_of_descriptors(folder):
    """Rank 0 has none left while it waits for rank 1, which is late but well."""
    calls, rank = GroupCalls(dist.group.WORLD, torch.device("cpu")), dist.get_rank()
    own, gathered = torch.full((1,), float(rank)), torch.empty(2)
    calls.issue_all_gather(gathered, own).wait()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with timeouts_of(timeout_seconds=0.5, trace_dir=str(folder)):
        if rank == 1:
            while not (folder / "tried").exists():
                dawdle(0.02)
            dawdle(2.0)
        else:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            threading.Timer(1.5, resource.setrlimit, (resource.RLIMIT_NOFILE, limits)).start()
            os.mkdir(folder / "tried")
        try:
            calls.issue_all_gather(gathered, own).wait()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return gathered.tolist()


def test_who_is_out_of_descriptors_takes_nobody_for_dead(tmp_path):
    assert run_ranks(out_of_descriptors, 2, tmp_path, kind="gloo", timeout_seconds=60) == [[0.0, 1.0]] * 2


def one_ends_early(folder):
    calls, rank = GroupCalls(dist.group.WORLD, torch.device("cpu")), dist.get_rank()
    own, gathered = torch.full((1,), float(rank)), torch.empty(2)
    calls.issue_all_gather(gathered, own).wait()
    if rank == 1:
        return ""
    with timeouts_of(trace_dir=str(folder)), pytest.raises(PeerFailure) as told:
        calls.issue_all_gather(gathered, own).wait()
    return str(told.value)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_rank_that_has_ended_is_not_waited_for(kind, tmp_path):
    told, _ = run_ranks(one_ends_early, 2, tmp_path, kind=kind, timeout_seconds=60)
    assert "rank 1" in told


def new_calls(native):
    group = dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        if native:
            # As with NCCL, here without it.
            patch.setattr(collectives, "_make_wire", NativeWire)
        return GroupCalls(group, torch.device("cpu"))


_FIRST = {False: "compare the models of all ranks", True: "begin with the model"}


def late_beginners(native, folder):
    """The last rank comes to its first model when others have said that it is late, to the second one never."""
    is_late = dist.get_rank() == dist.get_world_size() - 1
    said = Told(folder / "said")
    logging.getLogger("shardwise").addHandler(said)
    try:
        with timeouts_of(timeout_seconds=0.5, start_seconds=LONGEST_SECONDS, trace_dir=str(folder)):
            calls = new_calls(native)
            while is_late and not said.file.exists():
                dawdle(0.02)
            check_same_model(["a parameter"], calls, calls.device)
            set_trust(start_seconds=1.5, late_seconds=1.0)
            calls = new_calls(native)
            if is_late:
                dawdle_until_all_are_told(folder)
                return ""
            try:
                check_same_model(["a parameter"], calls, calls.device)
            except PeerFailure as error:
                (folder / f"told-{dist.get_rank()}").touch()
                return str(error)
    finally:
        logging.getLogger("shardwise").removeHandler(said)


@pytest.mark.parametrize(
    ("world_size", "kind", "native"), [(2, "gloo", False), (3, "threads", False), (3, "gloo", True)]
)
def test_a_rank_that_has_not_begun_is_waited_for_longer_and_missed_aloud(world_size, kind, native, tmp_path):
    late = world_size - 1
    *told, nothing = run_ranks(late_beginners, world_size, native, tmp_path, kind=kind, timeout_seconds=60)
    said = (tmp_path / "said").read_text()
    # On a busy machine others may be late, too.
    assert re.match(rf"rank \d goes on waiting: ranks? [\d, ]*{late} did not come to ", said), said
    assert f"rank {late} is alive, it has not begun" in said
    assert nothing == ""
    for text in told:
        assert re.match(rf"ranks? [\d, ]*{late} did not come to .*{_FIRST[native]} within ", text), text
