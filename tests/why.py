"""The last lines of a run that failed: why, for each failure, in full.

pytest's own summary cuts reasons off where the terminal ends, and names of tests alone are often longer than that.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

_MOST_FAILURES = 10
_MOST_LINES = 12
# What a failure of ranks begins a rank's own story with; the first is that of the rank which failed first.
_RANK = "--- rank "


def reason_of(message: str) -> Iterator[str]:
    """What an error says of itself, up to its first empty line; of ranks that failed, how the first of them did."""
    head, _, rest = message.partition("\n\n")
    yield from head.splitlines()[:_MOST_LINES]
    if rest.startswith(_RANK):
        first = rest.split(f"\n{_RANK}")[0]
        yield from first.strip().splitlines()[-_MOST_LINES:]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Generator[None, Any, Any]:
    result = yield
    failed = [*terminalreporter.getreports("error"), *terminalreporter.getreports("failed")]
    if failed:
        terminalreporter.section("why")
    # The first of them comes last.
    for report in failed[:_MOST_FAILURES][::-1]:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash is not None else report.longreprtext
        terminalreporter.write_line(report.nodeid, red=True)
        for line in reason_of(message):
            terminalreporter.write_line(f"    {line}")
    return result
