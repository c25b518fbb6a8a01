"""Serve a report on this machine only, and make it again when the records of the runs grow."""

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
"""Files of a run that a report is made of."""


class ReportServer(ThreadingHTTPServer):
    """HTTP server of the current report of some runs.

    Args:
        folders: Folders of the runs.
        port: Port to listen on. 0: any free port.

    Raises:
        InputError: The port cannot be used.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            cause = getattr(error, "strerror", None) or "no such port"
            raise InputError(f"--port {port}: {cause}: choose another port, or leave --port out") from error
        self.page = lru_cache(maxsize=1)(lambda state: report_page(read_runs(folders), follow=state))
        self.folders = folders

    @property
    def url(self) -> str:
        """Address of the report."""
        return f"http://{HOST}:{self.server_port}/"

    def state(self) -> str:
        """Return a checksum that changes with each file that the report is made of."""
        paths = [folder / name for folder in self.folders for name in FILES]
        versions = [(path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else None for path in paths]
        return sha256(repr(versions).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        """Answer with the page.

        304 if the browser's page is up to date. 403 for another host name, which a foreign web site may have bound to
        this address (DNS rebinding).
        """
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
        """Print nothing: only the address is printed, at the start."""


def serve(folders: Sequence[Path], port: int = 0) -> int:
    """Serve a report until Ctrl-C, and return exit code 0.

    Args:
        folders: Folders of the runs.
        port: Port to listen on. 0: any free port.

    Raises:
        InputError: The runs cannot be read, or the port cannot be used.
    """
    read_runs(folders)
    vega()  # fails here, not at the first request, if Vega is not installed
    with ReportServer(folders, port) as server:
        print(f"report at {server.url} (Ctrl-C to end)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt as stop:
            if getattr(stop, "signal", signal.SIGINT) != signal.SIGINT:
                raise
    return 0
