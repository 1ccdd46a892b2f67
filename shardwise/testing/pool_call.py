"""Sends one call's jobs to the rank processes, collects their answers, and reports ranks that fail, die or hang."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

from shardwise.errors import follows_from_a_peer
from shardwise.testing.failures import SIGNALS_WAIT_SECONDS, Outcome, RankReport
from shardwise.testing.worker import CLEAN_UP, Answer, Job, ThreadError, Worker

__all__ = ["PoolCall"]

# After the first failure, other ranks get a short time to report failures of their own. Then the failed ranks end,
# which wakes the ranks that wait for them. Ranks that are still running after the grace period are killed.
_OWN_REPORT_SECONDS = 0.3
_GRACE_SECONDS = 2.0
_STACK_SECONDS = 10.0


class PoolCall:
    """The messages of one call: sends a job to each worker and collects answers, until all are in or a rank fails."""

    def __init__(self, workers: list[Worker], timeout_seconds: float) -> None:
        self._workers = workers
        self._timeout_seconds = timeout_seconds
        self._answers: dict[int, Answer] = {}
        self._failed: dict[int, RankReport] = {}
        self._stacks: dict[int, str] = {}
        self._thread_errors: dict[int, list[ThreadError]] = {}
        self.succeeded = False

    def run(self, jobs: list[Job]) -> list[Answer]:
        try:
            return self._run(jobs)
        finally:
            if not self.succeeded:
                self._thread_errors = {
                    rank: worker.thread_errors() for rank, worker in enumerate(self._workers)
                }

    def _run(self, jobs: list[Job]) -> list[Answer]:
        deadline = time.monotonic() + self._timeout_seconds
        for rank, (worker, job) in enumerate(zip(self._workers, jobs, strict=True)):
            self._send(rank, worker, pickle.dumps(job))
        waiting = self._receive(set(range(len(jobs))) - set(self._failed), deadline, self._take_answer)
        if self._failed:
            self._wait_for_other_ranks(waiting)
            return []
        if waiting:
            self._collect_stacks(waiting)
            return []
        for rank, worker in enumerate(self._workers):
            self._send(rank, worker, CLEAN_UP)
        waiting = self._receive(set(range(len(jobs))) - set(self._failed), deadline, self._take_done)
        if waiting and not self._failed:
            self._collect_stacks(waiting)
        self.succeeded = not waiting and not self._failed
        return [self._answers[rank] for rank in range(len(jobs))]

    def reports(self) -> list[RankReport]:
        reports = []
        for rank in range(len(self._workers)):
            if rank in self._failed:
                reports.append(self._failed[rank])
            elif rank in self._stacks:
                details = self._stacks[rank] or "(its process did not answer the request for its stack)"
                reports.append(RankReport(rank, Outcome.HUNG, "was still running, here:", details))
            elif rank in self._answers:
                reports.append(RankReport(rank, Outcome.FINISHED))
            else:
                reports.append(RankReport(rank, Outcome.TORN_DOWN))
        return [self._with_thread_errors(report) for report in reports]

    def _with_thread_errors(self, report: RankReport) -> RankReport:
        """Puts errors of the rank's threads before the rank's own report: they may be why the rank failed or hangs."""
        errors = self._thread_errors.get(report.rank)
        if not errors or report.outcome is Outcome.FINISHED:
            return report
        details = "\n".join([*(error.details for error in errors), report.summary, report.details])
        lost = report.exception is not None and follows_from_a_peer(report.exception)
        return RankReport(
            report.rank,
            Outcome.RAISED,
            errors[0].summary,
            details,
            errors[0].at_seconds,
            None if lost else report.exception,
        )

    def _send(self, rank: int, worker: Worker, message: bytes) -> None:
        try:
            worker.connection.send_bytes(message)
        except OSError:
            self._record_death(rank)

    def _receive(
        self,
        waiting: set[int],
        deadline: float,
        take: Callable[[int, bytes], None],
        *,
        after_failures: bool = False,
    ) -> set[int]:
        """Receives a message from each rank; returns the ranks that sent none.

        Ends at the deadline or, unless ``after_failures``, at the first failure.
        """
        rank_of = {self._workers[rank].connection: rank for rank in waiting}
        while rank_of and (after_failures or not self._failed):
            remaining = deadline - time.monotonic()
            ready = wait(list(rank_of), timeout=max(0.0, min(remaining, SIGNALS_WAIT_SECONDS)))
            if not ready and remaining <= 0:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = rank_of.pop(connection)
                try:
                    message = connection.recv_bytes()
                except (EOFError, OSError):
                    self._record_death(rank)
                else:
                    take(rank, message)
        return set(rank_of.values())

    def _take_answer(self, rank: int, message: bytes) -> None:
        answer: Answer = pickle.loads(message)
        if answer.ok:
            self._answers[rank] = answer
            return
        torn_down = answer.lost_its_peers
        self._failed[rank] = RankReport(
            rank,
            Outcome.TORN_DOWN if torn_down else Outcome.RAISED,
            summary=answer.summary,
            details=answer.details,
            at_seconds=answer.at_seconds,
            exception=_load_exception(answer.exception),
        )

    def _take_done(self, rank: int, message: bytes) -> None:
        """Ignores the message: it only says that the rank has cleaned up."""

    def _record_death(self, rank: int) -> None:
        worker = self._workers[rank]
        self._failed[rank] = RankReport(
            rank, Outcome.DIED, summary=worker.ending(), details=worker.stack(), at_seconds=time.monotonic()
        )

    def _wait_for_other_ranks(self, waiting: set[int]) -> None:
        waiting = self._receive(
            waiting, time.monotonic() + _OWN_REPORT_SECONDS, self._take_answer, after_failures=True
        )
        deaths_before = set(self._failed)
        for rank in deaths_before:
            self._workers[rank].connection.close()
        self._receive(waiting, time.monotonic() + _GRACE_SECONDS, self._take_answer, after_failures=True)
        # Ranks that died only now died because they lost their peers.
        for rank in set(self._failed) - deaths_before:
            report = self._failed[rank]
            if report.outcome is Outcome.DIED:
                self._failed[rank] = RankReport(
                    rank, Outcome.TORN_DOWN, report.summary, report.details, report.at_seconds
                )
        if all(report.outcome is Outcome.TORN_DOWN for report in self._failed.values()):
            # No rank has an error of its own, so the loss of a peer is the cause and is reported in full.
            for rank, report in list(self._failed.items()):
                self._failed[rank] = RankReport(
                    rank, Outcome.RAISED, report.summary, report.details, report.at_seconds, report.exception
                )

    def _collect_stacks(self, waiting: set[int]) -> None:
        for rank in waiting:
            self._workers[rank].ask_for_stack()
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline:
            self._stacks = {rank: self._workers[rank].stack() for rank in waiting}
            if all(self._stacks.values()):
                # A dump is written in several parts: wait for the last of them.
                time.sleep(0.1)
                break
            time.sleep(0.02)
        self._stacks = {rank: self._workers[rank].stack() for rank in waiting}


def _load_exception(dumped: bytes) -> BaseException | None:
    if not dumped:
        return None
    try:
        error = pickle.loads(dumped)
    except Exception:  # noqa: BLE001  the traceback text is always there; the object is a convenience
        return None
    return error if isinstance(error, BaseException) else None
