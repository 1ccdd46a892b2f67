"""The page of ``shardwise watch`` in a real browser; skipped where there is no Chromium."""

from __future__ import annotations

import shutil
import subprocess
import threading

import pytest

from shardwise.train.watch import WatchServer
from tests.unit.test_runs import make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install the package chromium")
def test_a_browser_shows_every_run_with_its_curve(tmp_path):
    make_run(
        tmp_path / "runs" / "first",
        losses=[3.0 - number / 50 for number in range(100)],
        steps=200,
        ended=None,
    )
    make_run(tmp_path / "runs" / "second")
    (tmp_path / "runs" / "second" / "logs").mkdir()
    (tmp_path / "runs" / "second" / "logs" / "rank-1.log").write_text("<b>ValueError</b>: of rank 1")
    server = WatchServer([tmp_path / "runs"])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        done = subprocess.run(
            [
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom"),
                f"http://localhost:{server.port}/",
            ],
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    page = done.stdout
    assert 'data-ready="yes"' in page
    assert "broken off" in page
    assert "100 / 200" in page
    assert "finished" in page
    # One line per run in each of the four plots, with all of its points.
    assert page.count("<polyline") == 8
    assert 'data-points="100"' in page
    # What logs contain is text, never markup.
    assert "&lt;b&gt;ValueError&lt;/b&gt;: of rank 1" in page
