"""A real browser for tests of pages: Chromium, told what to do over a pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_CHROMIUM = "no Chromium here: install the package chromium"


class Browser:
    """One Chromium with one page; its commands are those of the DevTools protocol."""

    def __init__(self, profile: Path, *, width: int = 1280, height: int = 900, scale: float = 1.0) -> None:
        assert CHROMIUM is not None
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()

        # Chromium reads its commands from file 3 and answers to file 4.
        def place_pipes() -> None:
            high = [os.dup2(theirs_in, 100), os.dup2(theirs_out, 101)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *(
                    f"--user-data-dir={profile}",
                    "--remote-debugging-pipe",
                    "--hide-scrollbars",
                    "about:blank",
                ),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place_pipes,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number = 0
        self._session: str | None = None
        self._left = b""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Runtime.enable")
        self.call("Log.enable")
        self.call("Page.enable")
        self.resize(width, height, scale)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)
        os.close(self._from)
        self._process.kill()
        self._process.wait()

    def call(self, method: str, **params: Any) -> Any:
        """Sends a command and returns its answer; what the page complains about meanwhile is kept in ``problems``."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                details = answer["params"]["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))
            elif answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.problems.append(answer["params"]["entry"]["text"])

    def _read(self) -> Any:
        while b"\0" not in self._left:
            assert select.select([self._from], [], [], 120)[0], "Chromium does not answer"
            more = os.read(self._from, 1 << 20)
            assert more, "Chromium has ended"
            self._left += more
        message, self._left = self._left.split(b"\0", 1)
        return json.loads(message)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def prefer(self, theme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def open(self, page: Path) -> None:
        self.call("Page.navigate", url=page.as_uri())
        self.wait_for("document.documentElement?.dataset.ready === 'yes'")

    def value(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + 120
        while not self.value(expression):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.problems}"
            time.sleep(0.02)

    def next_frame(self) -> None:
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, key: str) -> None:
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, file: Path, *, full: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        file.write_bytes(base64.b64decode(shot["data"]))
