"""Turns the reports of all ranks of a call into the one error that ``run_ranks`` raises.

Every rank of a call ends in one of five ways, and the error says which, rank by rank:

    raised      its function raised
    died        its process ended by itself
    torn down   did not fail itself: it was stopped, or lost its peers, because another rank failed
    hung        still running at the timeout; its stack is in the report
    finished    its function returned

This file only describes failures; it starts and ends no ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from shardwise.errors import ShardwiseError, follows_from_a_peer

__all__ = ["Outcome", "RankFailure", "RankReport", "RankTimeout", "failure_of"]

# A signal just before the caller's wait, or in another thread, does not end the wait: its handler runs after this.
SIGNALS_WAIT_SECONDS = 1.0


class Outcome(Enum):
    """How one rank of a call ended."""

    RAISED = "raised"
    DIED = "died"
    TORN_DOWN = "torn down"
    HUNG = "hung"
    FINISHED = "finished"


@dataclass(frozen=True)
class RankReport:
    """How one rank ended.

    ``summary`` is one line, ``details`` a traceback or a stack. ``at_seconds`` is read from the machine's
    monotonic clock, which all processes share, so that the first failure can be distinguished from its consequences.
    """

    rank: int
    outcome: Outcome
    summary: str = ""
    details: str = ""
    at_seconds: float = 0.0
    exception: BaseException | None = None


class RankFailure(ShardwiseError, RuntimeError):
    """At least one rank failed. ``rank`` is the first cause; ``reports`` has a report of every rank, that one first.

    ``__cause__`` is the exception that rank raised, if it could be sent to the caller.
    """

    rank: int = -1
    reports: tuple[RankReport, ...] = ()


class RankTimeout(RankFailure):
    """Ranks were still running at the timeout. The message contains the stack of each."""


# The order of reports: first possible causes (a rank's own errors before errors about peers, each by time), then their
# consequences (by rank).
_ORDER = {Outcome.RAISED: 0, Outcome.DIED: 0, Outcome.HUNG: 1, Outcome.TORN_DOWN: 2, Outcome.FINISHED: 3}


def failure_of(reports: Sequence[RankReport], *, call: str, timeout_seconds: float) -> RankFailure:
    """Returns the error that describes how every rank ended, the first cause first."""
    ordered = sorted(reports, key=_report_order)
    first = ordered[0]
    hung = [report for report in ordered if report.outcome is Outcome.HUNG]
    causes = [report for report in ordered if report.outcome in (Outcome.RAISED, Outcome.DIED)]

    if hung and not causes:
        first = hung[0]
        headline = f"{_ranks(hung)} of {len(ordered)} still running after {timeout_seconds:g} seconds"
        error_type: type[RankFailure] = RankTimeout
    else:
        headline = f"rank {first.rank} of {len(ordered)} {first.summary or first.outcome.value}"
        error_type = RankFailure

    sections = [headline, f"  where: {call}"]
    for report in ordered:
        if report.outcome in (Outcome.RAISED, Outcome.DIED, Outcome.HUNG):
            sections.append(f"\n--- rank {report.rank} {report.summary or report.outcome.value}")
            sections.append(report.details.rstrip() or "(no details)")
    torn_down = [report for report in ordered if report.outcome is Outcome.TORN_DOWN]
    if torn_down:
        sections.append("")
        for report in torn_down:
            reason = report.summary or "stopped while it waited for its peers"
            sections.append(f"--- rank {report.rank} torn down because rank {first.rank} failed: {reason}")
    finished = [report for report in ordered if report.outcome is Outcome.FINISHED]
    if finished:
        sections.append(f"\n--- {_ranks(finished)} finished")

    failure = error_type("\n".join(sections))
    failure.rank = first.rank
    failure.reports = tuple(ordered)
    failure.__cause__ = first.exception
    return failure


def _report_order(report: RankReport) -> tuple[int, bool, float, int]:
    is_cause = report.outcome in (Outcome.RAISED, Outcome.DIED)
    is_about_a_peer = report.exception is not None and follows_from_a_peer(report.exception)
    return _ORDER[report.outcome], is_about_a_peer, report.at_seconds if is_cause else 0.0, report.rank


def _ranks(reports: Sequence[RankReport]) -> str:
    names = ", ".join(str(rank) for rank in sorted(report.rank for report in reports))
    return f"rank {names}" if len(reports) == 1 else f"ranks {names}"
