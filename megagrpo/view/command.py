"""`megagrpo view RUN [RUN2 ...]`: writes the page of samples and the traces."""

from dataclasses import dataclass
from pathlib import Path

from megagrpo.system.run_folder import RunFolder, write_whole
from megagrpo.view.page import build_page
from megagrpo.view.samples import read_samples
from megagrpo.view.trace import read_trace, write_trace


@dataclass(frozen=True)
class ViewLimits:
    """Bounds on the output for each run."""

    sample_mb: float = 20.0  # of samples, in MB (1e6 bytes)
    timeline_steps: int = 20  # last steps in the trace


def write_view(folders: list[RunFolder], limits: ViewLimits, output: Path | None, trace: Path | None) -> str:
    """Writes the page, and a trace of every run that has a timeline; returns a line for each file and omission.

    output: default, view.html in the first run folder. trace: of the first run; default, trace.json.gz in its folder.
    Raises ValueError for a folder that is not a run, and for `trace` without a timeline.
    """
    output = output or folders[0].view
    runs, lines = [], []
    for folder, name in zip(folders, _names(folders), strict=True):
        if not folder.metrics.is_file():
            raise ValueError(f"{folder.metrics}: no such file; a run folder has one after its first step")
        samples, notes = read_samples(folder, limits.sample_mb * 1e6)
        runs.append({"name": name, **samples, "notes": notes})
        events, trace_notes = read_trace(folder, limits.timeline_steps)
        path = trace if trace is not None and folder is folders[0] else folder.trace
        if events:
            write_trace(path, events)
            lines.append(f"trace: {path} (for ui.perfetto.dev or chrome://tracing)")
        elif path is trace:
            raise ValueError(f"--trace: {folder.path} has no timeline: set log.timeline: true in the run's config")
        lines += [f"{name}: {note}" for note in notes + trace_notes]
    write_whole(output, build_page({"runs": runs}, " | ".join(run["name"] for run in runs)))
    return "\n".join([f"page: {output} ({output.stat().st_size / 1e6:.1f} MB)", *lines])


def _names(folders: list[RunFolder]) -> list[str]:
    """Returns the folders' names, or their paths if two have the same name."""
    names = [folder.path.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder.path) for folder in folders]
