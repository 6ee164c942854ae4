"""A headless Chromium, driven through the DevTools protocol over a pipe."""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TIMEOUT = 60.0  # seconds for a reply or an event: a busy machine takes several for a large page
LONGEST = 10_000  # pixels of a screenshot: Chromium limits what it draws at once

Message = dict[str, Any]
"""JSON, whose fields depend on the method or the event; see https://chromedevtools.github.io/devtools-protocol."""


def find_chromium() -> str | None:
    """Return the path of Chromium, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """A Chromium with one page; a context manager.

    Args:
        program: path of Chromium.
    """

    def __init__(self, program: str) -> None:
        self._numbers = itertools.count(1)
        self._events: deque[Message] = deque()
        self._received = b""
        self._session: str | None = None
        self._script = ""  # see `replace`
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # Chromium reads commands from descriptor 3 and writes to 4; the ends of the pipes must have other numbers.
        ends = [_renumbered(end) for end in (*os.pipe(), *os.pipe())]
        commands, self._commands, self._replies, replies = ends
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += ["--no-first-run", f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{replies}', program, *options],
            pass_fds=(commands, replies),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(replies)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(TIMEOUT)
        except (EOFError, OSError, subprocess.TimeoutExpired, TimeoutError):
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._replies)
        self._profile.cleanup()

    def call(self, method: str, **parameters: object) -> Message:
        """Call a method of the protocol and return its result.

        Raises:
            RuntimeError: the method reports an error.
            TimeoutError: there is no reply within `TIMEOUT`.
            EOFError: Chromium has ended.
        """
        number = self._send(method, parameters)
        deadline = time.monotonic() + TIMEOUT
        while (reply := self._receive(deadline, method)).get("id") != number:
            self._events.append(reply)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        result: Message = reply["result"]
        return result

    def wait_for(self, event: str) -> Message:
        """Return the parameters of the next `event`, which may have arrived already.

        Raises:
            TimeoutError: it does not come within `TIMEOUT`.
        """
        deadline = time.monotonic() + TIMEOUT
        message = next((each for each in self._events if each.get("method") == event), None)
        if message is not None:
            self._events.remove(message)
        while message is None:
            received = self._receive(deadline, event)
            if received.get("method") == event:
                message = received
            else:
                self._events.append(received)
        parameters: Message = message["params"]
        return parameters

    def take_events(self, event: str) -> list[Message]:
        """Return the parameters of the events of a kind, and forget all events."""
        found = [each["params"] for each in self._events if each.get("method") == event]
        self._events.clear()
        return found

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, url: str) -> None:
        """Load a page and its resources."""
        self._events.clear()
        result = self.call("Page.navigate", url=url)
        if "errorText" in result:
            raise RuntimeError(f"{url}: {result['errorText']}")
        self.wait_for("Page.loadEventFired")

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page, as JSON; wait for a promise.

        Raises:
            RuntimeError: the expression raises an error.
        """
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", script))
        return result["result"].get("value")

    def wait_until(self, script: str, limit: float = 10.0) -> bool:
        """Wait until an expression in the page is true, at most `limit` seconds.

        Return whether it has become true.
        """
        deadline = f"performance.now() + {1000 * limit}"
        tick = "await new Promise((resolve) => setTimeout(resolve, 20))"
        loop = (
            f"(async () => {{ for (const end = {deadline}; performance.now() < end; {tick}) if ({script}) return true"
        )
        return bool(self.evaluate(f"{loop}; return false; }})()"))

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the page, below the window too."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], LONGEST), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def replace(self, url: str, script: bytes) -> None:
        """Answer requests for `url` with a script instead of asking its server.

        The URL is a pattern, with `*` for any characters.
        """
        self._script = base64.b64encode(script).decode()
        self.call("Fetch.enable", patterns=[{"urlPattern": url}])

    def _send(self, method: str, parameters: Message) -> int:
        number = next(self._numbers)
        message: Message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        return number

    def _receive(self, deadline: float, reason: str) -> Message:
        while b"\0" not in self._received:
            if not select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium did not answer within {TIMEOUT:g} s: {reason}")
            data = os.read(self._replies, 1 << 16)
            if not data:
                raise EOFError(f"Chromium ended: {reason}")
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        found: Message = json.loads(message)
        if found.get("method") == "Fetch.requestPaused":
            header = {"name": "Content-Type", "value": "text/javascript"}
            answer = {"requestId": found["params"]["requestId"], "responseCode": 200, "responseHeaders": [header]}
            self._send("Fetch.fulfillRequest", answer | {"body": self._script})
        return found


def _renumbered(descriptor: int) -> int:
    """Return a copy of a descriptor, with a number from 10 on, and close it."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return copy
