"""Qwen3.5 as its published files have it, the text part of a vision-language model; DeepSeek-V4's names."""

import re
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

# transformers writes its own names, and reads those of published files
_DEEPSEEK_V4 = (
    (r"^model\.embed_tokens\.", "embed."), (r"^model\.norm\.", "norm."), (r"^lm_head\.", "head."),
    (r"^model\.hc_head\.", ""), (r"^hc_(fn|base|scale)$", r"hc_head_\1"), (r"^model\.", ""),
    (r"\.input_layernorm\.", ".attn_norm."), (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"), (r"\.self_attn\.", ".attn."), (r"\.mlp\.", ".ffn."),
    (r"\.sinks$", ".attn_sink"), (r"\.compressor\.indexer\.(scorer\.|(?=q_b_proj))", ".indexer."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."), (r"\.position_bias$", ".ape"),
    (r"compressor\.kv_norm\.", "compressor.norm."), (r"\.q_a_norm\.", ".q_norm."),
    (r"\.([qo])_([ab])_proj\.", r".w\1_\2."), (r"\.kv_proj\.", ".wkv."),
    (r"compressor\.gate_proj\.", "compressor.wgate."), (r"\.e_score_correction_bias$", ".bias"),
    (r"\.gate_proj\.", ".w1."), (r"\.down_proj\.", ".w2."), (r"\.up_proj\.", ".w3."),
)  # fmt: skip


def deepseek_v4_name(name: str) -> str:
    for pattern, published in _DEEPSEEK_V4:
        name = re.sub(pattern, published, name)
    return name


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
