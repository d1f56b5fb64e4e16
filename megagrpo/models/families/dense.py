"""Dense families: Llama 2 and 3, Qwen2 and Qwen2.5, Qwen3."""

from dataclasses import replace

from megagrpo.models.architecture import (
    Architecture,
    HfConfig,
    decoder_architecture,
)
from megagrpo.models.family import Family


class Llama(Family):
    """Grouped-query attention, a gated MLP, optionally Llama 3's rotary scaling."""

    HF_CLASS = "LlamaForCausalLM"
    FP8_REFUSAL = "SGLang 0.5.21 drops the scales of a Llama's blocks when it loads them"


class Qwen2(Family):
    """Llama with biases on the query, key and value projections."""

    HF_CLASS = "Qwen2ForCausalLM"
    LOADS_ATTENTION_BIAS = True  # whatever the key says

    def architecture(self, hf: HfConfig) -> Architecture:
        return replace(decoder_architecture(hf), qkv_bias=True)


class Qwen3(Family):
    """Llama with an RMSNorm over each head of queries and keys."""

    HF_CLASS = "Qwen3ForCausalLM"

    def architecture(self, hf: HfConfig) -> Architecture:
        return replace(decoder_architecture(hf), qk_norm=True)
