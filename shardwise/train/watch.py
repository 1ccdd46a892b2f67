"""``shardwise watch``: a page on this machine that shows runs as they train, with the standard library alone.

    GET /                 the page, one file without anything from elsewhere
    GET /runs             every run: its state, step and figures, and what its ranks are doing
    GET /metrics?run=PATH&from=N    the lines of metrics.jsonl after byte N, and where to go on
    GET /log?run=PATH     the end of the run's log, and of those of ranks that failed

The server binds to loopback and answers only requests that name this machine as their host, so that no page of another
site can read a run through the browser. It only reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shardwise.checkpoint.disk import open_file
from shardwise.errors import ConfigError
from shardwise.train.rank_states import read_rank_states
from shardwise.train.records import LOG, METRICS, json_line
from shardwise.train.run_folder import LOGS
from shardwise.train.runs import read_run, runs_in

__all__ = ["WatchServer", "run_facts", "watch"]

_BLOCK_BYTES = 4 << 20
_LOG_BYTES = 16 << 10
_NAMES = ("localhost", "127.0.0.1")


def watch(folders: list[Path], port: int) -> int:
    """Serves the page until Ctrl-C, and returns the exit status."""
    server = WatchServer(folders, port)
    print(
        f"watching {', '.join(map(str, folders))} at http://localhost:{server.port}  (Ctrl-C ends)",
        flush=True,
    )
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()
    return 0


class WatchServer(ThreadingHTTPServer):
    """Serves the page of the runs in these folders, on loopback.

    Raises:
        ConfigError: a folder does not exist, or the port is taken.
    """

    daemon_threads = True

    def __init__(self, folders: list[Path], port: int = 0) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(
                    f"there is no folder '{folder}'",
                    where="shardwise watch",
                    fix="pass a run, or a folder of runs; 'shardwise train' makes them in runs/",
                )
        self._folders = folders
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"port {port} cannot be used: {getattr(error, 'strerror', None) or error}",
                where=f"--port {port}",
                fix="pass another, or --port 0",
            ) from None

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A reader that has gone away is no error: browsers do that with every page that is closed.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def runs(self) -> list[Path]:
        return runs_in(self._folders)


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer

    def do_GET(self) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in _NAMES:
            self.send_error(HTTPStatus.FORBIDDEN, "this page is for this machine only")
            return
        address = urlsplit(self.path)
        if address.path == "/":
            page = resources.files("shardwise.train").joinpath("watch.html").read_bytes()
            self._send(page, "text/html; charset=utf-8")
            return
        answers: dict[str, Callable[[dict[str, list[str]]], Any]] = {
            "/runs": lambda _: [run_facts(path) for path in self.server.runs()],
            "/metrics": lambda query: read_lines(
                self._run(query) / METRICS, int(query.get("from", ["0"])[0])
            ),
            "/log": lambda query: _logs(self._run(query)),
        }
        try:
            answer = answers[address.path](parse_qs(address.query))
        except (KeyError, ValueError, IndexError, OSError, ConfigError):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self._send(json_line(answer).encode(), "application/json")

    def _run(self, query: dict[str, list[str]]) -> Path:
        wanted = query["run"][0]
        # Only runs that are shown can be asked for, so no path from outside is ever opened.
        return {str(path): path for path in self.server.runs()}[wanted]

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header(
            "Content-Security-Policy",
            "default-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'",
        )
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


def run_facts(path: Path) -> dict[str, Any]:
    """Returns what the page shows of a run besides its curves."""
    run = read_run(path)
    facts = run.as_json()
    del facts["config"]
    facts["holder"] = run.holder
    facts["ranks"] = read_rank_states(path)
    return facts


def read_lines(path: Path, start: int) -> dict[str, Any]:
    """Returns the whole lines of a file after byte ``start``, and the byte after them.

    A file that has become shorter was written anew, by a run that went back: it is read from the beginning.
    """
    try:
        with open_file(path, follow_links=False) as file:
            size = os.fstat(file.fileno()).st_size
            start = start if 0 <= start <= size else 0
            file.seek(start)
            block = file.read(_BLOCK_BYTES)
    except FileNotFoundError:
        return {"start": 0, "next": 0, "records": []}
    end = block.rfind(b"\n") + 1
    records = []
    for line in block[:end].splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return {"start": start, "next": start + end, "records": records}


def _logs(folder: Path) -> dict[str, str]:
    logs = {}
    for path in (folder / LOG, *sorted((folder / LOGS).glob("rank-*.log"))):
        with contextlib.suppress(OSError), open_file(path, follow_links=False) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _LOG_BYTES))
            logs[path.name] = file.read(_LOG_BYTES).decode(errors="replace")
    return logs
