"""Says what a bisection found: one table for people, JSON for programs, a picture of the difference by layer."""

import json
import math
from dataclasses import asdict
from pathlib import Path

from megagrpo.bisect.compare import Difference
from megagrpo.bisect.findings import OUTPUT, Findings, verdict
from megagrpo.system.run_folder import write_whole

_INK, _LINE, _BOUND = "#0b0b0b", "#2a78d6", "#e34948"


def table(findings: Findings) -> str:
    """Returns the report for people, in Markdown."""
    tokens, found = sum(findings.lengths), verdict(findings)
    lines = [
        f"# Engine against trainer: {found.place or 'nothing differs'}",
        "",
        *found.text.splitlines(),
        "",
        f"{len(findings.lengths)} sequences, {tokens} tokens. Errors are relative to the engine's values; worst token: "
        "SEQUENCE:TOKEN, both counted from 0.",
        "",
        f"weights: {'digests agree' if not findings.weights else findings.weights[0]}",
    ]
    for one in findings.passes:
        lines += ["", f"## {one.title}", "", "| place | error | bound | largest | worst token | tokens | |"]
        lines += ["|---|---|---|---|---|---|---|", *map(_row, one.differences)]
        flips = [flip for flip in one.flips if flip.flipped]
        lines += [""] if flips else []
        lines += [
            f"layer {f.layer}: other experts for {f.flipped} of {f.tokens} tokens, first {f.first}" for f in flips
        ]
    lines += ["", *(f"Not compared: {note}." for note in findings.notes)]
    return "\n".join(lines).rstrip() + "\n"


def _row(found: Difference) -> str:
    where = f"{found.worst_sequence}:{found.worst_token}"
    mark = "**differs**" if found.beyond else "ok" if found.tokens else "not compared"
    return (
        f"| {found.says} | {found.error:.1e} | {found.bound:.1e} | {found.largest:.1e} | {where} | {found.tokens} "
        f"| {mark} |"
    )


def write_findings(folder: Path, findings: Findings) -> str:
    """Writes report.md, report.json and report.png into `folder`; returns the table."""
    found = verdict(findings)
    record = {"place": found.place, "computed": found.computed, "verdict": found.text, **asdict(findings)}
    write_whole(folder / "report.json", json.dumps(_plain(record), indent=1))
    text = table(findings)
    write_whole(folder / "report.md", text)
    _draw(findings, folder / "report.png")
    return text


def _plain(value):
    """Returns the value with what JSON has no number for, NaN and infinities, as text."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _draw(findings: Findings, path: Path) -> None:
    """Draws the error of the residual stream by layer, with experts replayed and without, and its bound."""
    import matplotlib  # a second of import

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=140, layout="constrained")
    errors: list[tuple[int, Difference]] = []
    layers: list[int] = []
    for one in (one for one in findings.passes if not one.inside and one.title != OUTPUT):
        errors = [(found.layer or 0, found) for found in one.differences if found.name.endswith(".output")]
        layers = [layer for layer, _ in errors]
        # what is equal has no place on a logarithmic axis
        values = [max(found.error, 1e-12) for _, found in errors]
        line = "-" if one.forced else "--"
        axes.plot(layers, values, color=_LINE, linestyle=line, marker="o", markersize=3, label=one.title)
    if errors:
        axes.plot(layers, [found.bound for _, found in errors], color=_BOUND, linewidth=1, label="bound")
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error of the residual stream after it")
    axes.set_title(verdict(findings).place or "nothing differs", color=_INK, fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)
