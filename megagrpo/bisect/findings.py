"""What a bisection finds, and which of it names the place."""

from dataclasses import dataclass, field

from megagrpo.bisect.compare import Bounds, Difference, Flips, first_beyond, first_flips_beyond, last_within

OUTPUT = "output"  # title of the pass that is about no layer
UNSEEN = "nothing compared"  # the place where hooks have shown nothing
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


@dataclass(frozen=True)
class Pass:
    """Holds what one comparison of both sides found."""

    title: str
    differences: list[Difference]
    flips: list[Flips] = field(default_factory=list)
    forced: bool = False  # whether the trainers took the engine's experts
    inside: bool = False  # whether it is of the modules of one layer


@dataclass
class Findings:
    """Holds all that a bisection found, on the main rank."""

    weights: list[str]  # what the digests say, a line each after the first; [] where they agree
    passes: list[Pass]
    notes: list[str]  # what could not be compared, and why
    lengths: list[int]  # of the sequences, in tokens
    bounds: Bounds


@dataclass(frozen=True)
class Verdict:
    """Names the first place where engine and trainers differ."""

    place: str | None  # "weights", "nothing compared" or the name of a point; None: nothing differs
    text: str
    computed: str | None  # the first point at which what is computed differs, also where the weights do


def verdict(findings: Findings) -> Verdict:
    """Returns the first cause, in the order weights, layers, choice of experts, output."""
    place, text = _computed(findings.passes)
    if findings.weights:
        also = f"\nand what is computed: {text}" if place is not None else ""
        return Verdict("weights", "\n".join(findings.weights[:2]) + also, place)
    if place is None and (unseen := _unseen([one for one in findings.passes if one.title != OUTPUT])):
        why = f": {findings.notes[0]}" if findings.notes else ""
        return Verdict(UNSEEN, f"log-probabilities agree, but {unseen}{why}", None)
    return Verdict(place, text, place)


def _unseen(layers: list[Pass]) -> str:
    """Returns what inside the model no pass could compare, "" where one has compared all of it."""
    if not any(found.tokens for one in layers for found in one.differences):
        return "nothing inside the model could be compared"
    empty = [
        next((found.says for found in one.differences if not found.tokens), "") for one in layers if one.differences
    ]
    if not all(empty):
        return ""
    return f"no token is left for {empty[0]} and what is behind it: each has taken other experts before"


def layer_to_open(passes: list[Pass]) -> int | None:
    """Returns the layer to look into: the first that differs with experts replayed, else naturally, else the first
    that chooses other experts too often. None too where the embedding differs already.
    """
    for one in passes:
        if one.title != OUTPUT and (found := first_beyond(one.differences)) is not None:
            return found.layer
    flips = _too_many_flips(passes)
    return None if flips is None else flips.layer


def _computed(passes: list[Pass]) -> tuple[str | None, str]:
    output = [one for one in passes if one.title == OUTPUT]
    layers = [one for one in passes if one.title != OUTPUT]
    layers.sort(key=lambda one: (not one.inside, not one.forced))  # the most exact first
    for one in layers:
        if (found := first_beyond(one.differences)) is not None:
            return found.name, _differs(found, last_within(one.differences))
    if (flips := _too_many_flips(layers)) is not None:
        return f"layers.{flips.layer}.experts", _chooses(flips)
    for one in output:
        if (found := first_beyond(one.differences)) is not None:
            return found.name, _differs(found, last_within(one.differences))
    return None, "nothing differs beyond the bounds"


def _too_many_flips(passes: list[Pass]) -> Flips | None:
    """Returns the first layer's; where experts were replayed, of that alone: both sides choose from the same there."""
    exact = [one for one in passes if one.forced and not one.inside] or passes
    return next((found for one in exact if (found := first_flips_beyond(one.flips)) is not None), None)


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
