"""run_ranks keeps its promises: results, failures, hangs, and a pool that outlives all of them."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise import fully_shard
from shardwise.comm.watchdog.stacks import stack_of
from shardwise.comm.watchdog.thread import WATCHDOG
from shardwise.errors import ConfigError, PeerFailure, StateError
from shardwise.testing import RankFailure, RankReport, RankTimeout, close_pools, pool_call, run_ranks, threads
from shardwise.testing.failures import Outcome, failure_of

CPU_KINDS = ["threads", "gloo"]
every_cpu_kind = pytest.mark.parametrize("kind", CPU_KINDS)


# Whoever waits this long waits until it is ended.
LONGER_THAN_A_TEST_SECONDS = 3600


# --- what the ranks run; process ranks import it from here --------------------------------------------------


def sum_of_ranks(start=0.0, *, scale=1.0):
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), total.item() * scale


def process_id():
    return os.getpid()


def thread_id():
    return threading.get_ident()


def shard_a_layer():
    layer = fully_shard(torch.nn.Linear(20, 20))
    layer(torch.ones(1, 20)).sum().backward()
    assert any(channel.world == 20 for channel in WATCHDOG.channels())


def own_stack():
    return stack_of(threading.get_ident())


def setting():
    return {
        "threads": torch.get_num_threads(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "backend": dist.get_backend(),
        "draw": torch.rand(()).item(),
        "gpu_in_use": torch.cuda.is_initialized(),
    }


def thread_of_backward():
    seen = []
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda grad: seen.append(threading.get_ident()))
    weight.sum().backward()
    return seen == [threading.get_ident()]


def sum_within_halves():
    halves = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("half", "member"))
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=halves.get_group("member"))
    return total.item()


def gather_a_dtensor(num_groups_before):
    # Groups made first give the groups of the mesh other names than in a call without them.
    for _ in range(num_groups_before):
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "member"))["member"]
    whole = torch.arange(6.0).reshape(3, 2)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    # The sum's mesh comes out of a cache of DTensor's, by an equality that does not look at groups.
    return torch.equal((sharded + 1).full_tensor(), whole + 1)


def fail_on(failing_rank):
    # A rank that is lost to one that still connects to it would fail that one, too.
    dist.barrier()
    if dist.get_rank() == failing_rank:
        raise ValueError(f"the batch of rank {failing_rank} is empty")
    dist.barrier()


def fail_everywhere():
    dist.barrier()
    # Once all are out of the barrier: whoever waits for a peer that failed is stopped.
    store = dist.distributed_c10d._get_default_store()
    store.add("out", 1)
    while store.add("out", 0) < dist.get_world_size():
        time.sleep(0.01)
    raise KeyError(f"key {dist.get_rank()}")


def fail_while_peers_sleep():
    if dist.get_rank() == 0:
        raise ValueError("at once")
    time.sleep(LONGER_THAN_A_TEST_SECONDS)


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def fail_with_an_exception_that_does_not_pickle():
    raise Unpicklable("this", "that")


def return_a_lock():
    return threading.Lock()


def exit_quietly(code):
    if dist.get_rank() == 1:
        os._exit(code)
    dist.barrier()


def kill_itself():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def a_line_to_look_for(release=None):
    (release or threading.Event()).wait(LONGER_THAN_A_TEST_SECONDS)


def hang_on_rank_1(release=None):
    if dist.get_rank() == 1:
        a_line_to_look_for(release)
    dist.barrier()


def spin_forever():
    while True:
        pass


def tell_and_spin(file):
    dist.barrier()
    file.touch()
    spin_forever()


def warn_as_configured():
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("tell", UserWarning, stacklevel=1)
    return len(caught)


def warn_plainly():
    warnings.warn("tell", UserWarning, stacklevel=1)


def run_ranks_on_a_rank(kind):
    run_ranks(process_id, 2, kind=kind)


# --- results ------------------------------------------------------------------------------------------------


@every_cpu_kind
@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_back_in_rank_order(kind, world_size):
    total = float(sum(range(world_size)))
    assert run_ranks(sum_of_ranks, world_size, kind=kind) == [(rank, total) for rank in range(world_size)]


@every_cpu_kind
def test_arguments_reach_every_rank(kind):
    assert run_ranks(sum_of_ranks, 2, 10.0, scale=2.0, kind=kind) == [(0, 42.0), (1, 42.0)]


@every_cpu_kind
def test_groups_of_a_mesh_work(kind):
    assert run_ranks(sum_within_halves, 4, kind=kind) == [1.0, 1.0, 5.0, 5.0]


@every_cpu_kind
def test_the_next_call_does_not_meet_the_groups_of_the_last(kind):
    for num_groups_before in (0, 2, 1):
        assert run_ranks(gather_a_dtensor, 4, num_groups_before, kind=kind) == [True] * 4


def test_128_ranks_run_as_threads():
    total = 128 * 127 / 2
    assert run_ranks(sum_of_ranks, 128) == [(rank, total) for rank in range(128)]


def test_threads_may_run_functions_that_do_not_pickle():
    here = threading.get_ident()
    assert run_ranks(lambda: threading.get_ident() != here, 2) == [True, True]


def test_rank_threads_are_reused():
    assert set(run_ranks(thread_id, 3)) < set(run_ranks(thread_id, 4))


def test_the_watchdog_does_not_watch_ranks_that_have_ended():
    run_ranks(shard_a_layer, 20)
    # Or else this ends in a timeout.
    while any(channel.world == 20 for channel in WATCHDOG.channels()):
        time.sleep(0.01)


READ_RANDOM_STATES = """
import gc, time
import torch, torch.distributed as dist
from shardwise.testing import run_ranks

def on_a_rank():
    dist.barrier()
    gc.set_threshold(1)
    for _ in range(30):
        torch.get_rng_state()
    gc.set_threshold(700)

gc.callbacks.append(lambda *_: time.sleep(0))  # lets another thread run in every collection
run_ranks(on_a_rank, 3)
"""


@pytest.mark.slow
def test_threads_that_read_random_states_do_not_wait_for_each_other():
    """In a process of its own: threads that do would stop all of it."""
    done = subprocess.run(
        [sys.executable, "-c", READ_RANDOM_STATES],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=300,
    )
    assert done.returncode == 0


def test_the_stack_of_a_rank_is_found_however_many_threads_earlier_calls_left():
    run_ranks(thread_id, 110)
    for stack in run_ranks(own_stack, 3):
        assert any("in own_stack" in call for call in stack)
    assert any("in test_where_a_rank_is" in call for call in stack_of(threading.main_thread().ident))


def test_calls_leave_the_hook_for_uncaught_errors_as_it_was():
    before = sys.excepthook
    run_ranks(thread_id, 2)
    assert sys.excepthook is before


def test_backward_runs_on_the_ranks_own_thread():
    assert run_ranks(thread_of_backward, 4) == [True] * 4


def test_autograd_of_the_caller_is_as_it_was():
    before = torch._C._is_multithreading_enabled()
    run_ranks(sum_of_ranks, 2)
    assert torch._C._is_multithreading_enabled() == before


@every_cpu_kind
def test_the_caller_has_no_default_group_before_or_after(kind):
    assert not dist.is_initialized()
    run_ranks(sum_of_ranks, 2, kind=kind)
    assert not dist.is_initialized()


def test_a_process_rank_has_its_compute_threads_the_loopback_and_a_fixed_seed(request):
    num_threads = request.config.getoption("--compute-threads")
    first = run_ranks(setting, 2, kind="gloo")
    again = run_ranks(setting, 2, kind="gloo")
    assert first == again
    assert first[0] == first[1]
    draw = torch.rand((), generator=torch.Generator().manual_seed(0)).item()
    assert first[0] == {
        "threads": num_threads,
        "interface": "lo",
        "backend": "gloo",
        "draw": draw,
        "gpu_in_use": False,
    }


def set_compute_threads(num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    return before


@pytest.mark.parametrize("kind", CPU_KINDS)
def test_compute_threads_that_a_call_set_do_not_last_until_the_next(request, kind):
    num_threads = request.config.getoption("--compute-threads")
    run_ranks(set_compute_threads, 2, num_threads + 2, kind=kind)
    assert run_ranks(set_compute_threads, 2, num_threads, kind=kind) == [num_threads] * 2


def test_warning_filters_of_the_caller_hold_on_process_ranks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RankFailure, match="UserWarning: tell"):
            run_ranks(warn_as_configured, 2, kind="gloo")
        warnings.simplefilter("ignore")
        assert run_ranks(warn_as_configured, 2, kind="gloo") == [0, 0]


def test_a_warning_that_an_earlier_call_has_shown_is_not_silent_in_the_next():
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        run_ranks(warn_plainly, 2, kind="gloo")
        warnings.simplefilter("error")
        with pytest.raises(RankFailure, match="UserWarning: tell"):
            run_ranks(warn_plainly, 2, kind="gloo")


# --- the pool -----------------------------------------------------------------------------------------------


def test_the_pool_is_reused_and_grows_on_demand():
    two = run_ranks(process_id, 2, kind="gloo")
    four = run_ranks(process_id, 4, kind="gloo")
    assert len({*four, os.getpid()}) == 5
    assert four[:2] == two
    assert run_ranks(process_id, 3, kind="gloo") == four[:3]
    assert run_ranks(process_id, 2, kind="gloo") == two


def test_closing_the_pools_ends_the_processes_and_the_next_call_starts_new_ones():
    before = run_ranks(process_id, 2, kind="gloo")
    close_pools()
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not set(before) & set(run_ranks(process_id, 2, kind="gloo"))


def test_a_worker_that_died_while_idle_is_replaced():
    before = run_ranks(process_id, 2, kind="gloo")
    os.kill(before[1], signal.SIGKILL)
    while before[1] in [child.pid for child in multiprocessing.active_children()]:
        time.sleep(0.01)
    after = run_ranks(process_id, 2, kind="gloo")
    assert after[0] == before[0]
    assert after[1] != before[1]


# --- failures -----------------------------------------------------------------------------------------------


@every_cpu_kind
def test_an_exception_is_reported_with_its_rank_and_traceback(kind):
    with pytest.raises(RankFailure) as caught:
        run_ranks(fail_on, 3, 1, kind=kind)
    message = str(caught.value)
    assert message.startswith("rank 1 of 3 raised ValueError: the batch of rank 1 is empty")
    assert "Traceback (most recent call last)" in message
    assert "in fail_on" in message
    assert f"run_ranks(fail_on, 3, kind={kind!r})" in message
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)


@every_cpu_kind
def test_peers_that_wait_are_reported_as_torn_down_and_hold_nothing_up(kind):
    with pytest.raises(RankFailure) as caught:
        run_ranks(fail_on, 3, 1, kind=kind)
    message = str(caught.value)
    assert "rank 0 torn down because rank 1 failed" in message
    assert "rank 2 torn down because rank 1 failed" in message
    assert message.count("Traceback") == 1


@pytest.fixture
def every_rank_is_heard(monkeypatch):
    """However slow a rank is, its own story is waited for. For calls in which all ranks raise."""
    monkeypatch.setattr(pool_call, "_OWN_REPORT_SECONDS", LONGER_THAN_A_TEST_SECONDS)
    monkeypatch.setattr(threads, "_INTERRUPT_SECONDS", LONGER_THAN_A_TEST_SECONDS)
    monkeypatch.setattr(threads, "_GRACE_SECONDS", 2 * LONGER_THAN_A_TEST_SECONDS)


@every_cpu_kind
@pytest.mark.usefixtures("every_rank_is_heard")
def test_when_several_ranks_fail_all_are_listed(kind):
    with pytest.raises(RankFailure) as caught:
        run_ranks(fail_everywhere, 3, kind=kind)
    assert isinstance(caught.value.__cause__, KeyError)
    message = str(caught.value)
    assert message.startswith(f"rank {caught.value.rank} of 3 raised")
    assert all(f"--- rank {rank} raised KeyError: 'key {rank}'" in message for rank in range(3))
    assert message.count("Traceback") == 3


def test_the_first_of_several_failures_is_reported_first():
    reports = [
        RankReport(0, Outcome.TORN_DOWN, at_seconds=1.0),
        RankReport(1, Outcome.RAISED, "raised KeyError", at_seconds=3.0, exception=KeyError("later")),
        RankReport(2, Outcome.RAISED, "raised ValueError", at_seconds=2.0, exception=ValueError("first")),
    ]
    failure = failure_of(reports, call="a call", timeout_seconds=60.0)
    assert failure.rank == 2
    assert isinstance(failure.__cause__, ValueError)
    message = str(failure)
    assert message.startswith("rank 2 of 3 raised ValueError")
    assert message.index("--- rank 2 raised") < message.index("--- rank 1 raised")
    assert "rank 0 torn down because rank 2 failed" in message


@every_cpu_kind
def test_ranks_answer_again_after_a_failure(kind):
    for _ in range(2):
        with pytest.raises(RankFailure):
            run_ranks(fail_on, 3, 0, kind=kind)
        assert run_ranks(sum_of_ranks, 4, kind=kind) == [(rank, 6.0) for rank in range(4)]


def test_a_process_that_sleeps_while_a_peer_fails_is_ended_after_a_short_grace():
    pids = run_ranks(process_id, 2, kind="gloo")
    with pytest.raises(RankFailure, match="rank 1 torn down because rank 0 failed"):
        run_ranks(fail_while_peers_sleep, 2, kind="gloo")
    with pytest.raises(ProcessLookupError):
        os.kill(pids[1], 0)


def test_an_exception_that_does_not_pickle_still_shows_its_traceback():
    with pytest.raises(RankFailure, match="Unpicklable: this and that") as caught:
        run_ranks(fail_with_an_exception_that_does_not_pickle, 2, kind="gloo")
    assert "in fail_with_an_exception_that_does_not_pickle" in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("fn", "args", "ending"),
    [(exit_quietly, (7,), "exited with code 7"), (kill_itself, (), "was killed by SIGKILL")],
)
def test_a_process_that_dies_is_reported_with_its_rank_and_how(fn, args, ending):
    with pytest.raises(RankFailure, match=f"rank 1 of 2 {ending}"):
        run_ranks(fn, 2, *args, kind="gloo")
    assert run_ranks(sum_of_ranks, 2, kind="gloo") == [(0, 1.0), (1, 1.0)]


def test_a_failure_survives_a_process_pipe():
    with pytest.raises(RankFailure) as caught:
        run_ranks(fail_on, 2, 1)
    back = pickle.loads(pickle.dumps(caught.value))
    assert (str(back), back.rank) == (str(caught.value), 1)


# --- hangs --------------------------------------------------------------------------------------------------


def hung(fn, world_size, *args, kind, is_there, error=RankTimeout):
    """The error of a hang, its message: with a limit that gave ranks the time to come to where they hang."""
    for seconds in (0.5, 2, 8, 32, 128):
        began = time.monotonic()
        with pytest.raises(RankFailure) as caught:
            run_ranks(fn, world_size, *args, kind=kind, timeout_seconds=seconds)
        assert time.monotonic() - began >= seconds
        message = str(caught.value)
        if is_there(message.split("--- rank ")[1:]):
            assert type(caught.value) is error
            assert error is RankFailure or f"after {seconds} seconds" in message
            return message
    raise AssertionError(f"ranks did not come to where they hang:\n{message}")


def test_a_hang_of_processes_ends_at_the_timeout_with_every_ranks_stack():
    pids = run_ranks(process_id, 3, kind="gloo")

    def all_are_there(stacks):
        return (
            [stack[0] for stack in stacks] == ["0", "1", "2"]
            and "in a_line_to_look_for" in stacks[1]
            and all("in barrier" in stacks[rank] for rank in (0, 2))
        )

    message = hung(hang_on_rank_1, 3, kind="gloo", is_there=all_are_there)
    assert message.startswith("ranks 0, 1, 2 of 3 still running")
    assert not set(pids) & set(run_ranks(process_id, 3, kind="gloo"))


def test_a_hang_of_threads_ends_at_the_timeout_with_every_ranks_stack():
    release = threading.Event()

    def all_are_there(stacks):
        return (
            [stack[0] for stack in stacks] == ["0", "1", "2"]
            and "in a_line_to_look_for" in stacks[1]
            and all("in hang_on_rank_1" in stacks[rank] for rank in (0, 2))
        )

    try:
        hung(hang_on_rank_1, 3, release, kind="threads", is_there=all_are_there)
    finally:
        release.set()
    assert run_ranks(sum_of_ranks, 3) == [(rank, 3.0) for rank in range(3)]


@every_cpu_kind
def test_ranks_that_compute_forever_are_stopped(kind):
    ids = run_ranks(thread_id, 2, kind=kind)
    hung(spin_forever, 2, kind=kind, is_there=lambda stacks: all("in spin_forever" in it for it in stacks))
    if kind == "threads":
        # They came back to be used again: none is left spinning.
        assert run_ranks(thread_id, 2, kind=kind) == ids
    assert run_ranks(sum_of_ranks, 2, kind=kind) == [(0, 1.0), (1, 1.0)]


@every_cpu_kind
def test_a_rank_that_finished_before_the_hang_is_reported_as_finished(kind):
    message = hung(
        hang_unless_rank_0,
        2,
        kind=kind,
        is_there=lambda stacks: "rank 0 finished" in "--- rank ".join(["", *stacks]),
    )
    assert message.startswith("rank 1 of 2 still running")


def hang_unless_rank_0():
    if dist.get_rank() != 0:
        spin_forever()


@every_cpu_kind
def test_an_interrupted_call_leaves_the_ranks_usable(kind, tmp_path):
    run_ranks(process_id, 2, kind=kind)

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    def send_signal():
        while not (tmp_path / "spinning").exists():
            time.sleep(0.01)
        # The signal may come just before the caller begins to wait, or to another thread, as here: it wakes nobody.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)

    previous = signal.signal(signal.SIGUSR2, interrupt)
    sender = threading.Thread(target=send_signal)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(
                tell_and_spin, 2, tmp_path / "spinning", kind=kind, timeout_seconds=LONGER_THAN_A_TEST_SECONDS
            )
    finally:
        sender.join()
        signal.signal(signal.SIGUSR2, previous)
    assert run_ranks(sum_of_ranks, 2, kind=kind) == [(0, 1.0), (1, 1.0)]


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [0, -1, 1.5, "2"])
def test_an_invalid_world_size_is_refused(world_size):
    with pytest.raises(ConfigError, match="world_size is"):
        run_ranks(process_id, world_size)


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'threads', 'gloo', 'nccl', 'gloo-cuda'"):
        run_ranks(process_id, 2, kind="mpi")


def test_a_function_that_cannot_be_pickled_is_refused_before_any_rank_starts():
    with pytest.raises(ConfigError, match="top level of a module"):
        run_ranks(lambda: 1, 2, kind="gloo")


def test_a_result_that_cannot_be_pickled_is_a_failure_that_says_so():
    with pytest.raises(RankFailure, match="the result of a process rank cannot be pickled: lock"):
        run_ranks(return_a_lock, 2, kind="gloo")


@every_cpu_kind
def test_ranks_cannot_start_ranks(kind):
    with pytest.raises(RankFailure, match="run_ranks was called on a rank") as caught:
        run_ranks(run_ranks_on_a_rank, 2, kind, kind=kind)
    assert isinstance(caught.value.__cause__, StateError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("kind", ["nccl", "gloo-cuda"])
def test_gpu_kinds_say_so_where_there_is_no_gpu(kind):
    with pytest.raises(ConfigError, match="no CUDA device"):
        run_ranks(process_id, 2, kind=kind)


# --- the first error ------------------------------------------------------------------------------------------------


def break_in_the_model_of_the_last_rank(reported):
    """Its peer's error comes up first: the rank looks after something before its own one does."""
    model = fully_shard(torch.nn.Linear(4, 4))
    if dist.get_rank() == dist.get_world_size() - 1:
        model.register_forward_hook(raise_something)
    try:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
    except PeerFailure:
        reported.touch()
        raise
    except ValueError:
        while not reported.exists():
            time.sleep(0.01)
        raise


def raise_something(*_args):
    raise ValueError("only here")


@every_cpu_kind
@pytest.mark.usefixtures("every_rank_is_heard")
def test_a_ranks_own_error_is_reported_before_its_peers_errors(kind, tmp_path):
    with pytest.raises(RankFailure) as failed:
        run_ranks(break_in_the_model_of_the_last_rank, 2, tmp_path / "told", kind=kind)
    assert failed.value.rank == 1
    assert str(failed.value).startswith("rank 1 of 2 raised ValueError: only here")
    assert isinstance(failed.value.__cause__, ValueError)


def wait_for_a_thread_that_is_gone():
    if dist.get_rank() == 1:
        threading.Thread(target=raise_something, name="loader").start()
        time.sleep(LONGER_THAN_A_TEST_SECONDS)
    dist.barrier()


def test_an_exception_that_ended_a_thread_is_reported_before_the_ranks_that_hang_because_of_it():
    text = hung(
        wait_for_a_thread_that_is_gone,
        2,
        kind="gloo",
        is_there=lambda stacks: "raise_something" in stacks[0],
        error=RankFailure,
    )
    assert text.startswith("rank 1 of 2 lost thread 'loader', which raised ValueError: only here")
    assert text.index("raise_something") < text.index("rank 0")


def end_a_thread_and_go_on():
    thread = threading.Thread(target=raise_something, name="loader")
    thread.start()
    thread.join()
    return dist.get_rank()


def test_a_thread_that_ended_with_an_exception_does_not_fail_a_rank_that_goes_on():
    assert run_ranks(end_a_thread_and_go_on, 2, kind="gloo") == [0, 1]
