"""Dense families: Llama 2 and 3, Qwen2 and Qwen2.5, Qwen3."""

from megagrpo.models.config_json import HfConfig
from megagrpo.models.family import Family
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery


class Llama(Family):
    """Grouped-query attention, a gated MLP, optionally Llama 3's rotary scaling."""

    HF_CLASS = "LlamaForCausalLM"
    SHARES_ATTENTION = False
    FP8_REFUSAL = "SGLang 0.5.21 drops the scales of a Llama's blocks when it loads them"


class Qwen2(Family):
    """Llama with biases on the query, key and value projections."""

    HF_CLASS = "Qwen2ForCausalLM"
    SHARES_ATTENTION = False
    LOADS_ATTENTION_BIAS = True  # whatever the key says

    def attention(self, hf: HfConfig) -> GroupedQuery:
        return GroupedQuery.read(hf, qkv_bias=True)


class Qwen3(Family):
    """Llama with an RMSNorm over each head of queries and keys."""

    HF_CLASS = "Qwen3ForCausalLM"

    def attention(self, hf: HfConfig) -> GroupedQuery:
        return GroupedQuery.read(hf, qk_norm=True)
