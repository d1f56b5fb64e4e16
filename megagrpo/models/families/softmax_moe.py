"""Dense families, Llama 2 and 3, Qwen2 and Qwen2.5, Qwen3; and with a softmax router over experts in
every layer, Qwen3-MoE and Mixtral."""

from dataclasses import replace

from megagrpo.models.config_json import HfConfig, missing_keys, other_values
from megagrpo.models.family import Family
from megagrpo.models.kinds.experts.describe import MIXTRAL_NAMES, Experts
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery


class Llama(Family):
    """Grouped-query attention, a gated MLP, optionally Llama 3's rotary scaling."""

    SHARES_ATTENTION = False
    FP8_REFUSAL = "SGLang 0.5.21 drops the scales of a Llama's blocks when it loads them"


class Qwen2(Family):
    """Llama with biases on the query, key and value projections."""

    SHARES_ATTENTION = False
    LOADS_ATTENTION_BIAS = True  # whatever the key says

    def attention(self, hf: HfConfig) -> GroupedQuery:
        return replace(GroupedQuery.read(hf), qkv_bias=True)


class Qwen3(Family):
    """Llama with an RMSNorm over each head of queries and keys."""

    def attention(self, hf: HfConfig) -> GroupedQuery:
        return replace(GroupedQuery.read(hf), qk_norm=True)


class Qwen3Moe(Qwen3):
    """Qwen3's attention."""

    REQUIRED_KEYS = ("num_experts_per_tok", "moe_intermediate_size")

    def refusals(self, hf: HfConfig) -> list[str]:
        if not hf.get(_count(hf)):
            return [*missing_keys(hf, self.REQUIRED_KEYS), "config.json lacks num_experts"]
        return super().refusals(hf)

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = other_values(hf, {"mlp_only_layers": ([], None), "decoder_sparse_step": 1})
        if "norm_topk_prob" not in hf:
            problems.append(
                "config.json lacks norm_topk_prob, which transformers reads as false and SGLang "
                "as true; write the one with which the model was trained (Qwen3: true)"
            )
        return problems

    def experts(self, hf: HfConfig) -> Experts:
        # absent only in Qwen3-VL-MoE
        return Experts.read(hf, _count(hf), norm_topk=bool(hf.get("norm_topk_prob", True)))


def _count(hf: HfConfig) -> str:
    # transformers 5 saves the second spelling
    return "num_experts" if hf.get("num_experts") else "num_local_experts"


class Mixtral(Family):
    """Llama's attention."""

    ROPE_THETA = 1e6
    SHARES_ATTENTION = False
    REQUIRED_KEYS = ("num_local_experts", "num_experts_per_tok")

    def own_refusals(self, hf: HfConfig) -> list[str]:
        return other_values(hf, {"sliding_window": None})

    def experts(self, hf: HfConfig) -> Experts:
        return Experts.read(
            hf,
            "num_local_experts",
            MIXTRAL_NAMES,
            unreported="SGLang's Mixtral does not say which layer chose experts",
        )
