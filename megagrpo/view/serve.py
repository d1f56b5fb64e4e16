"""Serves the page of runs that go on, on the loopback interface alone."""

import http.server
from collections.abc import Callable
from functools import partial
from urllib.parse import parse_qs, urlsplit

from megagrpo.system.run_folder import RunFolder
from megagrpo.view.page import build_page, data_text


def stamp_of(folders: list[RunFolder]) -> str:
    """Returns what changes whenever a file that the page shows changes."""
    watched = [path for f in folders for path in (f.metrics, f.rollouts, f.timeline_file(0), f.trained_file(0))]
    states = [path.stat() for path in watched if path.exists()]
    return "-".join(f"{state.st_mtime_ns:x}.{state.st_size:x}" for state in states)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers / with the page, and /data?known=STAMP with the data, unless nothing has changed since that stamp."""

    protocol_version = "HTTP/1.1"

    def __init__(self, read: Callable[[], dict], stamp: Callable[[], str], title: str, *args):
        self._read, self._stamp, self._title = read, stamp, title
        super().__init__(*args)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if self.headers.get("Host", "") not in self._own_names():
            self._answer(403, "text/plain", "this server answers to its own name only")  # another site's name for it
        elif url.path == "/":
            self._answer(200, "text/html", build_page(self._read(), self._title, live=True))
        elif url.path == "/data" and parse_qs(url.query).get("known") == [self._stamp()]:
            self._answer(204, "application/json", "")
        elif url.path == "/data":
            self._answer(200, "application/json", data_text(self._read()))
        else:
            self._answer(404, "text/plain", "nothing here")

    def _own_names(self) -> set[str]:
        port = self.connection.getsockname()[1]
        return {f"{host}:{port}" for host in ("127.0.0.1", "localhost")}

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args) -> None:
        """Says nothing: a page that asks every few seconds would fill the terminal."""


def page_server(
    read: Callable[[], dict], stamp: Callable[[], str], title: str, port: int
) -> http.server.ThreadingHTTPServer:
    """Returns a server on 127.0.0.1 of what `read` returns at each moment; port 0: any. The caller runs and closes it.

    stamp: returns the "stamp" that `read` would, without reading. Raises ValueError when the port is taken.
    """
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, read, stamp, title))
    except OSError as error:
        raise ValueError(f"--port {port}: {error.strerror}; 0 takes any that is free") from error
