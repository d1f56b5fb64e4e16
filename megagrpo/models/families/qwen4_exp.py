"""Qwen3.8-Flash-Next: the layers of Qwen3.5 between gated residual streams, with attention over chosen
blocks of keys, and embeddings of n-grams in some layers.

The vision tower (model.visual.*) and the multi-token-prediction layer (mtp.*) are not loaded. The
indexer and the table of n-grams are frozen, the table in its file.
"""

from __future__ import annotations

from typing import ClassVar

from megagrpo.models.config_json import HfConfig, end_tokens, rotary_fraction
from megagrpo.models.families.qwen3_5 import _ROTARY_FRACTION, Qwen35Moe
from megagrpo.models.family import TinySizes
from megagrpo.models.kinds.gated_residual.describe import GatedResidual
from megagrpo.models.kinds.ngrams.describe import NGrams
from megagrpo.models.kinds.pooled.describe import PooledQuery

_SIZES = (
    *("hc_lowrank", "indexer_n_heads", "indexer_head_dim", "indexer_budget", "ple_layer_ids"),
    *("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "split_ngram_parts"),
    *("hc_count", "indexer_kv_heads", "indexer_compress_ratio"),
    *("ngram_size", "heads_per_ngram", "ple_conv_kernel_size"),
)


class Qwen4Exp(Qwen35Moe):
    """The published model, a vision-language model whose text part is trained."""

    HF_CLASS = "Qwen4ExpForConditionalGeneration"
    REQUIRED_KEYS = (*_SIZES, *Qwen35Moe.REQUIRED_KEYS)
    SIZE_KEYS = Qwen35Moe.SIZE_KEYS | {*_SIZES, "ple_embed_dim"}
    GATES: ClassVar[tuple[str | None, ...]] = ("sigmoid", "swish", "silu", None)
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
        return PooledQuery.read(hf, _ROTARY_FRACTION, qk_norm=True, output_gate=True)

    def streams(self, hf: HfConfig) -> GatedResidual:
        return GatedResidual(hf["hc_count"], hf["hc_lowrank"])

    def ngrams(self, hf: HfConfig) -> NGrams | None:
        return NGrams.read(hf)

    def tiny_options(self, sizes: TinySizes) -> dict[str, object]:
        """Samples of a certificate have more blocks of keys than a query sees."""
        return super().tiny_options(sizes) | {
            "output_gate_type": "sigmoid",
            "hc_count": 2,  # so few that no gate of n-grams has a product near 0, where it is steep
            "hc_lowrank": 16,
            "indexer_n_heads": 16,  # so many that no two blocks tie at 0
            "indexer_kv_heads": 1,
            "indexer_head_dim": sizes.head_dim,
            "indexer_budget": 12,
            "indexer_compress_ratio": 4,
            "ple_layer_ids": [2],
            "ple_embed_dim": sizes.hidden_size,
            "ple_conv_kernel_size": 4,
            "ngram_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 100,
            "make_ngram_vocab_size_divisible_by": 16,
            "split_ngram_parts": 3,
        }
