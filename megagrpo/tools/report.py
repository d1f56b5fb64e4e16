"""Reports a run: a summary table and a picture of its learning curve, from its run folder."""

import argparse
import re
import statistics
from collections import defaultdict
from pathlib import Path

from megagrpo.monitor.step_log import read_metrics
from megagrpo.system.run_folder import RunFolder, write_whole

_PANELS = {  # of the picture: metric -> label
    "learning": {
        "reward/mean": "training reward",
        "eval/accuracy": "held-out accuracy",
        "eval_as_trained/accuracy": "held-out, sampled as in training",
    },
    "entropy of the policy": {"policy/entropy": "entropy"},
    "mean |trainer \N{MINUS SIGN} rollout| log-prob": {"mismatch/logprob_abs_mean": "mismatch"},
    "response tokens": {"response/length_mean": "tokens"},
}
_COURSE = (  # of the table: metric, label, format, better of two values
    ("eval/accuracy", "held-out accuracy", "{:.3f}", max),
    ("eval/pass_at_k", "held-out pass@k", "{:.3f}", max),
    ("eval_as_trained/accuracy", "held-out accuracy, sampled as in training", "{:.3f}", max),
    ("reward/mean", "reward", "{:.3f}", max),
    ("group/degenerate_fraction", "degenerate groups, fraction", "{:.3f}", None),
    ("loss/total", "loss", "{:.4f}", None),
    ("policy/kl_reference", "KL to the reference", "{:.4f}", None),
    ("policy/entropy", "entropy", "{:.3f}", None),
    ("optim/grad_norm", "gradient norm", "{:.3f}", None),
    ("response/length_mean", "response tokens", "{:.1f}", None),
    ("response/truncated_fraction", "truncated, fraction", "{:.3f}", None),
    ("mismatch/logprob_abs_mean", "mean abs(trainer - rollout) log-prob", "{:.1e}", min),
    ("moe/load_imbalance", "expert load imbalance", "{:.2f}", None),
    ("batch/padding_waste", "padding waste, fraction", "{:.3f}", min),
    ("perf/tokens_per_s", "tokens per second", "{:,.0f}", max),
    ("time/framework_fraction", "framework's share of time", "{:.3f}", min),
)


def write_report(run_dir: str | Path) -> str:
    """Writes summary.md and curve.png into the run folder from its metrics.jsonl; returns the
    summary's text.

    Raises ValueError if there are no metrics yet.
    """
    folder = RunFolder(Path(run_dir))
    entries = read_metrics(folder)
    if not entries:
        raise ValueError(f"{folder.metrics} is empty: nothing was measured yet")
    text = summary(entries, folder.path.name)
    write_whole(folder.summary, text)
    _draw(entries, folder.curve, folder.path.name)
    outputs = {"table": folder.summary, "curve": folder.curve, "samples": folder.rollouts}
    outputs["TensorBoard"] = folder.tensorboard
    lines = [f"{words}: {path}\n" for words, path in outputs.items() if path.exists()]
    return "\n".join([text, "".join(lines)])


def series(entries: list[dict], name: str) -> tuple[list[int], list[float]]:
    """Returns the steps and values of one metric, without missing and non-finite ones."""
    points = [(entry["step"], entry[name]) for entry in entries if entry.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def summary(entries: list[dict], title: str) -> str:
    """Returns two Markdown tables: the course of the main metrics, and the seconds of a step by
    phase."""
    course = _table(_course_rows(entries), ("metric", "first", "last", "best", "mean"))
    lines = [f"# {title}: {entries[-1]['step']} steps", "", *course]
    if times := _time_rows(entries):
        lines += ["", *_table(times, ("phase", "mean s a step", "share"))]
    return "\n".join(lines) + "\n"


def _course_rows(entries: list[dict]) -> list[tuple[str, ...]]:
    """Returns a row for each main metric that the run measured."""
    rows: list[tuple[str, ...]] = []
    for name, words, form, better in _COURSE:
        _, values = series(entries, name)
        if values:
            first, last, mean = map(form.format, (values[0], values[-1], statistics.fmean(values)))
            rows.append((words, first, last, form.format(better(values)) if better else "", mean))
    return rows


def _time_rows(entries: list[dict]) -> list[tuple[str, ...]]:
    """Returns the mean seconds of each phase, longest first; means are over all steps."""
    steps = [entry for entry in entries if entry.get("time/step_s") is not None]
    if not steps:
        return []
    mean: defaultdict[str, float] = defaultdict(float)
    for entry in steps:
        for name, value in entry.items():
            if re.fullmatch(r"time/\w+_s", name):
                mean[name[len("time/") : -len("_s")]] += (value or 0.0) / len(steps)
    total = mean.pop("step")
    rows = sorted(mean.items(), key=lambda row: -row[1])
    rows += [("unnamed rest", max(0.0, total - sum(mean.values()))), ("whole step", total)]
    return [(words, f"{seconds:.2f}", f"{seconds / total:.0%}") for words, seconds in rows]


def _table(rows: list[tuple[str, ...]], header: tuple[str, ...]) -> list[str]:
    """Returns a Markdown table: first column left, numbers right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [
        [cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]
        for cells in (header, rule, *rows)
    ]
    return [f"| {' | '.join(cells)} |" for cells in padded]


def _draw(entries: list[dict], path: Path, title: str) -> None:
    """Draws the panels of _PANELS over finished steps."""
    import matplotlib  # imports for a second; the training loop does not need it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(2, 2, figsize=(9, 6.4), dpi=140, layout="constrained")
    figure.suptitle(title, fontweight="bold", parse_math=False)
    for axes, (heading, lines) in zip(grid.flat, _PANELS.items(), strict=True):
        axes.set_title(heading, loc="left", fontsize=10)
        axes.set_xlabel("finished steps")
        axes.grid(axis="y", alpha=0.4)
        axes.spines[["top", "right"]].set_visible(False)
        shown = {label: series(entries, name) for name, label in lines.items()}
        for label, (steps, values) in shown.items():
            if values:
                axes.plot(steps, values, marker="o", markersize=2, label=label)
        if len(lines) > 1 and axes.lines:
            axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    command.add_argument("run_dir", help="run folder")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    print(write_report(args.run_dir))
    return 0
