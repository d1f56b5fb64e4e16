"""The model that a checkpoint belongs to, as state.json describes it.

A number that has its default is left out, so that one which a later version adds is no difference.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass

from megagrpo.checkpoint.changes import leaves
from megagrpo.config.actor import LoraConfig

_NO_DEFAULT = object()
# recurrent layers had a name of their kind
_RECURRENT = re.compile(r"^model\.(delta|mamba)\.")
# The first form of version 0.1.0 had all numbers of an architecture side by side: its name, today's
# name, its default.
_FIRST: dict[str, tuple[str, object]] = {
    "num_heads": ("attention.heads", _NO_DEFAULT),
    "num_kv_heads": ("attention.kv_heads", _NO_DEFAULT),
    "head_dim": ("attention.head_dim", _NO_DEFAULT),
    "rope_theta": ("attention.rotary.theta", _NO_DEFAULT),
    "rope_scaling": ("attention.rotary.scaling", None),
    "rotary_fraction": ("attention.rotary.fraction", 1.0),
    "qkv_bias": ("attention.qkv_bias", False),
    "qk_norm": ("attention.qk_norm", False),
    "norm_over_heads": ("attention.norm_over_heads", False),
    "output_gate": ("attention.output_gate", False),
    "mla": ("attention", None),
    "indexer": ("attention.indexer", None),
    "indexer.freq": ("attention.indexer.freq", 1),
    "indexer.offset": ("attention.indexer.offset", 1),
    "num_experts": ("experts.count", 0),
    "experts_per_token": ("experts.per_token", 0),
    "expert_ffn_size": ("experts.ffn_size", 0),
    "norm_topk_prob": ("experts.norm_topk", True),
    "sigmoid_router": ("experts.sigmoid", False),
    "router_bias": ("experts.router_bias", False),
    "router_groups": ("experts.groups", 1),
    "router_top_groups": ("experts.top_groups", 1),
    "routed_scale": ("experts.scale", 1.0),
    "dense_layers": ("experts.dense_layers", 0),
    "shared_ffn_size": ("experts.shared_ffn_size", 0),
    "shared_gate": ("experts.shared_gate", False),
    "linear": ("delta", None),
    "linear.grouped": ("delta.grouped", False),
    "centered_norms": ("centered_norms", False),
    "vision": ("vision", None),
    "draft": ("draft", False),
}


def architecture_numbers(arch: object) -> dict[str, object]:
    """Returns the numbers of an Architecture by dotted names, as JSON has them."""
    return json.loads(json.dumps(dict(_numbers(arch, ""))))


def adapter_numbers(lora: LoraConfig) -> dict[str, object]:
    """Returns what says which adapters a checkpoint holds."""
    return {"rank": lora.rank, **lora.model_dump(exclude_defaults=True)}


def differences(saved: Mapping[str, object], own: Mapping[str, object]) -> list[str]:
    """Returns in words what differs between the identity of a checkpoint, in the form of any
    version, and a run's own."""
    model = saved.get("model")
    lora = saved.get("lora")
    if isinstance(model, Mapping) and "num_heads" in model:
        saved = {**saved, "model": _from_first(model)}
    if isinstance(lora, Mapping):
        saved = {**saved, "lora": adapter_numbers(LoraConfig.model_validate(lora))}
    before = {_RECURRENT.sub("model.recurrent.", name): value for name, value in leaves(saved)}
    # which older checkpoints do not say
    now = {name: value for name, value in leaves(own) if name in before or name != "trained_draft"}
    return [
        f"{name}: checkpoint {before.get(name)!r}, this run {now.get(name)!r}"
        for name in sorted(dict(before.items() ^ now.items()))
    ]


def _numbers(part: object, prefix: str) -> Iterator[tuple[str, object]]:
    assert is_dataclass(part) and not isinstance(part, type)
    for field in fields(part):
        value = getattr(part, field.name)
        if not field.compare:
            continue
        if is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        elif field.default is MISSING or value != field.default:
            yield prefix + field.name, value


def _from_first(model: Mapping[str, object]) -> dict[str, object]:
    numbers: dict[str, object] = {}
    for name, value in leaves(model):
        first, dot, rest = name.partition(".")
        renamed = _FIRST.get(first, (first, None))[0] + dot + rest
        new, default = _FIRST.get(name, (renamed, _NO_DEFAULT))
        if value != default:
            numbers[new] = value
    if model["mla"]:  # whose heads have no width and no number of their own
        del numbers["attention.head_dim"], numbers["attention.kv_heads"]
    return numbers
