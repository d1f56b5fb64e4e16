"""Reads the parts of config.json common to all families; rejects values that would be silently
wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HfConfig = Mapping[str, Any]  # a parsed config.json, or an object in it

# the constants of Megatron's own llama3 scaling; only the factor is free
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_ROPE_READ = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
_REQUIRED_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
# keys beside text_config that count when it has them, too
_OF_THE_WHOLE = ("model_type", "tie_word_embeddings")


@dataclass(frozen=True)
class Rotary:
    """Holds how queries and keys turn with their positions (RoFormer, Su et al. 2021)."""

    theta: float
    scaling: HfConfig | None = field(default=None, hash=False)
    fraction: float = 1.0  # of a head's dimensions that turn, the first ones

    @property
    def yarn(self) -> HfConfig | None:
        """Returns YaRN's numbers (arXiv 2309.00071); None without it."""
        scaling = self.scaling or {}
        return scaling if scaling.get("rope_type", scaling.get("type")) == "yarn" else None

    @property
    def concentration(self) -> float:
        """Returns YaRN's factor of queries and of keys where files name no other."""
        return 0.1 * math.log(self.yarn["factor"]) + 1.0 if self.yarn else 1.0

    @classmethod
    def read(cls, hf: HfConfig, fraction: float = 1.0) -> Rotary:
        """Reads a config.json; `fraction` if it has none."""
        # In the order of engines (transformers' convert_rope_params_to_dict): rope_scaling hides
        # rope_parameters, transformers 5's place for theta and scaling, which hides rope_theta.
        rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
        return cls(
            float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0),
            rope_scaling(hf),
            rotary_fraction(hf, fraction),
        )


def missing_keys(hf: HfConfig, keys: tuple[str, ...] = ()) -> list[str]:
    """Returns a problem for each key that config.json must have, the common ones and `keys`, and
    has not."""
    return [f"config.json lacks {key}" for key in (*_REQUIRED_KEYS, *keys) if key not in hf]


def other_values(hf: HfConfig, supported: Mapping[str, object]) -> list[str]:
    """Returns a problem for each key with another value than the supported one, or those of a
    tuple; the key may be absent."""
    problems = []
    for key, known in supported.items():
        values = known if isinstance(known, tuple) else (known,)
        if hf.get(key, values[0]) not in values:
            problems.append(f"{key} {hf[key]!r} is not supported; supported: {values[0]!r}")
    return problems


def latent_refusals(hf: HfConfig) -> list[str]:
    """Returns a problem unless latent attention has as many heads of keys as of queries."""
    heads = hf["num_attention_heads"]
    if (kv_heads := hf.get("num_key_value_heads", heads)) == heads:
        return []
    return [
        f"num_key_value_heads {kv_heads} must be num_attention_heads {heads} in latent attention"
    ]


def llama3_refusals(scaling: HfConfig) -> list[str]:
    """Returns a problem unless a rotary scaling is Llama 3's, with any factor."""
    if {key: scaling.get(key) for key in _LLAMA3_SCALING} == _LLAMA3_SCALING:
        return []
    return [
        f"rope scaling {scaling} is not supported; supported: none, or {_LLAMA3_SCALING} with any factor"
    ]


def yarn_refusals(
    scaling: HfConfig, needed: tuple[str, ...], more: tuple[str, ...] = ()
) -> list[str]:
    """Returns why a rotary scaling is not YaRN with every number given, which Megatron and
    transformers share.

    needed: the numbers; more: keys that may be there, too.
    """
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        return [
            f"rope scaling {kind!r} is not supported by this family; supported: none, or 'yarn'"
        ]
    missing = [key for key in needed if not scaling.get(key)]
    read = {*needed, *_ROPE_READ, *more}
    others = sorted(key for key in scaling.keys() - read if scaling[key] is not None)
    problems = []
    if missing:
        problems.append(f"rope scaling 'yarn' lacks {', '.join(missing)}, or has 0 there")
    if others:
        problems.append(f"rope scaling 'yarn' with {', '.join(others)} is not supported")
    return problems


def every_scaling_refused(scaling: HfConfig) -> list[str]:
    """Returns a problem with any rotary scaling: the family is computed without."""
    return [f"rope scaling {scaling} is not supported by this family; supported: none"]


def rotary_fraction(hf: HfConfig, default: float = 1.0) -> float:
    """Returns the fraction of a head with rotary embedding; `default` if config.json has none."""
    rope = hf.get("rope_parameters") or {}
    return float(hf.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or default)


def rope_scaling(hf: HfConfig) -> HfConfig | None:
    """Returns the scaling of rotary embedding, None if there is none.

    Sections of M-RoPE are none: they change nothing where the positions in time, height and width
    are equal.
    """
    given = hf.get("rope_scaling")
    scaling = given or hf.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    is_plain = kind == "default" and not given
    is_sections = kind in ("default", "mrope") and "mrope_section" in scaling
    return None if is_plain or is_sections else scaling


def end_tokens(described: HfConfig) -> list[int]:
    """Returns the ids at which texts end, by a config.json or generation_config.json."""
    ends = described.get("eos_token_id")
    if ends is None:
        return []
    return ends if isinstance(ends, list) else [ends]


def text_part(hf: HfConfig) -> dict[str, Any]:
    """Returns the keys of a config.json as a text-only model has them, wherever they stand."""
    whole = {key: hf[key] for key in _OF_THE_WHOLE if key in hf}
    text = {**hf, **(hf.get("text_config") or {}), **whole}
    text.pop("text_config", None)
    return text
