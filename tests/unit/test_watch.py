"""What the watch tells of a rank: where it is, but only once others have waited for it long enough to want to know."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from shardwise import policies
from shardwise.comm import watch
from shardwise.comm.path import Path


def test_stacks_are_read_late():
    wire = SimpleNamespace(path=Path(), thread=threading.get_ident(), group=lambda: None)
    timeout_seconds, sight = policies.trust().timeout_seconds, watch._Sight()
    assert watch._status(wire, None, sight, timeout_seconds / 10)["stack"] == []
    assert any(
        "in _status" in line for line in watch._status(wire, None, sight, timeout_seconds / 2)["stack"]
    )


def test_a_rank_that_gets_on_without_collectives_is_not_still():
    sight = watch._Sight()
    sight.still_seconds((0, 5, 1, 0), now=10.0)
    assert sight.still_seconds((0, 5, 1, 0), now=13.0) == 3.0
    assert sight.still_seconds((0, 5, 2, 0), now=14.0) == 0.0
