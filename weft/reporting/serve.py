"""Shows a report on this machine alone, and makes it anew when the runs' records have grown."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from weft.reporting.page import vega
from weft.reporting.write import read_runs, report_page
from weft.utils.errors import InputError

HOST = "127.0.0.1"
FILES = ("config.toml", "metrics.jsonl", "timeline.json", "lock")
"""What a report is made of."""


class ReportServer(ThreadingHTTPServer):
    """Answers with the report of some runs as they are. InputError where the port is not to be had."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            cause = getattr(error, "strerror", None) or "there is no such port"
            raise InputError(f"--port {port}: {cause}: give another, or leave it out") from error
        self.page = lru_cache(maxsize=1)(lambda state: report_page(read_runs(folders), follow=state))
        self.folders = folders

    @property
    def url(self) -> str:
        """Where the report is."""
        return f"http://{HOST}:{self.server_port}/"

    def state(self) -> str:
        """Another one as soon as a file that the report is made of has changed."""
        paths = [folder / name for folder in self.folders for name in FILES]
        known = [(one.stat().st_size, one.stat().st_mtime_ns) if one.exists() else None for one in paths]
        return sha256(repr(known).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        """The page; 304 where the browser has it as it is; nothing for a site that asks under a name of its own."""
        if self.headers.get("Host") not in [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]:
            return self._answer(403, "")
        if self.path != "/":
            return self._answer(404, "")
        state = self.server.state()
        if self.headers.get("If-None-Match") == state:
            return self._answer(304, "")
        try:
            return self._answer(200, self.server.page(state), state)
        except InputError as error:
            return self._answer(500, f"<!doctype html><title>weft</title><p>{escape(str(error))}</p>")

    def _answer(self, code: int, text: str, state: str = "") -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if state:
            self.send_header("ETag", state)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: the one line that is printed is the address."""


def serve(folders: Sequence[Path], port: int = 0) -> int:
    """Shows the report until Ctrl-C, which is 0. InputError for runs that cannot be read, and a port that is taken."""
    read_runs(folders)
    vega()  # says at once where it is not installed
    with ReportServer(folders, port) as server:
        print(f"report at {server.url} (Ctrl-C to end)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt as stop:
            if getattr(stop, "signal", signal.SIGINT) != signal.SIGINT:
                raise
    return 0
