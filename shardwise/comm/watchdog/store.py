"""A board: where ranks of one group leave each other notes, beside their collectives.

It is the group's own store (a TCP server, a file or a table in memory), so it works when collectives do not. Nothing
here waits: a note is there or it is not. While all is well, ranks leave a sign of life every few seconds, and nobody
reads.

    home        host and process of each rank, once
    status      a sign of life, and what a rank that has not moved for a while is doing
    verdict     how an epoch ended; the first one counts, and all ranks raise it
    taken       a rank has raised it
    release     a rank asks to be let out of a collective that will never complete
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
# When a process began, among the fields of its stat that follow its state.
START_TIME_FIELD = 18


def _process_table() -> str:
    """Which table of processes this one is in: machines may share a name, and containers a machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except (FileNotFoundError, PermissionError):
        # There is no /proc to look at: no other process is in this one's table.
        return str(uuid.uuid4())


def _start_time() -> str | None:
    """When this process began, as /proc tells it: another one with its number did so later."""
    try:
        return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:][START_TIME_FIELD]
    except (FileNotFoundError, PermissionError):
        return None


class WatchdogStore:
    """The notes of one group."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self.processes = _process_table()
        self._homes: dict[int, Entry] = {}
        home = {
            "host": socket.gethostname(),
            "processes": self.processes,
            "pid": os.getpid(),
            "began": _start_time(),
        }
        self._write(f"home/{rank}", home)

    def _write(self, key: str, note: Entry) -> None:
        self._store.set(key, json.dumps(note))

    def _read(self, key: str) -> Entry | None:
        if not self._store.check([key]):
            return None
        note: Entry = json.loads(self._store.get(key))
        return note

    def home(self, rank: int) -> Entry | None:
        if rank not in self._homes:
            home = self._read(f"home/{rank}")
            if home is None:
                return None
            self._homes[rank] = home
        return self._homes[rank]

    def post_status(self, note: Entry) -> None:
        self._write(f"status/{self._rank}", note)

    def statuses(self) -> dict[int, Entry]:
        """What ranks last said of themselves."""
        read = {rank: self._read(f"status/{rank}") for rank in range(self._world)}
        return {rank: note for rank, note in read.items() if note is not None}

    def end_epoch(self, epoch: int, failure: Entry, void: Entry | None = None) -> None:
        """Says how an epoch ended, unless somebody has said so already; ``void`` is what counts for nothing by now."""
        known = "" if void is None else json.dumps(void)
        self._store.compare_set(f"verdict/{epoch}", known, json.dumps(failure))

    def take(self, epoch: int) -> None:
        """Says that a rank has left the epoch for its verdict."""
        self._store.set(f"taken/{epoch}", "1")

    def is_taken(self, epoch: int) -> bool:
        return bool(self._store.check([f"taken/{epoch}"]))

    def failure(self, epoch: int) -> Entry | None:
        return self._read(f"verdict/{epoch}")

    def ask_for_release(self, note: Entry) -> None:
        self._write(f"release/{self._rank}", note)

    def releases(self) -> dict[int, Entry]:
        read = {rank: self._read(f"release/{rank}") for rank in range(self._world) if rank != self._rank}
        return {rank: note for rank, note in read.items() if note is not None}
