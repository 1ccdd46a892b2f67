"""Steps taken while backward still runs: a unit's runs, as soon as its gradients have arrived on the host.

    backward    | unit 3 | unit 2 | unit 1 | unit 0 |
    transfers             ▼ 3      ▼ 2      ▼ 1      ▼ 0        gradients, to the host
    this thread           | step 3 | step 2 | step 1 | step 0 |  step() waits for the last, and takes what is left

A thread waits for the transfer and steps, so that the thread of backward need not. It goes by what the optimizer's
options were when backward came by. Gradients that are stepped here cannot be changed between backward and ``step()``:
no clipping, no scaler.
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
    """Runs, each with the number of its group and its gradients, which are there once ``wait`` has returned."""

    wait: Callable[[], None]
    runs: list[tuple[int, FlatRun, list[torch.Tensor]]]
    options: list[dict[str, Any]]


class BackwardSteps:
    """What is stepped early, since the optimizer's last step, by a thread that ends with this."""

    def __init__(self, take_step: Callable[[ArrivedGradients], None]) -> None:
        self._take_step = take_step
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._num_waiting = 0
        self._error: BaseException | None = None
        self._has_thread = False
        self.stepped: set[FlatRun] = set()

    def hand_over(self, unit: Unit, arrived: ArrivedGradients) -> None:
        if any(run in self.stepped for _, run, _ in arrived.runs):
            raise StateError(
                f"gradients of unit '{unit.name}' came again after they were stepped in backward",
                where=f"flat(..., in_backward=True), rank {unit.rank}",
                fix="call model.set_is_last_backward(False) before all backwards of a step but the last; where a "
                "module runs several times in a forward, use flat without in_backward",
            )
        self.stepped.update(run for _, run, _ in arrived.runs)
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=_work, args=(self._jobs,), name="shardwise-early", daemon=True).start()
        with self._idle:
            self._num_waiting += 1
        self._jobs.put(partial(self._do, arrived))

    def wait(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._num_waiting == 0)

    def join(self) -> set[FlatRun]:
        """Waits until all that was handed over is stepped; returns it, and begins anew."""
        self.wait()
        stepped, self.stepped = self.stepped, set()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return stepped

    def _do(self, arrived: ArrivedGradients) -> None:
        try:
            if self._error is None:
                arrived.wait()
                with torch.no_grad():
                    self._take_step(arrived)
        except BaseException as error:  # noqa: BLE001 - raised where the optimizer is stepped
            self._error = error
        finally:
            arrived.runs.clear()  # The gradients in there are not ours to keep.
            with self._idle:
                self._num_waiting -= 1
                self._idle.notify_all()

    def __del__(self) -> None:
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job
