"""gpt-oss (arXiv 2508.10925): attention with sinks, every other layer in a window, and experts with
biases and a clamped activation."""

from dataclasses import replace
from functools import partial

from megagrpo.models.config_json import (
    YARN_KEYS,
    HfConfig,
    other_values,
    yarn_refusals,
)
from megagrpo.models.family import Family
from megagrpo.models.kinds.clamped.describe import CLAMPED_NAMES, ClampedExperts
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery

# of layer_types
_WINDOWED = "sliding_attention"
_WHOLE = "full_attention"


class GptOss(Family):
    """Files are in MXFP4; engines get bfloat16."""

    ROPE_THETA = 150_000.0
    REQUIRED_KEYS = (
        "num_local_experts",
        "num_experts_per_tok",
        "sliding_window",
        "swiglu_limit",
        "layer_types",
    )
    # without factors of its own
    ROPE_SCALING_REFUSALS = staticmethod(
        partial(yarn_refusals, needed=YARN_KEYS[:4], more=("truncate",))
    )
    LOADS_ATTENTION_BIAS = True
    FP8_REFUSAL = "no test compares gpt-oss in FP8 with SGLang's"

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = []
        kinds = hf["layer_types"]
        if len(kinds) != hf["num_hidden_layers"] or set(kinds) - {_WINDOWED, _WHOLE}:
            problems.append(
                f"layer_types must name {_WINDOWED!r} or {_WHOLE!r} for each of {hf['num_hidden_layers']} layers"
            )
        if not (isinstance(hf["sliding_window"], int) and hf["sliding_window"] > 0):
            problems.append(f"sliding_window {hf['sliding_window']!r} must be a number of tokens")
        if not (hf.get("rope_scaling") or hf.get("rope_parameters")):
            problems.append(
                "config.json has no rope_scaling, in whose place transformers and engines take YaRN with "
                "factor 32; write that, or rope_parameters with rope_type 'default'"
            )
        return problems + other_values(hf, {"attention_bias": True, "hidden_act_alpha": 1.702})

    def attention(self, hf: HfConfig) -> GroupedQuery:
        return replace(
            GroupedQuery.read(hf),
            qkv_bias=True,
            output_bias=True,
            sinks=True,
            window=hf["sliding_window"],
            windowed=tuple(kind == _WINDOWED for kind in hf["layer_types"]),
        )

    def experts(self, hf: HfConfig) -> ClampedExperts:
        return ClampedExperts.read(
            hf, "num_local_experts", CLAMPED_NAMES, limit=float(hf["swiglu_limit"])
        )
