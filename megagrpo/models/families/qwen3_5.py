"""Qwen3-Next, and the text part of Qwen3.5, 3.6 and Qwen3.8-Flash-Next: gated delta nets, and gated
attention in every fourth layer.

Published files of Qwen3.5 are of vision-language models, whose tower (model.visual.*) is not loaded,
nor are multi-token-prediction layers (mtp.*) of any.
"""

from dataclasses import replace
from typing import ClassVar

from megagrpo.models.config_json import (
    HfConfig,
    Rotary,
    end_tokens,
    every_scaling_refused,
    other_values,
    rotary_fraction,
)
from megagrpo.models.family import Family
from megagrpo.models.kinds.experts.describe import ExpertNames, Experts
from megagrpo.models.kinds.gated_delta.describe import GatedDelta
from megagrpo.models.kinds.gated_residual.describe import GatedResidual
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.ngrams.describe import NGrams
from megagrpo.models.kinds.pooled.describe import PooledQuery
from megagrpo.models.stored.fused_experts import FusedExperts

_ATTENTION = ("linear_attention", "full_attention")
_EXPERT_NAMES = ExpertNames(shared="shared_expert", shared_size="shared_expert_intermediate_size")
_ONLY: dict[str, object] = {  # the values of keys that may be absent
    "attn_output_gate": True,
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
_INTERVAL = 4  # of transformers' and SGLang's classes, if config.json has none
_ROTARY_FRACTION = 0.25  # likewise


class Qwen35(Family):
    """The dense models."""

    REQUIRED_KEYS: ClassVar[tuple[str, ...]] = (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    ROPE_SCALING_REFUSALS = staticmethod(every_scaling_refused)
    PARTIAL_ROTARY = True
    CENTERED_NORMS = True
    DRAFT_REFUSAL = "its multi-token-prediction layers (mtp.*) are not loaded"
    LEFT_OUT: ClassVar[tuple[str, ...]] = ("model.visual.", "mtp.")
    GROUPED = False  # of GatedDelta
    GATES: ClassVar[tuple[str | None, ...]] = ("swish", "silu", None)  # of its output

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = other_values(hf, _ONLY | {"output_gate_type": self.GATES})
        kinds = [_ATTENTION[not linear] for linear in _are_linear(hf)]
        if hf.get("layer_types") not in (None, kinds):
            problems.append(
                f"layer_types is not full attention in every {_interval(hf)}-th of "
                f"{hf['num_hidden_layers']} layers (full_attention_interval), as engines build them"
            )
        if hf["linear_num_value_heads"] % hf["linear_num_key_heads"]:
            problems.append("linear_num_key_heads must divide linear_num_value_heads")
        return problems

    def attention(self, hf: HfConfig) -> GroupedQuery:
        return replace(GroupedQuery.read(hf, _ROTARY_FRACTION), qk_norm=True, output_gate=True)

    def recurrent(self, hf: HfConfig) -> GatedDelta:
        return GatedDelta.read(hf, _are_linear(hf), self.GROUPED)


class Qwen35Moe(FusedExperts, Qwen35):
    """With experts in every layer, and one that every token meets, times a sigmoid of the token."""

    REQUIRED_KEYS: ClassVar[tuple[str, ...]] = (
        *Qwen35.REQUIRED_KEYS,
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    )

    def common(self, hf: HfConfig) -> HfConfig:
        # transformers' class does not write it where every layer has experts
        return {"intermediate_size": hf.get("moe_intermediate_size"), **hf}

    def experts(self, hf: HfConfig) -> Experts:
        return Experts.read(
            hf,
            "num_experts",
            _EXPERT_NAMES,
            shared_ffn_size=hf["shared_expert_intermediate_size"],
            shared_gate=True,
        )

    @property
    def fuses_experts(self) -> bool:
        return bool(self._part)


class Qwen3Next(Qwen35Moe):
    """The text model before Qwen3.5; its files have the rows of two projections together."""

    LEFT_OUT = ("mtp.",)
    GROUPED = True

    def own_refusals(self, hf: HfConfig) -> list[str]:
        theta = Rotary.read(hf).theta
        problem = (
            f'config.json must have "rope_theta": {theta:g}, as in rope_parameters, which '
            "engines do not read; transformers 5 does not write it"
        )
        elsewhere = hf.get("rope_theta", self.ROPE_THETA) != theta
        return super().own_refusals(hf) + [problem] * elsewhere


class Qwen4Exp(Qwen35Moe):
    """Qwen3.8-Flash-Next: layers between gated residual streams, attention over chosen blocks of keys,
    and embeddings of n-grams in some layers. The indexer and the table of n-grams are frozen, the table
    in its file."""

    REQUIRED_KEYS = (
        *("hc_lowrank", "indexer_n_heads", "indexer_head_dim", "indexer_budget", "ple_layer_ids"),
        *("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "split_ngram_parts"),
        *("hc_count", "indexer_kv_heads", "indexer_compress_ratio"),
        *("ngram_size", "heads_per_ngram", "ple_conv_kernel_size", "head_dim"),
        *Qwen35Moe.REQUIRED_KEYS,
    )
    GATES = ("sigmoid", "swish", "silu", None)
    FP8_REFUSAL = "no test compares Qwen3.8-Flash-Next in FP8 with SGLang's"

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = super().own_refusals(hf)
        turning = hf["head_dim"] * rotary_fraction(hf, _ROTARY_FRACTION)
        ratio, budget = hf["indexer_compress_ratio"], hf["indexer_budget"]
        numbers = hf["ple_layer_ids"] or []
        width = hf.get("ple_embed_dim") or hf["hidden_size"]
        hashes = (hf["ngram_size"] - 1) * hf["heads_per_ngram"]
        rules = {
            "hc_count must be at least 2": hf["hc_count"] > 1,
            "indexer_kv_heads must be 1": hf["indexer_kv_heads"] == 1,
            "indexer_compress_ratio must be at least 2, and divide indexer_budget": (
                ratio > 1 and budget % ratio == 0
            ),
            f"indexer_head_dim must be at least the {turning:g} numbers of a head that turn": (
                hf["indexer_head_dim"] >= turning
            ),
            f"ple_layer_ids must be numbers from 1 to {hf['num_hidden_layers']}": all(
                0 < number <= hf["num_hidden_layers"] for number in numbers
            ),
            f"ple_embed_dim {width} must be a multiple of the {hashes} rows of a token's n-grams": (
                not numbers or (hashes > 0 and width % hashes == 0)
            ),
            "eos_token_id must name one token, which n-grams do not cross": (
                not numbers or len(end_tokens(hf)) == 1
            ),
        }
        return problems + [text for text, holds in rules.items() if not holds]

    def attention(self, hf: HfConfig) -> PooledQuery:
        return replace(PooledQuery.read(hf, _ROTARY_FRACTION), qk_norm=True, output_gate=True)

    def streams(self, hf: HfConfig) -> GatedResidual:
        return GatedResidual(hf["hc_count"], hf["hc_lowrank"])

    def ngrams(self, hf: HfConfig) -> NGrams | None:
        return NGrams.read(hf)


def _interval(hf: HfConfig) -> int:
    return hf.get("full_attention_interval") or _INTERVAL


def _are_linear(hf: HfConfig) -> tuple[bool, ...]:
    return tuple((index + 1) % _interval(hf) > 0 for index in range(hf["num_hidden_layers"]))
