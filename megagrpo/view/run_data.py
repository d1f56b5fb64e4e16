"""Reads a run folder into what the page shows of it."""

import statistics
from dataclasses import dataclass

from megagrpo.monitor.record import read_metrics
from megagrpo.system.run_folder import RunFolder
from megagrpo.view.samples import read_samples
from megagrpo.view.steps import timeline_steps

_MAX_POINTS = 2000  # of a curve


@dataclass(frozen=True)
class ViewLimits:
    """Bounds what the page holds of each run."""

    sample_mb: float = 20.0  # of samples, in MB (1e6 bytes)
    timeline_steps: int = 20  # last steps in timeline and trace


def read_run(folder: RunFolder, name: str, limits: ViewLimits) -> dict:
    """Returns {"name", "steps", "metrics", "samples", "pieces", "timeline", "notes"}; see the functions that it calls.

    Raises ValueError where the folder has no metrics yet or a file of the run is broken.
    """
    steps, metrics, notes = curves(read_metrics(folder))
    samples, of_samples = read_samples(folder, limits.sample_mb * 1e6)
    timeline, of_timeline = timeline_steps(folder, limits.timeline_steps)
    notes = [*notes, *of_samples, *of_timeline]
    return {"name": name, "steps": steps, "metrics": metrics, **samples, "timeline": timeline, "notes": notes}


def curves(entries: list[dict]) -> tuple[list[int], dict[str, list[float | None]], list[str]]:
    """Returns steps, values of every metric at them (None: not measured, or not finite), and what was left out.

    Of a long run, means over equal numbers of steps, at the last of these.
    """
    size = -(-len(entries) // _MAX_POINTS) or 1
    bins = [entries[at : at + size] for at in range(0, len(entries), size)]
    names = sorted({name for entry in entries for name in entry} - {"step"})

    def mean(name: str, bin_: list[dict]) -> float | None:
        values = [entry[name] for entry in bin_ if entry.get(name) is not None]
        return float(f"{statistics.fmean(values):.6g}") if values else None

    metrics = {name: [mean(name, bin_) for bin_ in bins] for name in names}
    notes = [f"curves: every point is the mean of {size} steps"] if size > 1 else []
    return [bin_[-1]["step"] for bin_ in bins], metrics, notes
