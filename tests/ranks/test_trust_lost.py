"""A rank that is killed, stopped, late or slow: those who wait say who is missing and where it is, or just wait."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise import PeerFailure, set_trust, trace
from shardwise.cli import main
from shardwise.comm.channels import registry
from shardwise.comm.channels import watched as channels
from shardwise.comm.channels.backend import BackendChannel
from shardwise.comm.channels.registry import channel_of
from shardwise.comm.collectives.agreement import check_same_model
from shardwise.comm.watchdog import thread as watchdog_thread
from shardwise.testing import pool_call, run_ranks
from shardwise.testing.failures import RankFailure
from shardwise.train.team import Team
from tests.ranks.divergence import LONG_SECONDS, Run, Struck, in_a_debugger, timeouts_of
from tests.ranks.subject import beyond_torch

pytestmark = beyond_torch

LONG = {"timeout_seconds": LONG_SECONDS, "late_seconds": None}
SHORT_SECONDS = 0.5
"""In force only while a rank is known to be away: then it brings the verdict sooner, and cannot bring another one."""


def keep_the_store(who, file):
    """A group anew, whose store is kept by the rank that will be struck, as without torchrun."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == who else None
    if store is not None:
        publish(file, str(store.port))
    wait_until(file.exists)
    store = store or dist.TCPStore("127.0.0.1", int(file.read_text()))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def publish(file, text):
    """Writes a file that others find complete or not at all."""
    file.with_suffix(".tmp").write_text(text)
    file.with_suffix(".tmp").rename(file)


def wait_until(is_true):
    """What keeps a test from waiting here for good is the limit of ``run_ranks``."""
    while not is_true():
        time.sleep(0.02)


class OnceStruck:
    """Called in forward: waits until a process is stopped or dead, and only then is there little time for it."""

    def __init__(self, pid):
        self.status = Path(f"/proc/{pid}/status")

    def is_away(self):
        try:
            return re.search(r"State:\s+[TZX]", self.status.read_text()) is not None
        except OSError:
            return True

    def __call__(self, *_):
        wait_until(self.is_away)
        set_trust(timeout_seconds=SHORT_SECONDS)
        watchdog_thread._STORE_TIMEOUT_SECONDS = SHORT_SECONDS


def lose_a_rank(who, signal_number, folder, keeps_store):
    """Trains; then rank `who` is struck in forward. The others hand on what they were told."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if keeps_store:
        keep_the_store(who, folder / "port")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pids = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    run = Run()
    run.good_step()
    # Why a connection was lost is waited for, however late the watch finds it out.
    channels._WATCHDOG_KNOWS_SECONDS = LONG_SECONDS
    strike = Struck(signal_number, LONG_SECONDS) if rank == who else OnceStruck(pids[who])
    run.model.blocks[2].register_forward_pre_hook(strike)
    try:
        run.loss().backward()
    except PeerFailure as error:
        # The pool keeps the story of a rank that raised, not of one that returned; and the first to raise ends all.
        (folder / f"told-{rank}").touch()
        wait_until(lambda: len(list(folder.glob("told-*"))) == world_size - 1)
        if signal_number == signal.SIGSTOP:
            # Everybody's end is waited for, and a stopped rank has none of its own.
            with suppress(ProcessLookupError):
                os.kill(pids[who], signal.SIGKILL)
        raise AssertionError(f"TOLD: {error}") from None


def stories(world_size, who, signal_number, folder, keeps_store=False):
    arguments = (who, signal_number, folder, keeps_store)
    with pytest.MonkeyPatch.context() as patch:
        # The others are left to tell theirs, however long it takes them.
        patch.setattr(pool_call, "_GRACE_SECONDS", LONG_SECONDS)
        with pytest.raises(RankFailure) as failure:
            run_ranks(lose_a_rank, world_size, *arguments, kind="gloo")
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
def test_ranks_that_wait_for_a_lost_rank_say_so(world_size, who, signal_number, state, tmp_path):
    reported = stories(world_size, who, signal_number, tmp_path)
    assert len(reported) == world_size - 1
    for rank, text in reported.items():
        assert "TOLD: " in text, f"rank {rank}: {text}"
        assert f"rank {who} is {state}" in text
        assert "gather 'blocks.3' in forward" in text


def test_a_stopped_rank_that_keeps_the_store_holds_nobody_up(tmp_path):
    (reported,) = stories(2, 0, signal.SIGSTOP, tmp_path, keeps_store=True).values()
    assert "did not reach \"gather 'blocks.3' in forward\"" in reported
    assert "store does not answer" in reported


class Missed(logging.Handler):
    """Listens to those who say where a late rank is: each time, the next of ``changes`` is made to their policy.

    After the last one, ``file`` has what was said, and others may go by that.
    """

    def __init__(self, file, place, *changes):
        super().__init__()
        self.file, self.place, self.changes = file, place, [*changes]

    def emit(self, record):
        if self.changes and self.place in record.getMessage():
            set_trust(**self.changes.pop(0))
            if not self.changes:
                publish(self.file, record.getMessage())


@contextmanager
def short_of_time(missed, is_away, **changes):
    """All ranks come here; then those who go on have little time for the one that is away."""
    away, logger = missed.file.with_suffix(".away"), logging.getLogger("shardwise")
    logger.addHandler(missed)
    set_trust(timeout_seconds=SHORT_SECONDS, **changes)
    try:
        dist.barrier()
        if is_away:
            away.touch()
        wait_until(away.exists)
        yield missed.file
    finally:
        logger.removeHandler(missed)
        set_trust(**LONG)


def dawdle_until(is_true):
    wait_until(is_true)


def slow_ranks(folder):
    """The last rank sits in a debugger, is late until it is missed, and is given up; all other steps must be right."""
    is_slow = dist.get_rank() == dist.get_world_size() - 1
    reported = {}
    with timeouts_of(**LONG, debugger_grace_seconds=LONG_SECONDS, trace_dir=str(folder)):
        run = Run()
        run.good_step()
        # Known to be in a debugger, it is not given up when there is no more time for one that runs.
        missed = Missed(folder / "debugged", "pdb.py", {"late_seconds": SHORT_SECONDS}, LONG)
        with short_of_time(missed, is_slow) as said:
            if is_slow:
                in_a_debugger(said.exists)
            run.good_step()
        # Others say that it is late, and wait for as long as the group does.
        with short_of_time(Missed(folder / "late", "in dawdle_until", LONG), is_slow) as said:
            if is_slow:
                dawdle_until(said.exists)
            run.good_step()
        # Where it is, is known before its time is up.
        missed = Missed(folder / "given-up", "in dawdle_until", {"late_seconds": SHORT_SECONDS})
        with short_of_time(missed, is_slow):
            try:
                if is_slow:
                    dawdle_until(lambda: len(list(folder.glob("told-*"))) == dist.get_world_size() - 1)
                run.loss().backward()
            except PeerFailure as error:
                (folder / f"told-{dist.get_rank()}").touch()
                reported = {
                    "error": str(error),
                    "file": re.search(r"events are in (\S+)", str(error)).group(1),
                }
                reported["events"] = [event for event, _ in trace.read_failure(reported["file"]).events]
                reported["text"] = trace.read_failure(reported["file"]).text()
        run.good_step()
    return reported


@pytest.mark.parametrize(("world_size", "kind"), [(2, "gloo"), (3, "threads")])
def test_a_slow_rank_causes_warnings_and_is_waited_for_until_its_time_is_up(
    world_size, kind, tmp_path, capsys
):
    slow = world_size - 1
    of_ranks = run_ranks(slow_ranks, world_size, tmp_path, kind=kind)
    said = (tmp_path / "late").read_text()
    assert "is still waiting: rank" in said
    for text in (said, *(reported["error"] for reported in of_ranks)):
        # On a busy machine others may be late, too.
        assert re.search(rf'ranks? [\d, ]*{slow} did not reach "gather the root in forward" within', text)
        assert f'rank {slow} is alive, its last event was "let an optimizer use the step"' in text
        assert "in dawdle_until" in text
    # One that comes late may find what the others have left for it there, and be told in its next wait.
    reported = of_ranks[0]
    assert reported["events"][-1] == "gather the root in forward"
    assert "PeerFailure" in reported["text"]
    assert main(["trace", reported["file"]]) == 0
    assert reported["text"] in capsys.readouterr().out
    assert main(["trace", str(tmp_path / "nothing.json")]) == 1


def out_of_descriptors(folder):
    """Rank 0 has none left while it waits for rank 1, which is late but well."""
    calls, rank = channel_of(dist.group.WORLD, torch.device("cpu")), dist.get_rank()
    own, gathered = torch.full((1,), float(rank)), torch.empty(2)
    calls.issue_all_gather(gathered, own).wait()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with timeouts_of(timeout_seconds=SHORT_SECONDS, trace_dir=str(folder)):
        if rank == 1:
            # Nothing is judged by how long this is: whoever is out of descriptors waits.
            wait_until((folder / "tried").exists)
            time.sleep(2.0)
        else:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            threading.Timer(1.5, resource.setrlimit, (resource.RLIMIT_NOFILE, limits)).start()
            os.mkdir(folder / "tried")
        try:
            calls.issue_all_gather(gathered, own).wait()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return gathered.tolist()


def test_a_rank_out_of_descriptors_takes_nobody_for_dead(tmp_path):
    assert run_ranks(out_of_descriptors, 2, tmp_path, kind="gloo") == [[0.0, 1.0]] * 2


def one_ends_early(folder):
    calls, rank = channel_of(dist.group.WORLD, torch.device("cpu")), dist.get_rank()
    own, gathered = torch.full((1,), float(rank)), torch.empty(2)
    calls.issue_all_gather(gathered, own).wait()
    if rank == 1:
        return ""
    with timeouts_of(trace_dir=str(folder)), pytest.raises(PeerFailure) as caught:
        calls.issue_all_gather(gathered, own).wait()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_rank_that_has_ended_is_not_waited_for(kind, tmp_path):
    reported, _ = run_ranks(one_ends_early, 2, tmp_path, kind=kind)
    assert "rank 1" in reported


def new_calls(native):
    group = dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        if native:
            # As with NCCL, here without it.
            patch.setattr(registry, "_make_channel", BackendChannel)
        return channel_of(group, torch.device("cpu"))


_FIRST = {False: "compare the models of all ranks", True: "use the model for the first time"}


def late_beginners(native, folder):
    """The last rank comes to its first model when others have said that it is late, to the second one never."""
    is_late = dist.get_rank() == dist.get_world_size() - 1
    with timeouts_of(**LONG, start_seconds=LONG_SECONDS, trace_dir=str(folder)):
        calls = new_calls(native)
        missed = Missed(folder / "said", "issued no collective yet", LONG)
        with short_of_time(missed, is_late, late_seconds=SHORT_SECONDS) as said:
            if is_late:
                wait_until(said.exists)
            check_same_model(["a parameter"], calls, calls.device)
        calls = new_calls(native)
        missed = Missed(folder / "never", "")
        with short_of_time(missed, is_late, late_seconds=SHORT_SECONDS, start_seconds=2 * SHORT_SECONDS):
            if is_late:
                wait_until(lambda: len(list(folder.glob("told-*"))) == dist.get_world_size() - 1)
                return ""
            with pytest.raises(PeerFailure) as caught:
                check_same_model(["a parameter"], calls, calls.device)
            (folder / f"told-{dist.get_rank()}").touch()
            return str(caught.value)


@pytest.mark.parametrize(
    ("world_size", "kind", "native"), [(2, "gloo", False), (3, "threads", False), (3, "gloo", True)]
)
def test_a_rank_that_has_not_begun_is_waited_for_longer_with_warnings(world_size, kind, native, tmp_path):
    late = world_size - 1
    *reported, nothing = run_ranks(late_beginners, world_size, native, tmp_path, kind=kind)
    said = (tmp_path / "said").read_text()
    # On a busy machine others may be late, too.
    assert re.match(rf"rank \d is still waiting: ranks? [\d, ]*{late} did not reach ", said), said
    assert f"rank {late} is alive, it has issued no collective yet" in said
    assert nothing == ""
    for text in reported:
        assert re.match(rf"ranks? [\d, ]*{late} did not reach \".*{_FIRST[native]}\" within ", text), text


# --- beside the model -------------------------------------------------------------------------------------------------


def sum_without_a_peer():
    """Rank 1 stops; rank 0 waits for it in a sum of `shardwise train`, not in a collective of the model."""
    team = Team()
    assert team.sum(1.0, team.rank) == [2.0, 1.0]
    pid = team.collect(os.getpid())[1]
    if team.rank == 1:
        os.kill(pid, signal.SIGSTOP)
    OnceStruck(pid)()
    try:
        team.sum(1.0)
    except PeerFailure as error:
        os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"TOLD: {error}") from None


def test_a_rank_that_waits_for_the_sums_of_a_step_is_told_too():
    with pytest.raises(RankFailure, match=r"TOLD: .*rank 1"):
        run_ranks(sum_without_a_peer, 2, kind="gloo")
