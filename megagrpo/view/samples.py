"""Reads the samples that a page shows: whole runs have too many for a browser."""

from megagrpo.monitor.rollouts import read_rollouts
from megagrpo.monitor.step_lines import read_step_lines
from megagrpo.system.run_folder import RunFolder
from megagrpo.view.steps import spread

_MAX_STEPS = 200
_MAX_TEXT = 20_000  # characters of one prompt or response
_TOKEN_BYTES = 12  # of a token in the page: its id and its difference


def read_samples(folder: RunFolder, max_bytes: float) -> tuple[dict, list[str]]:
    """Returns {"groups": [...], "pieces": {token id: text}} of about `max_bytes`, and what was left out.

    A group is a line of rollouts/ with its step; a sample has its advantage and, where they were recorded,
    its tokens too: {"ids", "difference"}. Taken are the first groups of every step, or of steps evenly spread.
    """
    files = folder.rollout_files()
    chosen = spread(list(files), _MAX_STEPS)
    trained, pieces = _trained(folder, set(chosen))
    groups: list[dict] = []
    num_cut, left = 0, max_bytes
    for index, step in enumerate(chosen):
        allowance = left / (len(chosen) - index)  # what a step leaves over is for the later ones
        used = 0
        for record in read_rollouts(files[step].values()):
            group, size = _group(step, record, trained, allowance - used, first=used == 0)
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
        notes.append(f"samples: in {num_cut} step(s) only the first groups, within --sample-mb {max_bytes / 1e6:g}")
    used_ids = {
        token for group in groups for sample in group["samples"] for token in sample.get("tokens", {}).get("ids", ())
    }
    return {"groups": groups, "pieces": {str(token): pieces.get(str(token), f"[{token}]") for token in used_ids}}, notes


def _group(step: int, record: dict, trained: dict, allowance: float, first: bool) -> tuple[dict | None, int]:
    """Returns the group with as many samples as `allowance` bytes allow, None for none, and its size in bytes.

    The first group of a step has at least one sample.
    """
    prompt = _cut(record["prompt"])
    samples: list[dict] = []
    size = len(prompt)
    for index, sample in enumerate(record["samples"]):
        shown = {
            "index": index,
            "text": _cut(sample["text"]),
            "reward": sample["reward"],
            "outcome": sample["outcome"]["status"],
            "detail": _cut(sample["outcome"]["detail"]),
            "finish": sample["finish_reason"],
            "length": sample["num_tokens"],
            "version": sample["weight_version"],
            # group ids are dense and groups equally large: see batching/batch.py
            **trained.get((step, record["group_id"] * len(record["samples"]) + index), {"advantage": None}),
        }
        own = len(shown["text"]) + 150 + _TOKEN_BYTES * len(shown.get("tokens", {}).get("ids", ()))
        if size + own > allowance and (samples or not first):
            break
        samples.append(shown)
        size += own
    if not samples:
        return None, 0
    group = {
        "step": step,
        "group": record["group_id"],
        "prompt_id": record["prompt_id"],
        "prompt": prompt,
        "answer": _cut(record["answer"]),
        "size": len(record["samples"]),
        "samples": samples,
    }
    return group, size


def _trained(folder: RunFolder, steps: set[int]) -> tuple[dict[tuple[int, int], dict], dict[str, str]]:
    """Returns what updates saw of a sample, by step and sample id, and the text of the token ids."""
    found: dict[tuple[int, int], dict] = {}
    pieces: dict[str, str] = {}
    for path in folder.trained_files().values():
        for line in read_step_lines(path):
            pieces |= line["pieces"]  # of this step's new tokens, which later steps have too
            if line["step"] not in steps:
                continue
            for sample_id, advantage in zip(line["sample_ids"], line["advantages"], strict=True):
                found[line["step"], sample_id] = {"advantage": advantage}
            for sample in line["tokens"]:
                tokens = {"ids": sample["ids"], "difference": sample["difference"]}
                found[line["step"], sample["sample_id"]]["tokens"] = tokens
    return found, pieces


def _cut(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]} [... {len(text) - _MAX_TEXT} more characters]"
