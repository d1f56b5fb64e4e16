"""A Hugging Face Hub on the loopback interface with the repositories of a folder, and its cache."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

SHA = "0123456789abcdef0123456789abcdef01234567"


def cached(cache: Path, kind: str, repo: str, files: dict[str, str]) -> Path:
    """Puts a repository into a cache as huggingface_hub does; returns its snapshot's folder."""
    folder = cache / f"{kind}s--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / SHA
    for name, text in files.items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text(text)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(SHA)
    return snapshot


@contextmanager
def serving(repos: dict[str, dict[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Serves {"models/OWNER/NAME": {file: text}}; yields the endpoint and the files that were read."""
    read: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            api = re.fullmatch(r"/api/(\w+/[\w.-]+/[\w.-]+)/(revision|tree)/.*", path)
            file = re.fullmatch(r"/(datasets/)?([\w.-]+/[\w.-]+)/resolve/\w+/(.+)", path)
            kind = "datasets" if file and file[1] else "models"
            files = repos.get(api[1] if api else f"{kind}/{file and file[2]}")
            if files is None or (file and file[3] not in files):
                self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif file:
                text = files[file[3]].encode()
                if self.command == "GET":
                    read.append(f"{file[2]}/{file[3]}")
                self._answer(200, text, {"ETag": f'"{_oid(text)}"', "X-Repo-Commit": SHA})
            elif api and api[2] == "revision":
                self._answer(200, json.dumps({"id": api[1].partition("/")[2], "sha": SHA}).encode())
            else:
                tree = [
                    {"type": "file", "path": name, "size": len(text), "oid": _oid(text.encode())}
                    for name, text in files.items()
                ]
                self._answer(200, json.dumps(tree).encode())

        def do_HEAD(self) -> None:
            self.do_GET()

        def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", read
    finally:
        server.shutdown()
        server.server_close()


def _oid(text: bytes) -> str:
    return hashlib.sha1(text).hexdigest()
