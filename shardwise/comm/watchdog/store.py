"""What the ranks of a group post for each other's watchdogs, in the group's own store.

The store (a TCP server, a file, or a table in memory) works while collectives do not. Nothing here waits: an entry is
there or it is not. While all is well, ranks post a heartbeat every few seconds and nobody reads it.

    home        host and process of each rank, posted once
    status      a heartbeat, and what a rank that has made no progress for a while is doing
    verdict     the failure that ended an epoch; the first one counts, and all ranks raise it
    taken       a rank has raised that failure
    release     a rank asks for help out of a collective that will never complete
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
# Index of a process's start time among the fields of /proc/PID/stat that follow its state.
START_TIME_FIELD = 18


def _process_namespace() -> str:
    """Identifies this process's PID namespace: host names are not unique, and containers share a host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except (FileNotFoundError, PermissionError):
        # Without /proc, no other process is visible.
        return str(uuid.uuid4())


def _start_time() -> str | None:
    """Returns when this process started, which tells it from a later process with the same PID."""
    try:
        return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:][START_TIME_FIELD]
    except (FileNotFoundError, PermissionError):
        return None


class WatchdogStore:
    """The entries of one group."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self.namespace = _process_namespace()
        self._homes: dict[int, Entry] = {}
        home = {
            "host": socket.gethostname(),
            "processes": self.namespace,
            "pid": os.getpid(),
            "began": _start_time(),
        }
        self._write(f"home/{rank}", home)

    def _write(self, key: str, entry: Entry) -> None:
        self._store.set(key, json.dumps(entry))

    def _read(self, key: str) -> Entry | None:
        if not self._store.check([key]):
            return None
        entry: Entry = json.loads(self._store.get(key))
        return entry

    def home(self, rank: int) -> Entry | None:
        if rank not in self._homes:
            home = self._read(f"home/{rank}")
            if home is None:
                return None
            self._homes[rank] = home
        return self._homes[rank]

    def post_status(self, entry: Entry) -> None:
        self._write(f"status/{self._rank}", entry)

    def statuses(self) -> dict[int, Entry]:
        """Returns the last status of each rank that has posted one."""
        read = {rank: self._read(f"status/{rank}") for rank in range(self._world)}
        return {rank: entry for rank, entry in read.items() if entry is not None}

    def end_epoch(self, epoch: int, failure: Entry, void: Entry | None = None) -> None:
        """Posts the failure that ended an epoch, unless there is one already; ``void`` is one that no longer counts."""
        known = "" if void is None else json.dumps(void)
        self._store.compare_set(f"verdict/{epoch}", known, json.dumps(failure))

    def mark_raised(self, epoch: int) -> None:
        """Records that a rank has raised the epoch's failure."""
        self._store.set(f"taken/{epoch}", "1")

    def is_raised(self, epoch: int) -> bool:
        return bool(self._store.check([f"taken/{epoch}"]))

    def failure(self, epoch: int) -> Entry | None:
        return self._read(f"verdict/{epoch}")

    def ask_for_release(self, entry: Entry) -> None:
        self._write(f"release/{self._rank}", entry)

    def releases(self) -> dict[int, Entry]:
        read = {rank: self._read(f"release/{rank}") for rank in range(self._world) if rank != self._rank}
        return {rank: entry for rank, entry in read.items() if entry is not None}
