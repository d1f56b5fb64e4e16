"""`megagrpo view RUN [RUN2 ...]`: the page, the traces, and the server."""

import time
from pathlib import Path

from megagrpo.system.run_folder import RunFolder, write_whole
from megagrpo.view.page import build_page
from megagrpo.view.run_data import ViewLimits, read_run
from megagrpo.view.serve import page_server, stamp_of
from megagrpo.view.trace import write_trace


def view_runs(
    run_dirs: list[str], limits: ViewLimits, output: Path | None, trace: Path | None, port: int | None
) -> None:
    """Writes the page of these runs and says so, or serves it on `port`, unless that is None. See both functions.

    output: default, view.html in the first run folder. Raises ValueError for files that serving does not write.
    """
    folders = [RunFolder(Path(name)) for name in run_dirs]
    if port is None:
        print(write_view(folders, limits, output or folders[0].view, trace))
        return
    if output or trace:
        raise ValueError("--serve writes no files: leave --output and --trace out")
    serve_view(folders, limits, port)


def write_view(folders: list[RunFolder], limits: ViewLimits, output: Path, trace: Path | None = None) -> str:
    """Writes the page, and a trace of every run that recorded a timeline; returns what was written, for people.

    trace: of the first run, instead of trace.json.gz in its folder. Raises ValueError for what is not a run.
    """
    data = view_data(folders, limits)
    write_whole(output, build_page(data, _title(data)))
    lines = [f"page: {output} ({output.stat().st_size / 1e6:.1f} MB)"]
    for index, (folder, run) in enumerate(zip(folders, data["runs"], strict=True)):
        path = trace if trace is not None and index == 0 else folder.trace
        if run["timeline"]:
            write_trace(path, run["timeline"])
            lines.append(f"trace: {path} (for ui.perfetto.dev or chrome://tracing)")
        elif path is trace:
            raise ValueError(f"--trace: {folder.path} has no timeline: it was made without log.timeline")
        lines += [f"{run['name']}: {note}" for note in run["notes"]]
    return "\n".join(lines)


def serve_view(folders: list[RunFolder], limits: ViewLimits, port: int) -> None:
    """Serves the page until it is interrupted; an open page shows new steps within seconds."""
    title = _title(view_data(folders, limits))  # what is no run is said before anything is served
    with page_server(lambda: view_data(folders, limits), lambda: stamp_of(folders), title, port) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}/  (Ctrl-C ends)", flush=True)
        server.serve_forever()


def view_data(folders: list[RunFolder], limits: ViewLimits) -> dict:
    """Returns what the page shows of these runs."""
    names = [folder.path.resolve().name for folder in folders]
    labels = [name if names.count(name) == 1 else str(f.path) for name, f in zip(names, folders, strict=True)]
    stamp = stamp_of(folders)  # before reading: what changes meanwhile is read again
    runs = [read_run(folder, label, limits) for folder, label in zip(folders, labels, strict=True)]
    return {"runs": runs, "stamp": stamp, "made": time.strftime("%Y-%m-%d %H:%M:%S")}


def _title(data: dict) -> str:
    return " | ".join(run["name"] for run in data["runs"])
