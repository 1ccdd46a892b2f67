"""The page of ``shardwise watch`` in a real browser; skipped where there is no Chromium."""

from __future__ import annotations

import threading

import pytest

from shardwise.train.rank_states import RankState
from shardwise.train.run_folder import FolderLock
from shardwise.train.watch import WatchServer
from tests.browser import CHROMIUM, NO_CHROMIUM, Browser
from tests.unit.test_runs import make_run


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_a_browser_shows_runs_curves_ranks_and_logs_as_they_grow(tmp_path):
    first = make_run(
        tmp_path / "runs" / "first",
        losses=[3.0 - number / 50 for number in range(100)] + [float("nan")],
        steps=200,
        ended=None,
    )
    lock, states = FolderLock(first), [RankState(first, rank) for rank in range(2)]
    for state in states:
        state.now("in step 102", 3 << 20)
    second = make_run(tmp_path / "runs" / "second")
    (second / "logs").mkdir()
    (second / "logs" / "rank-1.log").write_text("<b>ValueError</b>: of rank 1")
    server = WatchServer([tmp_path / "runs"])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with Browser(tmp_path / "profile") as browser:
            browser.call("Page.navigate", url=f"http://localhost:{server.port}/")
            browser.wait_for("document.body?.dataset.ready === 'yes'")
            text = browser.value("document.body.innerText")
            assert "running" in text
            assert "101 / 200" in text
            assert "finished" in text
            assert text.count("in step 102") == 2
            # One line per run in each of the four plots; a loss that is no number is not drawn.
            assert browser.value("document.querySelectorAll('polyline').length") == 8
            assert browser.value("document.querySelector('#loss polyline').dataset.points") == "100"
            # What logs contain is text, never markup.
            assert "<b>ValueError</b>: of rank 1" in text

            states[1].now("saving step 102")
            browser.wait_for("document.body.innerText.includes('saving step 102')")
            lock.release()
            browser.wait_for("document.body.innerText.includes('ended while saving step 102')")
            assert browser.problems == []
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
