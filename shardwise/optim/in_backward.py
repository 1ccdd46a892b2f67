"""Steps a unit's flat runs during backward, in a thread, as soon as its gradients have arrived on the host.

    backward    | unit 3 | unit 2 | unit 1 | unit 0 |
    transfers             ▼ 3      ▼ 2      ▼ 1      ▼ 0        gradients, to the host
    this thread           | step 3 | step 2 | step 1 | step 0 |  step() waits for the last, and steps what is left

The thread waits for the transfer, so that backward does not have to. It uses the optimizer's options as they were when
the gradients were reduced. The gradients cannot be changed between backward and ``step()``: no clipping, no scaler.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.errors import StateError

if TYPE_CHECKING:
    from shardwise.engine.unit.unit import Unit
    from shardwise.optim.flat_runs import FlatRun


class ArrivedGradients(NamedTuple):
    """Runs, each with its group's number and its gradients, which are complete once ``wait`` has returned."""

    wait: Callable[[], None]
    runs: list[tuple[int, FlatRun, list[torch.Tensor]]]
    options: list[dict[str, Any]]


class BackwardSteps:
    """The thread and its queue, and the runs it has stepped since the optimizer's last ``step()``."""

    def __init__(self, take_step: Callable[[ArrivedGradients], None]) -> None:
        self._take_step = take_step
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._num_waiting = 0
        self._error: BaseException | None = None
        self._has_thread = False
        self.stepped: set[FlatRun] = set()

    def submit(self, unit: Unit, arrived: ArrivedGradients) -> None:
        if any(run in self.stepped for _, run, _ in arrived.runs):
            raise StateError(
                f"unit '{unit.name}' got more gradients after it was stepped in backward",
                where=f"flat(..., in_backward=True), rank {unit.rank}",
                fix="call model.set_is_last_backward(False) before every backward of a step but the last; if a module "
                "runs several times in a forward, use flat without in_backward",
            )
        self.stepped.update(run for _, run, _ in arrived.runs)
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=_work, args=(self._jobs,), name="shardwise-early", daemon=True).start()
        with self._idle:
            self._num_waiting += 1
        self._jobs.put(partial(self._run_job, arrived))

    def wait(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._num_waiting == 0)

    def join(self) -> set[FlatRun]:
        """Waits for all submitted steps and returns their runs, or raises the first error; then starts over."""
        self.wait()
        stepped, self.stepped = self.stepped, set()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return stepped

    def _run_job(self, arrived: ArrivedGradients) -> None:
        try:
            if self._error is None:
                arrived.wait()
                with torch.no_grad():
                    self._take_step(arrived)
        except BaseException as error:  # noqa: BLE001 - raised by the optimizer's step()
            self._error = error
        finally:
            arrived.runs.clear()  # so that this queue does not keep gradients alive
            with self._idle:
                self._num_waiting -= 1
                self._idle.notify_all()

    def __del__(self) -> None:
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job
