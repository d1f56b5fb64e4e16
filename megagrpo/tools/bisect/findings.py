"""The findings of a bisection: the first point that differs, a table for people, JSON for
programs."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from megagrpo.system.run_folder import write_json_lines, write_whole
from megagrpo.tools.bisect.compare import Bounds, Difference, Flips

OUTPUT = "output"  # title of the pass that is about no layer
UNSEEN = "nothing compared"  # the verdict if hooks have recorded nothing
_EXPLAINED = {  # by the last part of a point's name
    **dict.fromkeys(("input_norm", "mlp_norm", "final_norm"), "the norm's weight or epsilon"),
    "qkv": "the projection's weight or bias",
    "patch_embed": "the pixels that each side has, or the weight",
    "projector": "the order of patches that it merges, or its weights",
    "scatter": "where features are put, or the embedding's weight",
    **dict.fromkeys(
        ("q_rotary", "k_rotary"),
        "the rotary embedding: positions, their sections, theta or scaling",
    ),
    "core_attention": "the scale, the mask or the kernel",
    "attention_out": "the projection's weight",
    "after_attention": "attention",
    "router_logits": "the router's weight or precision",
    "expert_shares": "how scores become weights",
    **dict.fromkeys(("mlp_out", "output"), "the MLP, or the experts and how they are combined"),
    "deepstack": "which layer adds features of images, and where",
    "head": "the output layer's weight or precision, or the log-softmax",
    "decode": "kernels and cache of decoding; prefill of the same tokens is another matter",
}


@dataclass(frozen=True)
class Pass:
    """The result of one comparison of both sides."""

    title: str
    differences: list[Difference]
    flips: list[Flips] = field(default_factory=list)
    inside: bool = False  # whether it is of the modules of one layer


@dataclass
class Findings:
    """The results of a bisection, on the main rank."""

    # the verification's message, a line each after the first; [] if digests agree
    weights: list[str]
    passes: list[Pass]
    notes: list[str]  # points that were not compared, and why
    lengths: list[int]  # of the sequences, in tokens
    bounds: Bounds


@dataclass(frozen=True)
class Verdict:
    """The first point at which engine and trainers differ."""

    point: str | None  # "weights", "nothing compared" or the name of a point; None: nothing differs
    text: str
    computed: str | None  # the first computed value that differs, also if weights do


def verdict(findings: Findings) -> Verdict:
    """Returns the first cause, in the order weights, layers, choice of experts, output."""
    point, text = _computed(findings.passes)
    if findings.weights:
        also = f"\nand what is computed: {text}" if point is not None else ""
        return Verdict("weights", "\n".join(findings.weights[:2]) + also, point)
    if point is None and not any(one.differences for one in findings.passes if one.title != OUTPUT):
        why = f": {findings.notes[0]}" if findings.notes else ""
        return Verdict(
            UNSEEN,
            f"log-probabilities agree, but nothing inside the model could be compared{why}",
            None,
        )
    return Verdict(point, text, point)


def layer_to_open(passes: list[Pass]) -> int | None:
    """Returns the first layer that differs, else the first with too many flips; None also if the
    embedding differs."""
    layers = [one for one in passes if one.title != OUTPUT]
    differs = (each.layer for one in layers for each in one.differences if each.beyond)
    flips = (each.layer for one in layers for each in one.flips if each.beyond)
    return next(differs, next(flips, None))


def _computed(passes: list[Pass]) -> tuple[str | None, str]:
    # finest first
    layers = sorted((one for one in passes if one.title != OUTPUT), key=lambda one: not one.inside)
    for one in layers:
        if found := _first_beyond(one.differences):
            return found
    for flips in (flips for one in layers for flips in one.flips if flips.beyond):
        taken = (
            f"layer {flips.layer} takes other experts for {flips.flipped} of {flips.tokens} tokens"
        )
        look = "look at the router's bias, its groups and the number of experts"
        says = f"{taken}, though its output with the same experts is equal: {look}"
        return f"layers.{flips.layer}.experts", says
    for one in passes:
        if found := _first_beyond(one.differences):
            return found
    return None, "nothing differs beyond the bounds"


def _first_beyond(differences: list[Difference]) -> tuple[str, str] | None:
    upto = ""
    for difference in differences:
        if difference.beyond:
            cause = _EXPLAINED.get(difference.name.rpartition(".")[2])
            look = f": look at {cause}" if cause else ""
            size = f"{difference.error:.2g}, bound {difference.bound:.2g}"
            says = f"{upto}the first difference is {difference.says} ({size}){look}"
            return difference.name, says
        upto = f"equal up to {difference.says}; "
    return None


def table(findings: Findings) -> str:
    """Returns the report for people, in Markdown."""
    cause = verdict(findings)
    lines = [
        f"# Engine against trainer: {cause.point or 'nothing differs'}",
        "",
        *cause.text.splitlines(),
        "",
    ]
    read = (
        "Errors are relative to the engine's values; worst token: "
        "SEQUENCE:TOKEN, both counted from 0."
    )
    lines += [f"{len(findings.lengths)} sequences, {sum(findings.lengths)} tokens. {read}", ""]
    lines.append(f"weights: {findings.weights[0] if findings.weights else 'digests agree'}")
    for one in findings.passes:
        lines += ["", f"## {one.title}", "", "| place | error | bound | largest | worst token | |"]
        lines += ["|---|---|---|---|---|---|", *map(_row, one.differences), ""]
        for flips in one.flips:
            if flips.flipped:
                tokens = f"{flips.flipped} of {flips.tokens} tokens, first {flips.first}"
                lines.append(f"layer {flips.layer}: other experts for {tokens}")
    lines += ["", *(f"Not compared: {note}." for note in findings.notes)]
    return "\n".join(lines).rstrip() + "\n"


def _row(difference: Difference) -> str:
    sizes = f"{difference.error:.1e} | {difference.bound:.1e} | {difference.largest:.1e}"
    mark = "**differs**" if difference.beyond else "ok"
    worst = f"{difference.worst_sequence}:{difference.worst_token}"
    return f"| {difference.says} | {sizes} | {worst} | {mark} |"


def write_findings(folder: Path, findings: Findings) -> str:
    """Writes report.md and report.json into `folder`; returns the table. NaN is null in JSON."""
    cause = verdict(findings)
    record = {
        "place": cause.point,
        "computed": cause.computed,
        "verdict": cause.text,
        **asdict(findings),
    }
    write_json_lines(folder / "report.json", [record])
    text = table(findings)
    write_whole(folder / "report.md", text)
    return text
