"""A headless Chromium driven over its debugging pipe: open a page, evaluate JavaScript, take a screenshot."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --window-size=1300,900
    --remote-debugging-pipe about:blank
""".split()  # noqa: SIM905


class Browser:
    """One page. The pipe carries JSON messages with a zero byte after each: the browser reads 3 and writes 4."""

    def __init__(self, profile: Path) -> None:
        assert EXECUTABLE is not None
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", EXECUTABLE, f"--user-data-dir={profile}", *FLAGS],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._received = b""
        self._number = 0
        targets = self._send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str, accept: Callable[[Any], bool], *, seconds: float = 120) -> Any:
        """Poll an expression until its value is accepted or time runs out; return the last value."""
        end = time.monotonic() + seconds
        while not accept(value := self.evaluate(script)) and time.monotonic() < end:
            time.sleep(0.3)
        return value

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    def _ask(self, method: str, **parameters: Any) -> Any:
        return self._send(method, sessionId=self._session, **parameters)

    def _send(self, method: str, *, sessionId: str | None = None, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if sessionId is not None:
            message["sessionId"] = sessionId
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            chunk = os.read(self._from, 1 << 16)
            assert chunk, "the browser has gone"
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)  # type: ignore[no-any-return]

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        os.close(self._to)  # the browser exits at the end of its input
        os.close(self._from)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
