"""`megagrpo view RUN [RUN2 ...]`: writes the page of samples and the traces."""

import argparse
import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from pathlib import Path

from megagrpo.system.run_folder import RunFolder, write_whole
from megagrpo.tools.view.samples import read_samples
from megagrpo.tools.view.trace import read_trace, write_trace


def write_view(
    folders: list[RunFolder],
    sample_mb: float,
    timeline_steps: int,
    output: Path | None,
    trace: Path | None,
) -> str:
    """Writes the page, and a trace of every run that has a timeline; returns a line for each file
    and omission.

    sample_mb: MB (1e6 bytes) of samples of each run. timeline_steps: last steps in its trace.
    output: default, view.html in the first run folder. trace: of the first run; default,
    trace.json.gz in its folder. Raises ValueError for a folder that is not a run, and for `trace`
    without a timeline.
    """
    output = output or folders[0].view
    runs, lines = [], []
    for folder, name in zip(folders, _names(folders), strict=True):
        if not folder.metrics.is_file():
            raise ValueError(
                f"{folder.metrics}: no such file; a run folder has one after its first step"
            )
        samples, notes = read_samples(folder, sample_mb * 1e6)
        runs.append({"name": name, **samples, "notes": notes})
        events, trace_notes = read_trace(folder, timeline_steps)
        path = trace if trace is not None and folder is folders[0] else folder.trace
        if events:
            write_trace(path, events)
            lines.append(f"trace: {path} (for ui.perfetto.dev or chrome://tracing)")
        elif path is trace:
            raise ValueError(
                f"--trace: {folder.path} has no timeline: set log.timeline: true in the run's "
                "config"
            )
        lines += [f"{name}: {note}" for note in notes + trace_notes]
    write_whole(output, _build_page({"runs": runs}, " | ".join(run["name"] for run in runs)))
    return "\n".join([f"page: {output} ({output.stat().st_size / 1e6:.1f} MB)", *lines])


def _names(folders: list[RunFolder]) -> list[str]:
    """Returns the folders' names, or their paths if two have the same name."""
    names = [folder.path.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder.path) for folder in folders]


def _build_page(data: dict, title: str) -> str:
    """Returns the HTML page of `data`, {"runs": [{"name", "groups", "pieces", "notes"}]}; see
    `read_samples`.

    Its policy allows only its own script and style, by their hashes, whatever a response of the
    model contains.
    """
    style, script = _part("style.css"), '"use strict";\n' + _part("samples.js")
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
        "DATA": json.dumps(
            data, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        ).replace("<", "\\u003c"),
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
    option("run_dirs", metavar="RUN", nargs="+", help="run folder; several share one page")
    option(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page; default: view.html in the first run folder",
    )
    trace = "the first run's trace; default: trace.json.gz in its folder"
    option("--trace", type=Path, metavar="FILE", help=trace)
    option("--sample-mb", type=float, default=20.0, help="MB of samples of each run (default 20)")
    option("--timeline-steps", type=int, default=20, help="last steps in the trace (default 20)")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    folders = [RunFolder(Path(name)) for name in args.run_dirs]
    print(write_view(folders, args.sample_mb, args.timeline_steps, args.output, args.trace))
    return 0
