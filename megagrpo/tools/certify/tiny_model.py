"""A tiny model of any family: its config.json and random tensors, named as in released
checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import yaml
from torch import Tensor

from megagrpo.models.architecture import Architecture
from megagrpo.models.table import model_tensors
from megagrpo.models.tensors import TensorSpec

_ABSENT = "absent"


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """Sizes of a tiny model; the defaults make one of 2 million parameters. Dense families ignore
    the experts."""

    family: str = "qwen3_moe"
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 256
    num_experts: int = 8
    experts_per_token: int = 2
    expert_ffn_size: int = 128
    tie_embeddings: bool = False


def hf_config(sizes: TinySizes) -> dict[str, object]:
    """Returns a config.json in the spelling of released checkpoints, which transformers, SGLang and
    the actor read."""
    rows = _rows(sizes.family, "keys") | _rows(sizes.family, "sizes")
    return {"model_type": sizes.family} | _values(rows, asdict(sizes))


def size_keys(family: str) -> set[str]:
    """Returns the keys of config.json that a smaller model of the family changes."""
    return set(_rows(family, "sizes"))


@cache
def _table() -> dict[str, dict]:
    return yaml.safe_load(Path(__file__).with_name("tiny.yaml").read_text(encoding="utf-8"))


def _rows(name: str, part: str) -> dict[str, object]:
    """Returns keys with what tiny.yaml says of them, those of rows that this one is like included."""
    row = _table()[name]
    found: dict[str, object] = {}
    for other in row.get("like", ["every"]):
        found |= _rows(other, part)
    return found | row.get(part, {})


def _values(rows: Mapping, numbers: Mapping[str, int]) -> dict[str, object]:
    return {key: _value(row, numbers) for key, row in rows.items() if row != _ABSENT}


def _value(row: object, numbers: Mapping[str, int]) -> object:
    """Returns the value that tiny.yaml describes."""
    match row:
        case str():
            return _number(row, numbers)
        case list():
            return [_value(each, numbers) for each in row]
        case {"each layer": cycle}:
            return [cycle[index % len(cycle)] for index in range(numbers["num_layers"])]
        case {"layers from": first, **others}:
            layers = range(first, first + numbers["num_layers"])
            full = sorted({*layers[3::4], layers[-1]})
            linear = [layer for layer in layers if layer not in full]
            return {"kda_layers": linear, "full_attn_layers": full} | _values(others, numbers)
        case dict():
            return _values(row, numbers)
    return row


def _number(text: str, numbers: Mapping[str, int]) -> object:
    name, *rest = text.split()
    if name not in numbers:
        return text
    value = numbers[name]
    for operator, other in zip(rest[::2], rest[1::2], strict=True):
        value = value * int(other) if operator == "*" else value // int(other)
    return value


def random_tensors(arch: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns a model's tensors by their names on disk: norms 1, biases 0, matrices [rows, columns]
    normal.

    The standard deviation is 1/sqrt(columns): the usual 0.02 suits wide models; a narrow one would
    start so small that it needs many steps to learn anything.
    """
    return {spec.name: _initial(spec, generator) for spec in model_tensors(arch)}


def _initial(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    match spec.kind:
        case "matrix":
            inputs = spec.shape[-1] if len(spec.shape) == 2 else math.prod(spec.shape[1:])
            # experts together, transposed
            inputs = spec.shape[1] if spec.expert and len(spec.shape) == 3 else inputs
            return torch.randn(spec.shape, generator=generator) * inputs**-0.5
        case "norm":
            return torch.ones(spec.shape)
        case "bias" | "centered norm":
            return torch.zeros(spec.shape)
        case "choice":
            keys = torch.rand(spec.shape[0], spec.below, generator=generator)
            return keys.argsort()[:, : spec.shape[1]]
        case "convolution":  # larger values would sharpen the norm behind a gated delta rule
            return torch.randn(spec.shape, generator=generator) * 0.1
