"""Groups whose own collectives carry the data: NCCL, and any other backend of torch.

There a collective is paired with whatever its peers issue at the same place in the stream, so diverging logs cannot
hold back the data. They are noticed on the host instead: before an optimizer uses a step, ranks meet in the store and
compare digests. The host need not wait for the device for that.
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
from shardwise.comm.channels.channel import UNNAMED
from shardwise.comm.channels.watched import BackendWait, Waiting, WatchedChannel
from shardwise.torch_internals import store_of

_COUNT = 1 << 48
_DIGEST = (1 << 32) - 1
_SLICE = timedelta(seconds=0.2)
# How long collectives of an abandoned step may take to end by themselves.
_DRAIN_SECONDS = 1.0


class _AgreementWait:
    code = UNNAMED


class BackendChannel(WatchedChannel):
    """A group whose own collectives carry the data."""

    # NCCL's own watchdog would kill the process, and say less.
    margin_seconds = 15.0

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._store = store_of(group, "shardwise agreement")
        self._wait_for_key = _wait_of(self._store)
        self._checks_all = policies.trust().checks == "collective"
        self._agreements: deque[str] = deque(maxlen=3)
        self._is_aborted = False
        self._on_device = _DeviceWait(self)
        # An event of the channel's own, for collectives that no side stream records one behind.
        self._own_event = torch.cuda.Event() if device.type == "cuda" else None
        # What the device still had to reach when this rank abandoned a step; None once it has.
        self._abandoned: Any = None

    def record(self, code: int) -> int:
        if self._epoch_failure is not None:
            self.raise_failure()
        digest = self.log.record(code)
        if self._checks_all:
            self._meet_in_store(code)
        return digest

    def after_backend_collective(self) -> None:
        if self._own_event is not None and not self.is_capturing:
            self._own_event.record()
            self.last_event = self._own_event

    def agree(self, code: int) -> None:
        if self.failure is not None:
            self.raise_failure()
        self.log.record(code)
        self._meet_in_store(code)

    def _meet_in_store(self, code: int) -> None:
        """Adds to a sum in the store that comes out right only if all ranks add the same digest at the same event."""
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
                    # Not yet; or the store is gone, which the watchdog finds out.
                    self.raise_failure()
                    time.sleep(0.001)
        finally:
            self.waiting = None

    def _forget_agreements(self, key: str) -> None:
        """Removes agreements that all ranks have passed from the store."""
        self._agreements.append(key)
        if self.rank == 0 and len(self._agreements) > 2:
            # All ranks reached the last agreement, so all have left the one before it.
            passed = self._agreements.popleft()
            self._store.delete_key(passed)
            self._store.delete_key(f"{passed}/all")

    def current_wait(self) -> Waiting | None:
        return self.waiting or (None if self._has_reached(self.last_event) else self._on_device)

    def _has_reached(self, event: Any) -> bool:
        # An event that is being captured in a graph cannot be queried.
        return event is None or self._own_event is None or self.is_capturing or event.query()

    def release_wait(self, waiting: Waiting, seconds_since_failure: float) -> None:
        # A wait for agreement polls for the failure itself.
        polls_failure = isinstance(waiting, BackendWait) and waiting.polls_failure
        if not polls_failure and not isinstance(waiting, _AgreementWait):
            self._abort()

    def release_wait_without_store(self, waiting: Waiting) -> None:
        self.release_wait(waiting, 0.0)

    def help_peers(self) -> None:
        # Only the abandoned step is aborted; collectives of the new log go on.
        if self._has_reached(self._abandoned):
            self._abandoned = None
        elif time.monotonic() > self.restarted_at + _DRAIN_SECONDS:
            self._abort()

    def _restart_log(self) -> None:
        event, self.last_event = self.last_event, None
        if not self._has_reached(event):
            # Side streams reuse their events: collectives of the new log would be mistaken for the abandoned ones.
            aside = torch.cuda.Stream(self.device)
            aside.wait_event(event)
            self._abandoned = aside.record_event()
        super()._restart_log()

    def _abort(self) -> None:
        """Aborts the group, which ends a collective that the device is stuck in; torch would kill the process later."""
        group = self.group_if_alive()
        if group is not None and not self._is_aborted:
            self._is_aborted = True
            group.abort()


class _DeviceWait:
    """The wait of a rank whose device is stuck in a collective; its host may be waiting for the device."""

    def __init__(self, channel: BackendChannel) -> None:
        self._channel = weakref.ref(channel)

    @property
    def code(self) -> int:
        channel = self._channel()
        events = () if channel is None else tuple(channel.log.events)
        return events[-1][1] if events else UNNAMED


def _wait_of(store: Any) -> Callable[[str, timedelta], None]:
    """Returns how to wait for a key of a store; the wait raises ``RuntimeError`` on timeout.

    torch polls a store in a file every 10 ms, though a look takes microseconds; here it is polled more often.
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
            raise RuntimeError(f"{key} did not appear in the store within {timeout}")
        time.sleep(nap_seconds)
        # The longer it has taken, the less one more pause matters.
        nap_seconds = min(1.5 * nap_seconds, 0.005)
