"""Selects the samples shown on the page: a whole run has too many for a browser."""

import base64
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

from megagrpo.data.texts import THOUGHT_END
from megagrpo.monitor.rollout_log import read_rollouts
from megagrpo.monitor.step_lines import read_step_lines
from megagrpo.monitor.step_log import read_metrics
from megagrpo.system.run_folder import RunFolder, json_bytes
from megagrpo.tools.view.rendered import rendered

T = TypeVar("T")
_MAX_STEPS = 200
_MAX_POINTS = 300  # of a curve
CURVES = (
    "reward/mean",
    "eval/accuracy",
    "response/length_mean",
    "policy/entropy",
    "mismatch/logprob_abs_mean",
    "time/step_s",
)
_MAX_TEXT = 20_000  # characters of one prompt or response
_TOKEN = 16  # bytes of a token: its number and difference


def read_samples(folder: RunFolder, max_bytes: float) -> tuple[dict, list[str]]:
    """Returns {"groups": [...], "pieces": {token id: text}, "images": {key: data URI}, "formulas":
    {LaTeX: MathML}} and notes on omissions.

    Samples take about `max_bytes`, and so do their tokens, and their images.

    A group is a line of rollouts/ with its step; a sample also has its advantage and, if they were
    recorded, its tokens: {"ids", "difference"}. "html" is a text as Markdown; a model's has that of
    its reasoning first. Selects the first groups of every step, or of evenly spread steps.
    """
    files = folder.rollout_files()
    chosen = spread(list(files), _MAX_STEPS)
    updated: dict[tuple[int, int], dict] = {}  # samples by step and id
    groups: list[dict] = []
    mathml: dict[str, str] = {}
    cut: set[int] = set()  # steps
    left = max_bytes
    for index, step in enumerate(chosen):
        # later steps may use the bytes that a step leaves over
        allowance = left / (len(chosen) - index)
        used = 0
        records = list(read_rollouts(files[step].values()))
        most = max((len(record["samples"]) for record in records), default=0)
        for record in records:
            group, size = _group(step, record, allowance - used, first=used == 0, mathml=mathml)
            if group is None:
                cut.add(step)
                break
            groups.append(group)
            # as batching/batch.py numbers samples
            first_id = record["group_id"] * most
            updated |= {(step, first_id + sample["index"]): sample for sample in group["samples"]}
            used += size
        left -= used
    notes = []
    if len(files) > len(chosen):
        notes.append(f"samples: of {len(chosen)} of {len(files)} steps, evenly spread")
    pieces = _add_updates(folder, updated, max_bytes / max(len(chosen), 1), cut)
    if cut:
        notes.append(
            f"samples: in {len(cut)} step(s) only the first groups, or tokens, within "
            f"--sample-mb {max_bytes / 1e6:g}"
        )
    return {
        "groups": groups,
        "images": _images(folder, groups, max_bytes),
        "formulas": mathml,
        "pieces": pieces,
    }, notes


def read_curves(folder: RunFolder) -> dict[str, list[tuple[int, float]]]:
    """Returns (step, value) of the metrics that the page draws, by their names; at most _MAX_POINTS
    each, evenly spread, and no metric that the run did not measure."""
    entries = read_metrics(folder)
    curves = {
        name: spread(
            [(entry["step"], entry[name]) for entry in entries if entry.get(name) is not None],
            _MAX_POINTS,
        )
        for name in CURVES
    }
    return {name: points for name, points in curves.items() if points}


def spread(items: Sequence[T], number: int) -> list[T]:
    """Returns at most `number` >= 2 of the items, evenly spread, including the first and the
    last."""
    if len(items) <= number:
        return list(items)
    return [items[round(i * (len(items) - 1) / (number - 1))] for i in range(number)]


def _images(folder: RunFolder, groups: list[dict], max_bytes: float) -> dict[str, str]:
    """Returns the images of the groups' prompts, by their keys, as far as the bytes go."""
    images: dict[str, str] = {}
    for key in dict.fromkeys(key for group in groups for key in group.get("images", ())):
        path = folder.images / f"{key}.png"
        if path.is_file() and (max_bytes := max_bytes - path.stat().st_size * 4 / 3) > 0:
            images[key] = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    return images


def _group(
    step: int, record: dict, allowance: float, first: bool, mathml: dict[str, str]
) -> tuple[dict | None, int]:
    """Returns the group with the samples that fit into `allowance` bytes, None without any, and its
    size in bytes.

    The first group of a step has at least one sample.
    """
    group = record | {"step": step, "size": len(record["samples"]), "samples": []}
    group |= {"prompt": _cut(record["prompt"]), "answer": _cut(record["answer"])}
    group["html"] = rendered(group["prompt"], mathml)
    size = len(json_bytes(group))
    for index, sample in enumerate(record["samples"]):
        outcome = sample["outcome"] | {"detail": _cut(sample["outcome"]["detail"])}
        formulas: dict[str, str] = {}
        shown = sample | {"index": index, "outcome": outcome, "advantage": None}
        shown |= {key: _cut(sample[key]) for key in ("prompt", "text") if key in sample}
        if "prompt" in shown:
            shown["prompt_html"] = rendered(shown["prompt"], formulas)
        shown["turns"] = turns = []
        left = _MAX_TEXT  # of all turns together
        for turn in sample.get("turns", ()):
            cut = turn | {"text": _cut(turn["text"], max(left, 0))}
            turns.append(cut | {"html": _html(cut, formulas)})
            left -= len(turn["text"])
        if not turns:
            shown["html"] = _html(shown, formulas)
        own = len(json_bytes([shown, {k: v for k, v in formulas.items() if k not in mathml}]))
        if size + own > allowance and (group["samples"] or not first):
            break
        group["samples"].append(shown)
        mathml |= formulas
        size += own
    return (group, size) if group["samples"] else (None, 0)


def _html(turn: dict, mathml: dict[str, str]) -> list[str]:
    """Returns the HTML of a model's reasoning, "" without any, and of the rest."""
    thought, rest = "", turn["text"]
    if turn.get("by", "model") == "model":
        thought, _, rest = rest.rpartition(THOUGHT_END)
    return [rendered(thought, mathml), rendered(rest, mathml)]


def _add_updates(
    folder: RunFolder, samples: dict[tuple[int, int], dict], step_bytes: float, cut: set[int]
) -> dict[str, str]:
    """Adds advantage and tokens, as recorded by the update, to samples by (step, sample id), and
    the steps of which not all tokens fit to `cut`; returns the text of each token id."""
    pieces: dict[str, str] = {}
    used: set[int] = set()
    left: defaultdict[int, int] = defaultdict(lambda: int(step_bytes / _TOKEN))
    for path in folder.trained_files().values():
        for line in read_step_lines(path):
            pieces |= line["pieces"]  # a token's text is recorded only in its first step
            step = line["step"]
            for sample_id, advantage in zip(line["sample_ids"], line["advantages"], strict=True):
                samples.get((step, sample_id), {})["advantage"] = advantage
            for tokens in line["tokens"]:
                if sample := samples.get((step, tokens["sample_id"])):
                    most = max(left[step], 0)
                    sample["tokens"] = {key: tokens[key][:most] for key in ("ids", "difference")}
                    used.update(tokens["ids"][:most])
                    left[step] -= len(tokens["ids"])
    cut.update(step for step, tokens in left.items() if tokens < 0)
    return {str(token): pieces.get(str(token), f"[{token}]") for token in used}


def _cut(text: str, most: int = _MAX_TEXT) -> str:
    more = len(text) - most
    return f"{text[:most]} [... {more} more characters]" if more > 0 else text
