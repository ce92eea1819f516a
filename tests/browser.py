"""A headless Chromium for tests, spoken to through two pipes: no driver, no port, nothing to install beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page. ``with Browser(folder) as browser: browser.open(path); browser.run("document.title")``."""

    def __init__(self, folder: Path, *, width: int = 1200, height: int = 900) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--no-first-run"]
        command = [CHROMIUM, *arguments, f"--window-size={width},{height}", "--remote-debugging-pipe", "about:blank"]
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "-", *command]  # it wants these numbers
        self._process = subprocess.Popen(
            shell, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._left, self._number, self._session = b"", 0, None
        self.requests: list[str] = []
        """URLs that the page asked for."""
        self.complaints: list[str] = []
        """Errors of scripts, and what the page's policy refused."""

    def __enter__(self) -> Browser:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.as_uri())
        self._until(lambda message: message.get("method") == "Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def hover(self, selector: str) -> None:
        box = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            f" return [r.x + r.width / 2, r.y + r.height / 2] }})(document.querySelector({json.dumps(selector)}))"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda message: message.get("id") == number)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def _until(self, wanted: Any) -> dict[str, Any]:
        while True:
            while b"\0" not in self._left:
                more = os.read(self._in, 1 << 20)
                assert more, "Chromium has ended"
                self._left += more
            text, _, self._left = self._left.partition(b"\0")
            message: dict[str, Any] = json.loads(text)
            method, found = message.get("method"), message.get("params", {})
            if method == "Network.requestWillBeSent":
                self.requests.append(found["request"]["url"])
            elif method == "Runtime.exceptionThrown":
                self.complaints.append(found["exceptionDetails"]["text"])
            elif method == "Log.entryAdded":
                self.complaints.append(found["entry"]["text"])
            if wanted(message):
                return message
