"""Groups whose own collectives carry the data (NCCL, and whatever else torch has).

A collective there is paired with whatever its peers issue at its place in the stream, so a difference between paths
cannot stop the data. It is found on the host instead: before an optimizer uses a step, ranks meet through the store
and compare their digests. Hosts need not wait for their devices for that.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardwise import policies
from shardwise.comm.channels.channel import UNNAMED, BackendWait, Waiting, WatchedChannel
from shardwise.torch_internals import store_of

_COUNT = 1 << 48
_DIGEST = (1 << 32) - 1
_SLICE = timedelta(seconds=0.2)
# How long collectives of a path that was left may take to end by themselves.
_LANDING_SECONDS = 1.0


class _AgreementWait:
    code = UNNAMED


class BackendChannel(WatchedChannel):
    """A group whose own collectives carry the data."""

    # NCCL's own watchdog ends the process, and says less.
    margin_seconds = 15.0

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._store = store_of(group, "shardwise agreement")
        self._wait_for_key = _wait_of(self._store)
        self._checks_all = policies.trust().checks == "collective"
        self._met: deque[str] = deque(maxlen=3)
        self._is_aborted = False
        self._on_device = _DeviceWait(self)
        # A mark of the wire's own, for collectives that are followed by no other.
        self._followed = torch.cuda.Event() if device.type == "cuda" else None
        # What the device had to reach when this rank left a path, until it has.
        self._left_behind: Any = None

    def record(self, code: int) -> int:
        if self._epoch_failure is not None:
            self.raise_failure()
        digest = self.log.record(code)
        if self._checks_all:
            self._meet(code)
        return digest

    def after_backend_collective(self) -> None:
        if self._followed is not None and not self.is_capturing:
            self._followed.record()
            self.last_event = self._followed

    def agree(self, code: int) -> None:
        if self.failure is not None:
            self.raise_failure()
        self.log.record(code)
        self._meet(code)

    def _meet(self, code: int) -> None:
        """A sum in the store that comes out right only if all ranks bring the same digest to the same place."""
        log = self.log
        key = f"{log.epoch}/{log.num_events}"
        own = _COUNT + ((log.digest >> 16) & _DIGEST)
        if is_last := self._store.add(key, own) == self.world * own:
            self._store.set(f"{key}/all", "1")
        self._forget_agreements(key)
        if is_last:
            return
        self.waiting = waiting = _AgreementWait()
        waiting.code = code
        try:
            while True:
                try:
                    self._wait_for_key(f"{key}/all", _SLICE)
                    return
                except RuntimeError:
                    # Not yet; or the store has gone, which the watch finds out.
                    self.raise_failure()
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

    def current_wait(self) -> Waiting | None:
        return self.waiting or (None if self._is_reached(self.last_event) else self._on_device)

    def _is_reached(self, event: Any) -> bool:
        # An event that is being recorded in a graph cannot be asked for.
        return event is None or self._followed is None or self.is_capturing or event.query()

    def release_wait(self, waiting: Waiting, seconds_since_failure: float) -> None:
        # A rank that waits for others to agree looks for the verdict itself.
        polls_failure = isinstance(waiting, BackendWait) and waiting.polls_failure
        if not polls_failure and not isinstance(waiting, _AgreementWait):
            self._abort()

    def release_wait_without_store(self, waiting: Waiting) -> None:
        self.release_wait(waiting, 0.0)

    def help_peers(self) -> None:
        # What belongs to the new path is none of it: that goes on.
        if self._is_reached(self._left_behind):
            self._left_behind = None
        elif time.monotonic() > self.restarted_at + _LANDING_SECONDS:
            self._abort()

    def _restart_log(self) -> None:
        event, self.last_event = self.last_event, None
        if not self._is_reached(event):
            # Lanes use their marks again: what the new path does would be taken for the old one's.
            aside = torch.cuda.Stream(self.device)
            aside.wait_event(event)
            self._left_behind = aside.record_event()
        super()._restart_log()

    def _abort(self) -> None:
        """A collective that a device is stuck in ends with its group; torch would end the process for it, later."""
        group = self.group()
        if group is not None and not self._is_aborted:
            self._is_aborted = True
            group.abort()


class _DeviceWait:
    """The wait of a rank whose device does not get past a collective; its host may be waiting for that, too."""

    def __init__(self, channel: BackendChannel) -> None:
        self._channel = weakref.ref(channel)

    @property
    def code(self) -> int:
        channel = self._channel()
        events = () if channel is None else tuple(channel.log.events)
        return events[-1][1] if events else UNNAMED


def _wait_of(store: Any) -> Callable[[str, timedelta], None]:
    """How to wait for a key of a store; it raises ``RuntimeError`` when the time is up.

    A store in a file is looked into by torch once in 10 ms, though a look takes microseconds: there, more often.
    """
    kept = store
    while isinstance(kept, dist.PrefixStore):  # type: ignore[attr-defined]
        kept = kept.underlying_store
    if isinstance(kept, dist.FileStore):  # type: ignore[attr-defined]
        return partial(_look_for_key, store)
    return lambda key, timeout: store.wait([key], timeout)


def _look_for_key(store: Any, key: str, timeout: timedelta) -> None:
    until = time.monotonic() + timeout.total_seconds()
    nap_seconds = 20e-6
    while not store.check([key]):
        if time.monotonic() > until:
            raise RuntimeError(f"{key} did not come into the store in {timeout}")
        time.sleep(nap_seconds)
        # The longer it has taken, the longer one look more may take.
        nap_seconds = min(1.5 * nap_seconds, 0.005)
