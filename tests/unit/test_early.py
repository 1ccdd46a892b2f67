"""The thread of early steps leaves a core to backward, and everybody else's number of threads alone."""

from __future__ import annotations

import queue
import threading

import torch

from shardwise.optim.early import Jobs, start_thread


def test_only_the_thread_of_early_steps_computes_on_fewer_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        jobs: Jobs = queue.SimpleQueue()
        seen = []
        start_thread(jobs)
        jobs.put(lambda: seen.append(torch.get_num_threads()))
        jobs.put(None)
        other = threading.Thread(target=lambda: seen.append(10 * torch.get_num_threads()))
        other.start()
        other.join()
        for _ in range(1000):
            if len(seen) == 2:
                break
            threading.Event().wait(0.01)
        assert sorted(seen) == [2, 30]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
