"""Finds or creates a run's folder, and locks it while the run is active.

    FOLDER/.lock    a file that one run at a time holds a lock on; its text names the run's process and host

The kernel drops the lock with the last process of the run, however it ends, so no stale lock can be left. On a network
file system, the lock holds between hosts if that file system's flock does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import socket
import time
from pathlib import Path

from shardwise.checkpoint.disk import open_file
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.weights import TOKENIZER
from shardwise.errors import ConfigError
from shardwise.train.rank_states import RANKS
from shardwise.train.records import (
    CONFIG,
    CONFIG_FILE,
    CURVE,
    LOG,
    LOGGED_RUNS,
    METRICS,
    SUMMARY,
    TENSORBOARD,
)
from shardwise.train.run_files import refuse_links

__all__ = [
    "CHECKPOINTS",
    "LOCK",
    "LOGS",
    "PROFILE",
    "FolderLock",
    "is_locked",
    "lock_holder",
    "new_folder",
    "newest_folder",
    "refuse_checkpoints_in",
    "refuse_links_in",
]

CHECKPOINTS = "checkpoints"
LOGS = "logs"
PROFILE = "profile"
LOCK = ".lock"
_ENDING_SECONDS = 30.0
# On file systems that cannot lock, a run continues without a lock.
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def new_folder(wanted: str, name: str) -> Path:
    """Creates the folder of a new run and returns its path; one process calls this for all ranks.

    Raises:
        ConfigError: the folder holds a run with checkpoints, which stays untouched; or it cannot be made or written to.
    """
    try:
        folder = (
            _create_folder(Path(wanted).expanduser())
            if wanted
            else _create_numbered_folder(Path("runs"), name)
        )
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        place = Path(wanted).expanduser() if wanted else Path("runs") / name
        raise ConfigError(
            f"cannot create a run in '{place}': {error.strerror}",
            where="output.folder" if wanted else "the current folder",
            fix="choose a folder that can be written to: --set output.folder=FOLDER",
        ) from None
    return folder.resolve()


def _create_folder(folder: Path) -> Path:
    refuse_checkpoints_in(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def refuse_checkpoints_in(folder: Path) -> None:
    if Store(folder / CHECKPOINTS).checkpoints():
        raise ConfigError(
            f"{folder} already holds a run with checkpoints",
            where="output.folder",
            fix=f"continue it with --resume {folder}, or choose another folder",
        )


def _create_numbered_folder(parent: Path, name: str) -> Path:
    """Creates the first free one of ``NAME``, ``NAME-2``, ...; runs that start at the same time get different ones."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("numbers do not end")


def newest_folder(name: str) -> Path:
    """Returns the folder of the run of this name under ``runs/`` that saved last."""
    candidates = [
        (latest.stat().st_mtime, latest.parent.parent)
        for latest in Path("runs").glob(f"*/{CHECKPOINTS}/latest")
        if re.fullmatch(rf"{re.escape(name)}(-\d+)?", latest.parent.parent.name)
    ]
    if not candidates:
        raise ConfigError(
            f"there is no run of '{name}' under runs/ to continue",
            where="--resume",
            fix="name its folder: --resume FOLDER",
        )
    return max(candidates)[1].resolve()


def refuse_links_in(folder: Path) -> None:
    """Raises ConfigError if a file or folder that a run writes to is a link."""
    files = (
        CONFIG,
        CONFIG_FILE,
        METRICS,
        SUMMARY,
        CURVE,
        LOG,
        TENSORBOARD,
        TOKENIZER,
        LOGGED_RUNS,
        "wandb",
        "mlruns",
    )
    refuse_links(folder / name for name in (*files, CHECKPOINTS, LOGS, PROFILE, RANKS, LOCK))
    for inner in (folder / CHECKPOINTS, folder / LOGS, folder / PROFILE):
        refuse_links(sorted(inner.iterdir()) if inner.is_dir() else ())


class FolderLock:
    """Locks a folder until ``release``, or until this process and all that it forked meanwhile have ended.

    Raises:
        ConfigError: another run holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._descriptor = self._acquire()
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.write(
                self._descriptor,
                f"process {os.getpid()} on {socket.gethostname()}, since {_now()}\n".encode(),
            )

    def release(self, *, remove: bool = False) -> None:
        """Releases the lock; ``remove`` deletes its file first."""
        if remove:
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(self._descriptor)

    def _acquire(self) -> int:
        deadline = time.monotonic() + _ENDING_SECONDS
        while True:
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The previous holder may have removed the file that is locked here.
                if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    return descriptor
            except FileNotFoundError:
                pass
            except BlockingIOError:
                holder = _read_lock(descriptor)
                if _holder_has_ended(holder) and time.monotonic() < deadline:
                    # The launcher of that run was killed, and the kernel is still ending its ranks.
                    os.close(descriptor)
                    time.sleep(0.05)
                    continue
                os.close(descriptor)
                raise ConfigError(
                    f"another run is active in {self._path.parent}" + (f": {holder}" if holder else ""),
                    where=str(self._path),
                    fix="wait for it or stop it, or choose another folder",
                ) from None
            except OSError as error:
                if error.errno not in _CANNOT_LOCK:
                    os.close(descriptor)
                    raise
                return descriptor
            os.close(descriptor)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self._path, flags, 0o666)
        except OSError as error:
            reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise ConfigError(
                f"{self._path} cannot be opened: {reason}",
                where="the run's folder",
                fix="make the folder writable, and remove the file if it is not a regular file",
            ) from None


def lock_holder(folder: Path) -> str:
    """Returns what the run that holds a folder wrote into its lock file; empty if there is none."""
    with contextlib.suppress(OSError), open_file(folder / LOCK, follow_links=False) as file:
        return _read_lock(file.fileno())
    return ""


def is_locked(folder: Path) -> bool:
    """Returns whether a run is active in a folder; the folder is not changed."""
    with contextlib.suppress(FileNotFoundError), open_file(folder / LOCK, follow_links=False) as file:
        try:
            # Shared: several readers may ask at once. Dropped with the file.
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


def _read_lock(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.pread(descriptor, 200, 0).decode(errors="replace").strip()
    return ""


def _holder_has_ended(holder: str) -> bool:
    """Returns whether the launcher that wrote this text ran on this host, and is gone."""
    match = re.match(r"process (\d+) on (.*), since", holder)
    return match is not None and match[2] == socket.gethostname() and not Path(f"/proc/{match[1]}").exists()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
