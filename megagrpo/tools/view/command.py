"""`megagrpo view RUN [RUN2 ...]`: writes the page of samples."""

import argparse
import base64
import hashlib
import html
import json
import re
import secrets
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path

from megagrpo.system.errors import translated
from megagrpo.system.run_folder import HALF_CHARACTERS, RunFolder, write_whole
from megagrpo.tools.view.samples import read_curves, read_samples

_RENEW_S = 60.0
_ENDS = re.compile("<(?=!--|/?script)", re.IGNORECASE)  # what ends a script, or hides its end


def write_view(folders: list[RunFolder], sample_mb: float, output: Path | None) -> str:
    """Writes the page; returns a line for it and for each omission.

    sample_mb: MB (1e6 bytes) of samples of each run. output: default, view.html in the first run
    folder. Raises ValueError for a folder that is not a run.
    """
    output = output or folders[0].view
    page, lines = _page(folders, sample_mb)
    write_whole(output, page)
    return "\n".join([f"page: {output} ({output.stat().st_size / 1e6:.1f} MB)", *lines])


def view_server(
    folders: list[RunFolder], sample_mb: float, port: int
) -> tuple[ThreadingHTTPServer, str]:
    """Returns a server on this machine that makes the page anew for each request, and its address.

    port: 0 takes a free one. The address holds a key, because other users can reach the port. Raises
    ValueError for a port that cannot be had.
    """
    path = f"/{secrets.token_urlsafe(16)}"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not secrets.compare_digest(self.path.encode(), path.encode()):
                self.send_error(404)
                return
            try:
                page = _page(folders, sample_mb, _RENEW_S)[0].encode(errors=HALF_CHARACTERS)
            except ValueError as exc:
                self.send_error(503, explain=f"{exc}; load the page again later")
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            with suppress(ConnectionError):  # the browser has left meanwhile
                self.end_headers()
                self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing: the address holds the key."""

    with translated(f"--serve {port}", OSError, OverflowError):
        # with threads: browsers open connections on which they ask for nothing
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    return server, f"http://127.0.0.1:{server.server_port}{path}"


def _page(
    folders: list[RunFolder], sample_mb: float, renew_s: float = 0.0
) -> tuple[str, list[str]]:
    """Returns the page, which loads itself again every `renew_s` if that is not 0, and a line for
    each omission."""
    runs = []
    lines = []
    for folder, name in zip(folders, _names(folders), strict=True):
        samples, notes = read_samples(folder, sample_mb * 1e6)
        runs.append({"name": name, **samples, "curves": read_curves(folder), "notes": notes})
        lines += [f"{name}: {note}" for note in notes]
    return _build_page(
        {"runs": runs, "renew_s": renew_s}, " | ".join(run["name"] for run in runs)
    ), lines


def _names(folders: list[RunFolder]) -> list[str]:
    """Returns the folders' names, or their paths if two have the same name."""
    names = [folder.path.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder.path) for folder in folders]


def _build_page(data: dict, title: str) -> str:
    """Returns the HTML page of `data`, {"runs": [{"name", "groups", "pieces", "curves",
    "notes"}], "renew_s"}; see `read_samples` and `read_curves`.

    Its policy allows only its own script and style, by their hashes, whatever a response of the
    model contains.
    """
    style = _part("style.css")
    script = '"use strict";\n' + _part("samples.js")
    assert "</script" not in script.lower(), "the script would end too early"
    policy = {
        "default-src": "'none'",
        "script-src": _source(script),
        "style-src": _source(style),
        "img-src": "data:",
    }
    parts = {
        "POLICY": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "TITLE": html.escape(title),
        "STYLE": style,
        "DATA": _ENDS.sub(
            "\\\\u003c",
            json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")),
        ),
        "SCRIPT": script,
    }
    # one pass over the template: the inserted texts may contain anything, {{ too
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], _part("page.html"))


def _part(name: str) -> str:
    return (files("megagrpo.tools.view") / "page" / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """Returns the text's hash as a source of the page's policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    option = command.add_argument
    option("run_dirs", metavar="RUN", nargs="+", help="run folder, or several for one page")
    target = command.add_mutually_exclusive_group()
    target.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page; default: view.html in the first run folder",
    )
    target.add_argument(
        "--serve",
        type=int,
        nargs="?",
        const=0,
        metavar="PORT",
        help="serve the page on this machine while the run goes on (default: a free port)",
    )
    option("--sample-mb", type=float, default=20.0, help="MB of samples per run (default 20)")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    folders = [RunFolder(Path(name)) for name in args.run_dirs]
    if args.serve is None:
        print(write_view(folders, args.sample_mb, args.output))
        return 0
    server, address = view_server(folders, args.sample_mb, args.serve)
    print(f"page: {address} (end with Ctrl-C)", flush=True)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0
