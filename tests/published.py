"""Qwen3.5 as its published files have it: the text part of a vision-language model."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def published_config(text: dict) -> dict:
    """config.json, by that of the text model. The tower is named, and of no size."""
    name = text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    kind = {"model_type": text["model_type"].removesuffix("_text"), "architectures": [name]}
    ends = {key: value for key, value in text.items() if key.endswith("token_id")}
    return ends | kind | {"text_config": text, "vision_config": {}}


def as_published(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """A text model's tensors by their other names; a layer's experts are in two tensors."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[str, dict[int, Tensor]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in tensors:
        stored = name.replace("model.", "model.language_model.", 1)
        layer, is_expert, rest = stored.partition(".experts.")
        if is_expert:
            number, kind, _ = rest.split(".")
            experts[layer][kind][int(number)] = tensor
        else:
            found[stored] = tensor
    for layer, kinds in experts.items():
        gate, up, down = (
            [kinds[f"{kind}_proj"][n] for n in range(len(kinds["up_proj"]))] for kind in ("gate", "up", "down")
        )
        both = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        found[layer + ".experts.gate_up_proj"] = torch.stack(both)
        found[layer + ".experts.down_proj"] = torch.stack(down)
    return found
