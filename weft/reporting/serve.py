"""Serve a report to this machine's browser only, and make it again when the records of the runs grow.

The port is open to all users of the machine. The address therefore contains a random token, which only who started the
server knows.
"""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from weft.config.config import MEMORY_REMEDY
from weft.reporting.page import vega
from weft.reporting.write import read_runs, report_page, run_folders
from weft.utils.error_line import explain_error, print_error
from weft.utils.errors import InputError

HOST = "127.0.0.1"
FILES = ("config.toml", "metrics.jsonl", "timeline.json", "lock")
"""Files of a run that a report is made of."""
MAX_SECONDS = 60.0
"""Longest duration of a connection. A client that sends nothing would otherwise occupy a thread until it ends."""
HTTP_PORT = 80
"""Port that browsers leave out of the Host header."""


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
        self.path = f"/{secrets.token_urlsafe()}/"
        self._started: dict[Any, float] = {}

    @property
    def url(self) -> str:
        """Address of the report."""
        return f"http://{HOST}:{self.server_port}{self.path}"

    @property
    def hosts(self) -> list[str]:
        """Allowed values of the Host header."""
        names = [HOST, "localhost"]
        with_port = [f"{name}:{self.server_port}" for name in names]
        return with_port + names if self.server_port == HTTP_PORT else with_port

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a client in a thread, and note when its connection began.

        Args:
            request: Socket of the connection.
            client_address: Address of the client.
        """
        self._started[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._started.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that are older than MAX_SECONDS; the server calls this at least twice a second."""
        oldest = time.monotonic() - MAX_SECONDS
        for request in [request for request, started in list(self._started.items()) if started < oldest]:
            with suppress(OSError):  # it has ended meanwhile
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: object) -> None:
        """Print a line for an unexpected error, and nothing if the client has disconnected."""
        error = sys.exception()
        if isinstance(error, Exception) and not isinstance(error, ConnectionError):
            print_error(explain_error(error, MEMORY_REMEDY), shared=False)

    def state(self) -> str:
        """Return a checksum that changes with each file that the report is made of."""
        paths = [folder / name for folder in run_folders(self.folders) for name in FILES]
        versions = [(path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else None for path in paths]
        return sha256(repr(versions).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        """Answer with the page.

        304 if the browser's page is up to date. 403 for another host name, which a foreign web site may have bound to
        this address (DNS rebinding). 404 without the token.
        """
        if self.headers.get("Host") not in self.server.hosts:
            return self._answer(403, "")
        if not secrets.compare_digest(self.path.encode(), self.server.path.encode()):
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

    def end_headers(self) -> None:
        """Add the headers of all answers, also of those to malformed requests.

        They forbid other sites to show the page in a frame, browsers to guess another type of content, and links to
        pass on the address with its token.
        """
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        super().end_headers()

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
