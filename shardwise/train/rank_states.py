"""What each rank is doing, for ``shardwise watch`` and ``shardwise runs``: one small file per rank, written over.

    FOLDER/ranks/rank-1.json    {"rank": 1, "doing": "in step 13", "since": 1763565125.2, "process": 4711, ...}

A rank that hangs or is killed cannot tell any more, so it tells what it begins. When a run ends well, nothing is left;
after a failure, the files say where each rank was.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import weakref
from pathlib import Path
from typing import Any

from shardwise.checkpoint.disk import read_file

__all__ = ["RANKS", "RankState", "clear_rank_states", "read_rank_states"]

RANKS = "ranks"
_LENGTH = 512


class RankState:
    """Tells what this rank is doing; where that cannot be written, nothing is told.

    Args:
        folder: the run's folder.
        rank: the rank of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank, self._path = rank, folder / RANKS / f"rank-{rank}.json"
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
            self._close = weakref.finalize(self, os.close, self._descriptor)

    def now(self, doing: str, memory_bytes: int | None = None) -> None:
        """Tells what this rank begins to do, and the most memory it has had."""
        if self._descriptor is None:
            return
        state = {
            "rank": self._rank,
            "doing": doing,
            "since": round(time.time(), 3),
            "memory_bytes": memory_bytes,
            "process": os.getpid(),
            "host": socket.gethostname(),
        }
        # Always as long, in one write: what was there before is covered, and a full disk has room for it.
        line = json.dumps(state).ljust(_LENGTH - 1)[: _LENGTH - 1] + "\n"
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, line.encode(), 0)

    def close(self, *, remove: bool = False) -> None:
        """Stops telling; ``remove`` deletes the file, and the folder after the last."""
        if self._descriptor is not None:
            self._descriptor = None
            self._close()
        if remove:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
                self._path.parent.rmdir()


def clear_rank_states(folder: Path) -> None:
    """Deletes what the ranks of an earlier part of the run have left."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder / RANKS)


def read_rank_states(folder: Path) -> list[dict[str, Any]]:
    """Returns what each rank of a run is doing, or was when it ended; ``is_gone``: its process has ended."""
    found = []
    for path in (folder / RANKS).glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            state = json.loads(read_file(path, _LENGTH, follow_links=False))
            if isinstance(state, dict) and isinstance(state.get("rank"), int) and "doing" in state:
                found.append({**state, "is_gone": _is_gone(state)})
    return sorted(found, key=lambda state: int(state["rank"]))


def _is_gone(state: dict[str, Any]) -> bool:
    is_here = state.get("host") == socket.gethostname()
    return is_here and not os.path.exists(f"/proc/{state.get('process')}")
