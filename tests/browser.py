"""Drive headless Chromium over the DevTools protocol, with real mouse and keyboard events."""

import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 30.0  # that an answer may take
# The protocol is spoken over descriptors 3 and 4, so no port is open, and nothing is fetched.
OPTIONS = [
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--no-first-run"),
    *("--hide-scrollbars", "--disable-gpu", "--disable-dev-shm-usage", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
KEYS = {"Tab": 9, "Escape": 27, " ": 32, "End": 35, "Home": 36}
KEYS |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One tab. As a context it ends the process; `profile` is an empty folder for its files."""

    def __init__(self, profile: Path, *options: str) -> None:
        assert CHROMIUM is not None
        ends = [*os.pipe(), *os.pipe()]
        # From 10 on: 3 and 4 are where the browser finds them.
        theirs, self._to, self._from, back = (
            fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends
        )
        for end in ends:
            os.close(end)
        command = [CHROMIUM, *OPTIONS, *options, f"--user-data-dir={profile}", "about:blank"]
        null = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
        ends_to = [(os.POSIX_SPAWN_DUP2, theirs, 3), (os.POSIX_SPAWN_DUP2, back, 4)]
        self._pid = os.posix_spawn(
            CHROMIUM, command, os.environ, file_actions=[*ends_to, null], setpgroup=0
        )
        os.close(theirs)
        os.close(back)
        self._number, self._read, self.events = 0, b"", deque[dict[str, Any]]()
        self._session: dict[str, str] = {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        found = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": found["sessionId"]}
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._to)
        os.close(self._from)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command; return its result. What happens meanwhile is kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        """Open the address and wait until it is loaded; `events` then has what came since."""
        self.events.clear()
        self.wait_for_load(self.ask("Page.navigate", url=url)["loaderId"])

    def wait_for_load(self, loader: str | None = None) -> None:
        """Wait for the end of a load, of any page that was not asked for if no loader is given."""
        while not any(
            event.get("method") == "Page.lifecycleEvent"
            and event["params"]["name"] == "load"
            and loader in (None, event["params"]["loaderId"])
            for event in self.events
        ):
            self.events.append(self._next())

    def js(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, after the next frame."""
        frame = f"new Promise((ok) => requestAnimationFrame(() => ok({expression})))"
        found = self.ask(
            "Runtime.evaluate", expression=frame, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0, held: int = 0) -> None:
        """Send a mouse event at a place of the window: moved, pressed or released."""
        button = "none" if kind == "moved" and not held else "left"
        what = {"type": f"mouse{kind.title()}", "button": button, "buttons": held}
        self.ask("Input.dispatchMouseEvent", x=x, y=y, clickCount=clicks, **what)

    def click(self, x: float, y: float, times: int = 1) -> None:
        self.mouse("moved", x, y)
        for count in range(1, times + 1):
            self.mouse("pressed", x, y, count, 1)
            self.mouse("released", x, y, count)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        self.mouse("moved", *start)
        self.mouse("pressed", *start, 1, 1)
        self.mouse("moved", *middle, held=1)
        self.mouse("moved", *end, held=1)
        self.mouse("released", *end, 1)

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        code = KEYS.get(key, ord(key[0].upper()))
        same = {"key": key, "windowsVirtualKeyCode": code}
        self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **same, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **same)
