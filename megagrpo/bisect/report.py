"""Says what a bisection found: one table for people, JSON for programs, a picture of the difference by layer."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from megagrpo.bisect.compare import Difference, Flips, first_beyond, first_flips_beyond, last_within
from megagrpo.bisect.procedure import OUTPUT, Findings, Pass
from megagrpo.run_folder import write_whole

_EXPLAINED = {  # by the last part of a point's name
    "input_norm": "the norm's weight or epsilon",
    "mlp_norm": "the norm's weight or epsilon",
    "final_norm": "the norm's weight or epsilon",
    "qkv": "the projection's weight or bias",
    "core_attention": "the rotary embedding, the scale, the mask or the kernel",
    "attention_out": "the projection's weight",
    "after_attention": "attention",
    "router_logits": "the router's weight or precision",
    "expert_shares": "how scores become weights",
    "mlp_out": "the MLP, or the experts and how they are combined",
    "output": "the MLP, or the experts and how they are combined",
    "head": "the output layer's weight or precision, or the log-softmax",
    "decode": "kernels and cache of decoding; prefill of the same tokens is another matter",
}
_INK, _LINE, _BOUND = "#0b0b0b", "#2a78d6", "#e34948"


@dataclass(frozen=True)
class Verdict:
    """Names the first place where engine and trainers differ."""

    place: str | None  # "weights" or the name of a point; None: nothing differs
    text: str


def verdict(findings: Findings) -> Verdict:
    """Returns the first cause, in the order weights, layers, choice of experts, output."""
    computed = _computed(findings.passes)
    if findings.weights:
        also = f"\nand what is computed: {computed.text}" if computed.place is not None else ""
        return Verdict("weights", f"the weights differ: {findings.weights[0]}{also}")
    return computed


def _computed(passes: list[Pass]) -> Verdict:
    output = [one for one in passes if one.title == OUTPUT]
    layers = [one for one in passes if one.title != OUTPUT]
    layers.sort(key=lambda one: (not one.inside, not one.forced))  # the most exact first
    for one in layers:
        if (found := first_beyond(one.differences)) is not None:
            return Verdict(found.name, _differs(found, last_within(one.differences)))
    for one in layers:
        if (flips := first_flips_beyond(one.flips)) is not None:
            return Verdict(f"layers.{flips.layer}.experts", _chooses(flips))
    for one in output:
        if (found := first_beyond(one.differences)) is not None:
            return Verdict(found.name, _differs(found, last_within(one.differences)))
    return Verdict(None, "nothing differs beyond the bounds")


def _differs(found: Difference, before: Difference | None) -> str:
    upto = f"equal up to {before.says}; " if before is not None else ""
    cause = _EXPLAINED.get(found.name.rpartition(".")[2])
    look = f": look at {cause}" if cause else ""
    return f"{upto}the first difference is {found.says} ({found.error:.2g}, bound {found.bound:.2g}){look}"


def _chooses(flips: Flips) -> str:
    return (
        f"layer {flips.layer} takes other experts for {flips.flipped} of {flips.tokens} tokens, though what it "
        "computes of the same experts is equal: look at the router's bias, its groups and the number of experts"
    )


def table(findings: Findings) -> str:
    """Returns the report for people, in Markdown."""
    tokens = sum(findings.lengths)
    lines = [
        f"# Engine against trainer: {verdict(findings).text}",
        "",
        f"{len(findings.lengths)} sequences, {tokens} tokens. Errors are relative to the engine's values.",
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
    mark = "**differs**" if found.beyond else "ok"
    return (
        f"| {found.says} | {found.error:.1e} | {found.bound:.1e} | {found.largest:.1e} | {where} | {found.tokens} "
        f"| {mark} |"
    )


def write_findings(folder: Path, findings: Findings) -> str:
    """Writes report.md, report.json and report.png into `folder`; returns the table."""
    found = verdict(findings)
    record = {"place": found.place, "verdict": found.text, **asdict(findings)}
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

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=140, layout="constrained")
    for one in (one for one in findings.passes if not one.inside and one.title != OUTPUT):
        errors = [(found.layer or 0, found) for found in one.differences if found.name.endswith(".output")]
        layers = [layer for layer, _ in errors]
        # what is equal has no place on a logarithmic axis
        values = [max(found.error, 1e-12) for _, found in errors]
        style = {"linestyle": "-" if one.forced else "--", "marker": "o", "markersize": 3}
        axes.plot(layers, values, color=_LINE, label=one.title, **style)
    if errors:
        axes.plot(layers, [found.bound for _, found in errors], color=_BOUND, linewidth=1, label="bound")
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error of the residual stream after it")
    axes.set_title(verdict(findings).place or "nothing differs", color=_INK, fontsize=10)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)
