"""Telling where a thread is, whatever it does."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shardwise.comm.watchdog import stacks
from shardwise.comm.watchdog.stacks import UNKNOWN, stack_of


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is before a thread that is asked gets to run."""
    monkeypatch.setattr(stacks, "_LONGEST_SECONDS", 120.0)


@contextmanager
def thread_in(work: Callable[[threading.Event], object], until_in: str = "") -> Iterator[int]:
    """A thread that does some work, and has come as far as a function of this name."""
    begun, over = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        work(over)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        assert thread.ident is not None
        while until_in and not any(f"in {until_in}\n" in call for call in stack_of(thread.ident)):
            pass
        yield thread.ident
    finally:
        over.set()
        thread.join()


def wait_for_it(over: threading.Event) -> None:
    over.wait()


def compute(over: threading.Event) -> None:
    while not over.is_set():
        sum(range(100))


def dive(over: threading.Event, depth: int = 0) -> None:
    if depth < 150:
        dive(over, depth + 1)
    else:
        over.wait()


def sleep_on(over: threading.Event, slept: list[float]) -> None:
    while not over.is_set():
        start = time.monotonic()
        time.sleep(0.2)
        slept.append(time.monotonic() - start)


def come_and_go(over: threading.Event) -> None:
    while not over.is_set():
        short = threading.Thread(target=int)
        short.start()
        short.join()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("work", [wait_for_it, compute])
def test_a_thread_that_waits_or_runs_is_found_where_it_is(work):
    with thread_in(work, work.__name__) as thread:
        for _ in range(20):
            stack = stack_of(thread)
            assert "in _bootstrap\n" in stack[0]
            assert any(f"in {work.__name__}\n" in call for call in stack)


@pytest.mark.usefixtures("patient")
def test_the_innermost_call_comes_last_with_its_source():
    stack = stack_of(threading.get_ident())
    here = next(
        number for number, call in enumerate(stack) if "in test_the_innermost_call_comes_last" in call
    )
    assert "stack = stack_of(threading.get_ident())" in stack[here]
    assert "in stack_of" in stack[here + 1]


@pytest.mark.usefixtures("patient")
def test_only_the_inner_frames_of_very_deep_stacks_are_reported():
    with thread_in(dive, "wait") as thread:
        stack = stack_of(thread)
        assert len(stack) == 100
        assert "in wait\n" in stack[-1]


@pytest.mark.usefixtures("patient")
def test_an_interrupted_sleep_continues():
    slept = list[float]()
    with thread_in(lambda over: sleep_on(over, slept), "sleep_on") as thread:
        for _ in range(20):
            assert any("in sleep_on" in call for call in stack_of(thread))
    assert min(slept) >= 0.2


def test_interrupted_code_finds_errno_unchanged():
    stack_of(threading.get_ident())
    libc = ctypes.CDLL(None, use_errno=True)
    ctypes.set_errno(errno.EAGAIN)
    # As if asked from another thread, between a system call and the look at its error.
    libc["raise"](int(signal.SIGURG))
    assert ctypes.get_errno() == errno.EAGAIN


@pytest.mark.usefixtures("patient")
def test_interrupted_system_calls_are_restarted():
    reader, writer = os.pipe()
    libc = ctypes.CDLL(None, use_errno=True)
    read: list[tuple[int, int]] = []

    def wait_in_read(over: threading.Event) -> None:
        read.append((libc.read(reader, ctypes.create_string_buffer(1), 1), ctypes.get_errno()))

    with thread_in(wait_in_read, "wait_in_read") as thread:
        for _ in range(3):
            assert any("in wait_in_read" in call for call in stack_of(thread))
        os.write(writer, b"x")
    assert read == [(1, 0)]
    os.close(reader)
    os.close(writer)


@pytest.mark.usefixtures("patient")
def test_threads_may_start_and_end_meanwhile():
    with thread_in(come_and_go), thread_in(wait_for_it, "wait_for_it") as thread:
        for _ in range(200):
            assert any("in wait_for_it" in call for call in stack_of(thread))


@pytest.mark.usefixtures("patient")
def test_many_can_ask_at_once():
    with thread_in(wait_for_it, "wait_for_it") as first, thread_in(compute, "compute") as second:
        found: list[bool] = []

        def ask(thread: int, name: str) -> None:
            found.extend(any(f"in {name}\n" in call for call in stack_of(thread)) for _ in range(5))

        asking = [
            threading.Thread(target=ask, args=(thread, name))
            for thread, name in ((first, "wait_for_it"), (second, "compute")) * 2
        ]
        for each in asking:
            each.start()
        for each in asking:
            each.join()
        assert found == [True] * 20


def test_a_thread_that_has_ended_has_no_stack():
    with thread_in(lambda over: None) as thread:
        pass
    assert stack_of(thread) == [UNKNOWN]


def test_a_thread_that_blocks_signals_is_reported_as_such():
    refuses = threading.Event()

    def refuse(over: threading.Event) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})
        refuses.set()
        over.wait()

    with thread_in(refuse) as thread:
        refuses.wait()
        assert stack_of(thread) == [UNKNOWN]
    assert any("in test_a_thread_that_takes_no" in call for call in stack_of(threading.get_ident()))


def test_a_forked_process_reads_its_own_stacks():
    code = """
import importlib.util, os, sys, threading

# By itself: the package would bring torch along.
spec = importlib.util.spec_from_file_location("stacks", sys.argv[1])
stacks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stacks)
stack_of = stacks.stack_of

def child():
    return stack_of(threading.get_ident())

def parent():
    return stack_of(threading.get_ident())

parent()
pid = os.fork()
if pid == 0:
    os._exit(0 if any("in child" in call for call in child()) else 1)
assert os.waitpid(pid, 0)[1] == 0
assert any("in parent" in call for call in parent())
"""
    subprocess.run([sys.executable, "-c", code, stacks.__file__], check=True)
