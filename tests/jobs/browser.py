"""A real browser for tests: headless Chromium, spoken to over two pipes (the Chrome DevTools Protocol)."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_TIMEOUT = 120.0


class Browser:
    """One page of a browser."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._data = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.said: list[str] = []
        """What the page has logged as errors, and exceptions that it did not catch."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for each in ("Page.enable", "Runtime.enable"):
            self._call(each)

    def open(self, url: str, width: int = 1200, height: int = 900) -> None:
        """Go to a page."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._call("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        """What an expression comes to in the page."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"].get("value")

    def text(self, element: str = "main") -> str:
        """The text of the first element of a selector, as it is shown."""
        return str(self.value(f"(document.querySelector({json.dumps(element)}) || {{}}).innerText || ''"))

    def wait_for(self, script: str) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + _TIMEOUT
        while not self.value(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"{script} has not come to be true; the page shows:\n{self.text()}"
            select.select([self._answers], [], [], 0.05)

    def wait_for_text(self, text: str, element: str = "main") -> None:
        """Wait until an element of a selector shows a text."""
        self.wait_for(
            f"((document.querySelector({json.dumps(element)})||{{}}).innerText||'').includes({json.dumps(text)})"
        )

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") == "Runtime.exceptionThrown":
                self.said.append(json.dumps(answer["params"]["exceptionDetails"])[:500])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._data:
            assert select.select([self._answers], [], [], _TIMEOUT)[0], "the browser says nothing"
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser has ended"
            self._data += more
        line, _, self._data = self._data.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser, ended with all its processes."""
    assert PROGRAM is not None
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars"
        flags += " --disable-extensions --disable-background-networking --remote-debugging-pipe --lang=en"
        # The browser is told nothing of where its pipes are: it takes 3 and 4.
        shell = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        child = subprocess.Popen(
            ["bash", "-c", shell, "bash", PROGRAM, *flags.split(), f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": profile},
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Browser(commands, answers)
        finally:
            os.close(commands)  # at which it ends
            os.close(answers)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 9)
                child.wait()
