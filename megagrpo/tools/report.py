"""Reports a run: a summary table and a picture of its learning curve, from its run folder."""

import argparse
import statistics
from pathlib import Path

from megagrpo.monitor.record import read_metrics
from megagrpo.system.run_folder import RunFolder, write_whole

_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_REWARD, _EVAL, _MISMATCH, _LENGTH = "#2f6fb3", "#d9622b", "#6b4fa1", "#2a8c6e"


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
    return (
        text
        + "\n"
        + "".join(f"{words}: {path}\n" for words, path in outputs.items() if path.exists())
    )


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
    shown = (  # metric, label, format, better of two values
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
        ("schedule/wait_max_s", "longest wait for another rank, s", "{:.2f}", min),
        ("schedule/pipeline_bubble", "pipeline bubble, fraction", "{:.3f}", min),
        ("perf/tokens_per_s", "tokens per second", "{:,.0f}", max),
        ("time/framework_fraction", "framework's share of time", "{:.3f}", min),
    )
    rows: list[tuple[str, ...]] = []
    for name, words, form, better in shown:
        _, values = series(entries, name)
        if values:
            first, last, mean = map(form.format, (values[0], values[-1], statistics.fmean(values)))
            rows.append((words, first, last, form.format(better(values)) if better else "", mean))
    return rows


def _time_rows(entries: list[dict]) -> list[tuple[str, ...]]:
    """Returns the mean seconds per step of each phase, longest first; averages are over all
    steps."""
    steps = [entry for entry in entries if entry.get("time/step_s") is not None]
    names = {
        name
        for entry in steps
        for name in entry
        if name.startswith("time/") and name.endswith("_s")
    }
    if not steps:
        return []
    mean = {name: sum(entry.get(name) or 0.0 for entry in steps) / len(steps) for name in names}
    total = mean.pop("time/step_s")
    longest_first = sorted(mean, key=lambda name: mean[name], reverse=True)
    shares = [(name.removeprefix("time/").removesuffix("_s"), mean[name]) for name in longest_first]
    shares += [("unnamed rest", max(0.0, total - sum(mean.values()))), ("whole step", total)]
    return [(words, f"{seconds:.2f}", f"{seconds / total:.0%}") for words, seconds in shares]


def _table(rows: list[tuple[str, ...]], header: tuple[str, ...]) -> list[str]:
    """Returns a Markdown table with aligned source: first column left, numbers right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: tuple[str, ...]) -> str:
        numbers = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([cells[0].ljust(widths[0]), *numbers])} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return [line(header), f"|{rule}|", *map(line, rows)]


# ---- the picture
# ---------------------------------------------------------------------------------------------------


def _draw(entries: list[dict], path: Path, title: str) -> None:
    """Draws accuracy and reward; below them, trainer/rollout mismatch and response length."""
    import matplotlib  # imports for a second; the training loop does not need it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    with plt.rc_context(
        {
            "font.size": 10,
            "text.color": _INK,
            "axes.labelcolor": _INK,
            "xtick.color": _MUTED,
            "ytick.color": _MUTED,
        }
    ):
        figure = plt.figure(figsize=(9, 6.4), dpi=140, layout="constrained")
        panels = figure.subplot_mosaic([["main", "main"], ["left", "right"]], height_ratios=(2, 1))
        _draw_learning(panels["main"], entries, title)
        mismatch = "mean |trainer \N{MINUS SIGN} rollout| log-prob"
        _draw_small(panels["left"], entries, "mismatch/logprob_abs_mean", mismatch, _MISMATCH)
        _draw_small(panels["right"], entries, "response/length_mean", "response tokens", _LENGTH)
        steps = [entry["step"] for entry in entries]
        for name, axes in panels.items():
            axes.set_xlim(min(steps), max(max(steps), min(steps) + 1))
            axes.xaxis.set_major_locator(
                MaxNLocator(nbins="auto", steps=[1, 2, 2.5, 5, 10], integer=True)
            )
            if name != "main":
                axes.set_xlabel("finished steps", color=_MUTED)
        figure.savefig(path)
        plt.close(figure)


def _style(axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.margins(x=0)


def _draw_learning(axes, entries: list[dict], title: str) -> None:
    _style(axes)
    steps, rewards = series(entries, "reward/mean")
    axes.plot(steps, rewards, color=_REWARD, linewidth=0.8, alpha=0.35)
    axes.plot(
        steps,
        _smooth(rewards),
        color=_REWARD,
        linewidth=2,
        label="training reward (thin: each step)",
    )
    at, accuracy = series(entries, "eval/accuracy")
    dots = {"marker": "o", "markersize": 5, "clip_on": False, "zorder": 3}
    axes.plot(at, accuracy, color=_EVAL, linewidth=2, label="held-out accuracy", **dots)
    again_at, again = series(entries, "eval_as_trained/accuracy")
    if again:
        axes.plot(
            again_at,
            again,
            color=_EVAL,
            linewidth=1.6,
            linestyle="--",
            label="the same, sampled as in training",
        )
    ends = list(zip(at, accuracy, strict=True))
    labels = (
        ((8, -17), "left"),
        ((-6, 8), "right"),
    )  # of the first value and of the last: offset in points, alignment
    for (step, value), (offset, side) in zip(ends[:1] + ends[1:][-1:], labels, strict=False):
        text = {"textcoords": "offset points", "color": _EVAL, "fontweight": "bold"}
        axes.annotate(f"{value:.3f}", (step, value), xytext=offset, ha=side, **text)
    axes.set_title(title, loc="left", fontweight="bold")
    if steps or at:
        axes.legend(frameon=False, loc="best")
    if rewards + accuracy and min(rewards + accuracy) >= 0 and max(rewards + accuracy) <= 1:
        axes.set_ylim(0, 1.02)


def _draw_small(axes, entries: list[dict], name: str, title: str, colour: str) -> None:
    _style(axes)
    steps, values = series(entries, name)
    axes.plot(steps, values, color=colour, linewidth=1.6)
    axes.set_title(title, loc="left", fontsize=10)
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    elif values:
        axes.set_ylim(bottom=min(0.0, *values), top=max(values) * 1.15 or 1.0)
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_MUTED)


def _smooth(values: list[float]) -> list[float]:
    """Returns the exponential moving average with bias correction at the start."""
    weight = 0.8
    out = []
    total = 0.0
    seen = 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        seen = weight * seen + (1 - weight)
        out.append(total / seen)
    return out


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    command.add_argument("run_dir")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    print(write_report(args.run_dir))
    return 0
