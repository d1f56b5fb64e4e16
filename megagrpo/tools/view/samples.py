"""Selects the samples shown on the page: a whole run has too many for a browser."""

import base64
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


def read_samples(folder: RunFolder, max_bytes: float) -> tuple[dict, list[str]]:
    """Returns {"groups": [...], "pieces": {token id: text}, "images": {key: data URI}, "formulas":
    {LaTeX: MathML}} and notes on omissions.

    Samples take about `max_bytes`, and so do their images.

    A group is a line of rollouts/ with its step; a sample also has its advantage and, if they were
    recorded, its tokens: {"ids", "difference"}. "html" is a text as Markdown; a model's has that of
    its reasoning first. Selects the first groups of every step, or of evenly spread steps.
    """
    files = folder.rollout_files()
    chosen = spread(list(files), _MAX_STEPS)
    trained, pieces = _trained(folder, set(chosen))
    groups: list[dict] = []
    mathml: dict[str, str] = {}
    num_cut = 0
    left = max_bytes
    for index, step in enumerate(chosen):
        # later steps may use the bytes that a step leaves over
        allowance = left / (len(chosen) - index)
        used = 0
        records = list(read_rollouts(files[step].values()))
        most = max((len(record["samples"]) for record in records), default=0)
        for record in records:
            group, size = _group(
                step, record, most, trained, allowance - used, first=used == 0, mathml=mathml
            )
            if group is None:
                num_cut += 1
                break
            groups.append(group)
            used += size
        left -= used
    notes = []
    if len(files) > len(chosen):
        notes.append(f"samples: of {len(chosen)} of {len(files)} steps, evenly spread")
    if num_cut:
        notes.append(
            f"samples: in {num_cut} step(s) only the first groups, within "
            f"--sample-mb {max_bytes / 1e6:g}"
        )
    samples = [sample for group in groups for sample in group["samples"]]
    used_ids = {token for sample in samples for token in sample.get("tokens", {}).get("ids", ())}
    return {
        "groups": groups,
        "images": _images(folder, groups, max_bytes),
        "formulas": mathml,
        "pieces": {str(token): pieces.get(str(token), f"[{token}]") for token in used_ids},
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
    step: int,
    record: dict,
    most: int,
    trained: dict,
    allowance: float,
    first: bool,
    mathml: dict[str, str],
) -> tuple[dict | None, int]:
    """Returns the group with the samples that fit into `allowance` bytes, None without any, and its
    size in bytes.

    The first group of a step has at least one sample. most: samples of the step's largest group.
    """
    group = record | {"step": step, "size": len(record["samples"]), "samples": []}
    group |= {"prompt": _cut(record["prompt"]), "answer": _cut(record["answer"])}
    group["html"] = rendered(group["prompt"], mathml)
    size = len(json_bytes(group))
    for index, sample in enumerate(record["samples"]):
        outcome = sample["outcome"] | {"detail": _cut(sample["outcome"]["detail"])}
        # as batching/batch.py numbers samples
        update = trained.get((step, record["group_id"] * most + index), {"advantage": None})
        shown = sample | {"index": index, "outcome": outcome} | update
        shown |= {key: _cut(sample[key]) for key in ("prompt", "text") if key in sample}
        if "prompt" in shown:
            shown["prompt_html"] = rendered(shown["prompt"], mathml)
        turns = [turn | {"text": _cut(turn["text"])} for turn in sample.get("turns", ())]
        shown["turns"] = [turn | {"html": _html(turn, mathml)} for turn in turns]
        if not turns:
            shown["html"] = _html(shown, mathml)
        own = len(json_bytes(shown))
        if size + own > allowance and (group["samples"] or not first):
            break
        group["samples"].append(shown)
        size += own
    return (group, size) if group["samples"] else (None, 0)


def _html(turn: dict, mathml: dict[str, str]) -> list[str]:
    """Returns the HTML of a model's reasoning, "" without any, and of the rest."""
    thought, rest = "", turn["text"]
    if turn.get("by", "model") == "model":
        thought, _, rest = rest.rpartition(THOUGHT_END)
    return [rendered(thought, mathml), rendered(rest, mathml)]


def _trained(
    folder: RunFolder, steps: set[int]
) -> tuple[dict[tuple[int, int], dict], dict[str, str]]:
    """Returns advantage and tokens by (step, sample id), as recorded by the update, and the text of
    each token id."""
    updates: dict[tuple[int, int], dict] = {}
    pieces: dict[str, str] = {}
    for path in folder.trained_files().values():
        for line in read_step_lines(path):
            pieces |= line["pieces"]  # a token's text is recorded only in its first step
            if line["step"] not in steps:
                continue
            for sample_id, advantage in zip(line["sample_ids"], line["advantages"], strict=True):
                updates[line["step"], sample_id] = {"advantage": advantage}
            for sample in line["tokens"]:
                tokens = {"ids": sample["ids"], "difference": sample["difference"]}
                updates[line["step"], sample["sample_id"]]["tokens"] = tokens
    return updates, pieces


def _cut(text: str) -> str:
    more = len(text) - _MAX_TEXT
    return f"{text[:_MAX_TEXT]} [... {more} more characters]" if more > 0 else text
