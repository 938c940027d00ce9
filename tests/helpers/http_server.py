"""A real HTTP server on loopback that serves one file and misbehaves on request."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FileServer(ThreadingHTTPServer):
    """Serves `content` under any path, or by path; each request uses the next action of `script`, then `"serve"`.

    serve       the file, or the requested range
    whole       the file, ignoring the requested range
    cut N       announces the true length and hangs up after N bytes of the body
    stall N     announces the true length and stalls after N bytes of the body
    slow        a little at a time
    unsized     announces no length
    NNN         that status
    NNN URL     that status, with a redirect to the URL
    """

    daemon_threads = True

    def __init__(self, content: bytes | dict[str, bytes], *script: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = content
        self.script = list(script)
        self.requests: list[dict[str, str]] = []
        """Headers of all requests so far."""
        self.sent = 0
        """Bytes of bodies."""
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file"

    @property
    def ranges(self) -> list[str | None]:
        return [request.get("Range") for request in self.requests]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up or are killed."""


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        server = self.server
        server.requests.append(dict(self.headers.items()))
        action, _, number = (server.script.pop(0) if server.script else "serve").partition(" ")
        if action.isdecimal():
            self.send_response(int(action))
            if number:
                self.send_header("Location", number)
            self.end_headers()
            return
        content = server.content if isinstance(server.content, bytes) else server.content.get(self.path)
        if content is None:
            self.send_error(404)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted and action != "whole" else 0
        if start and start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if action != "unsized":
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self._send(content[start:], action=action, number=int(number or 0))

    def _send(self, body: bytes, *, action: str, number: int) -> None:
        piece = 10_000 if action == "slow" else len(body) or 1
        body = body[:number] if action in ("cut", "stall") else body
        for begin in range(0, len(body), piece):
            self.wfile.write(body[begin : begin + piece])
            self.server.sent += len(body[begin : begin + piece])
            time.sleep(0.01 if action == "slow" else 0)
        if action == "stall":
            self.server.released.wait(20)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(content: bytes | dict[str, bytes], *script: str) -> Iterator[FileServer]:
    with FileServer(content, *script) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()


def closed_port() -> int:
    """Return a port on which nothing listens."""
    with FileServer(b"") as server:
        return server.server_port
