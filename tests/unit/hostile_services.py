"""A real HTTP server on loopback that behaves badly by script, and what becomes of each behavior.

docs/evidence/hostile.md lists them.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Scripted(ThreadingHTTPServer):
    """Answers the requests by the steps of a script, one after another, then by `good` for ever."""

    daemon_threads = True

    def __init__(self, good: Callable[[dict], Any], script: list[str]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.good, self.script, self.lock = good, list(script), threading.Lock()
        self.bodies: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most_at_once = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/grade"


_ANSWERS = {  # step -> status, body, headers
    "busy": (429, b"later", {"Retry-After": "0"}),
    "busy for an hour": (429, b"later", {"Retry-After": "3600"}),
    "fails": (500, b"out of memory"),
    "is late": (408, b"timeout"),
    "refuses": (401, b"who are you?"),
    "sends elsewhere": (307, b"", {"Location": "http://192.0.2.1/"}),
    "is no JSON": (200, b"<html>\xff</html>"),
}


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.headers.append(dict(self.headers))
            step = server.script.pop(0) if server.script else "good"
            server.running += 1
            server.most_at_once = max(server.most_at_once, server.running)
        try:
            self._answer(step, body)
        finally:
            with server.lock:
                server.running -= 1

    def _answer(self, step: str, body: dict) -> None:
        match step:
            case "good" | "slow":
                time.sleep(0.2 if step == "slow" else 0.0)
                found = self.server.good(body)
                if isinstance(found, int):
                    self._send(found, b"cannot read it")
                else:
                    self._send(200, json.dumps(found).encode())
            case "hangs":
                time.sleep(3)
            case "closes the connection":
                self.close_connection = True
            case "is huge":
                self.send_response(200)
                self.end_headers()
                for _ in range(40):
                    self.wfile.write(b"1" * 2**20)
            case _:
                self._send(*_ANSWERS.get(step, (200, step.encode())))

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(good: Callable[[dict], Any], script: list[str]) -> Iterator[Scripted]:
    """Serves until the block ends."""
    with Scripted(good, script) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


# what the service does -> (script, status of the outcome, what its detail says)
SERVICES = {
    "answers": ([], "score", ""),
    "fails, then answers": (["fails", "fails"], "score", ""),
    "closes the connection, then answers": (["closes the connection"], "score", ""),
    "is busy (429), then answers": (["busy"], "score", ""),
    "is busy for an hour (Retry-After)": (["busy for an hour"], "timeout",
                                          "the last problem: status 429 (Retry-After: 3600 s): later"),
    "has a request that came too late (408), then answers": (["is late"], "score", ""),
    "hangs": (["hangs"], "timeout", "gave no score in 1 s"),
    "fails always": (["fails"] * 9, "error", "failed 3 times; the last problem: status 500: out of "
                                             "memory"),
    "closes every connection": (["closes the connection"] * 9, "error", "failed 3 times"),
    "refuses (401)": (["refuses"], "error", "refused a request with status 401: who are you?"),
    "sends elsewhere (307)": (["sends elsewhere"], "error", "refused a request with status 307"),
    "answers something else than JSON": (["is no JSON"], "error", "answered something else than "
                                                                  "JSON"),
    "answers without end": (["is huge"], "error", "answered more than 16 MiB"),
    "answers another schema": (['{"score": 1}'], "error", """answered {'score': 1}"""),
    "gives too few scores": (['{"scores": []}'], "error", "gave 0 scores for 1 responses"),
    "gives NaN": (['{"scores": [NaN]}'], "error", "gave the score nan, not a finite number"),
    "gives an integer beyond all floats": (['{"scores": [1' + "0" * 400 + "]}"], "error", "gave the score 1000"),
    "nests its answer without end": (["[" * 100_000], "error", "answered something else than JSON"),
    "gives a text as score": (['{"scores": ["1.0"]}'], "error", "gave the score '1.0', not a "
                                                                "finite number"),
}  # fmt: skip


def table() -> str:
    """The list of docs/evidence/hostile.md: services by outcome."""
    services: dict[str, list[str]] = {}
    for name, (_, status, detail) in SERVICES.items():
        services.setdefault(f"{status}: {detail}".removesuffix(": "), []).append(name)
    return "\n".join(f"- **{outcome}**: {'; '.join(names)}" for outcome, names in services.items())
