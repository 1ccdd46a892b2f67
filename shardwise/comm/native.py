"""Groups whose own collectives carry the data (NCCL, and whatever else torch has).

A collective there is paired with whatever its peers issue at its place in the stream, so a difference between paths
cannot stop the data. It is found on the host instead: before an optimizer uses a step, ranks meet through the store
and compare their digests. Hosts need not wait for their devices for that.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise import policies
from shardwise.comm.wire import UNNAMED, Foreign, Waiting, WatchedWire
from shardwise.torch_internals import store_of

_COUNT = 1 << 48
_DIGEST = (1 << 32) - 1
_SLICE = timedelta(seconds=0.2)


class _Agreement:
    code = UNNAMED


class NativeWire(WatchedWire):
    """A group whose own collectives carry the data."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._store = store_of(group, "shardwise agreement")
        self._checks_all = policies.trust().checks == "collective"
        self._met: deque[str] = deque(maxlen=3)
        self._is_aborted = False
        self._probe = _Probe() if device.type == "cuda" else None

    def note(self, code: int) -> int:
        if self.verdict is not None:
            self.heed_verdict()
        digest = self.path.note(code)
        if self._checks_all:
            self._meet(code)
        self.follow(code)
        return digest

    def follow(self, code: int) -> None:
        if self._probe is not None and not self.is_recorded:
            self._probe.follow(code)

    def agree(self, code: int) -> None:
        if self.verdict is not None:
            self.heed_verdict()
        self.path.note(code)
        self._meet(code)

    def _meet(self, code: int) -> None:
        """A sum in the store that comes out right only if all ranks bring the same digest to the same place."""
        path = self.path
        key = f"{path.epoch}/{path.num_events}"
        own = _COUNT + ((path.digest >> 16) & _DIGEST)
        self._forget_agreements(key)
        if self._store.add(key, own) == self.world * own:
            self._store.set(f"{key}/all", "1")
            return
        self.waiting = waiting = _Agreement()
        waiting.code = code
        try:
            while True:
                try:
                    self._store.wait([f"{key}/all"], _SLICE)
                    return
                except RuntimeError:
                    # Not yet; or the store has gone, which the watch finds out.
                    self.heed_verdict()
                    time.sleep(0.001)
        finally:
            self.waiting = None

    def _forget_agreements(self, key: str) -> None:
        """Takes agreements that all ranks have passed out of the store."""
        self._met.append(key)
        if self.rank == 0 and len(self._met) > 2:
            # All ranks were at the last one, so all have left the one before it.
            passed = self._met.popleft()
            self._store.delete_key(passed)
            self._store.delete_key(f"{passed}/all")

    def stuck_on(self) -> Waiting | None:
        return self.waiting or (self._probe.unreached() if self._probe is not None else None)

    def let_out(self, waiting: Waiting, seconds_since_verdict: float) -> None:
        # A rank that waits for others to agree looks for the verdict itself.
        looks_itself = isinstance(waiting, Foreign) and waiting.looks_itself
        if not looks_itself and not isinstance(waiting, _Agreement):
            self._abort()

    def let_out_alone(self, waiting: Waiting) -> None:
        self.let_out(waiting, 0.0)

    def serve_peers(self) -> None:
        if self._probe is not None and self._probe.unreached() is not None:
            self._abort()

    def _abort(self) -> None:
        """A collective that a device is stuck in ends with its group; torch would end the process for it, later."""
        group = self.group()
        if group is not None and not self._is_aborted:
            self._is_aborted = True
            group.abort()


class _Probe:
    """Follows the collectives on a device: an event behind one of them, and behind the next once it was reached."""

    def __init__(self) -> None:
        self.code = UNNAMED
        self._event = torch.cuda.Event()
        self._is_set = False

    def follow(self, code: int) -> None:
        # Behind the collectives issued before this one on the same stream: one that is not reached is stuck in those.
        if not self._is_set or self._event.query():
            self.code = code
            self._event.record()
            self._is_set = True

    def unreached(self) -> Any:
        return self if self._is_set and not self._event.query() else None
