"""DeepSeek-V3.2 and GLM-5: latent attention over the keys that a lightning indexer chooses.

The indexer is frozen: a choice of keys has no gradient, and a loss of its own (towards the
distribution of attention) would move the choice away from the engines'. GLM-5 freezes it in
reinforcement learning as well (arXiv 2602.15763).
"""

from megagrpo.models.config_json import HfConfig, other_values
from megagrpo.models.families.deepseek_v3 import DEEPSEEK_V3, DeepseekV3
from megagrpo.models.kinds.indexed.describe import LightningIndexer
from megagrpo.models.kinds.latent.describe import LatentAttention

# keys of config.json that change how keys are chosen, with the values that mean: as here
_PLAIN_CHOICE = {
    "index_topk_pattern": None,
    "index_kpool": (1, None),
    "index_k_norm_type": ("layer", None),
    "index_init_tokens": (0, None),
    "index_local_tokens": (0, None),
}


class DeepseekV32(DeepseekV3):
    """DeepSeek-V3 with an indexer in every layer."""

    REQUIRED_KEYS = (
        *("index_n_heads", "index_head_dim", "index_topk"),
        *DeepseekV3.REQUIRED_KEYS,
    )

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = super().own_refusals(hf) + other_values(hf, _PLAIN_CHOICE)
        indexer = LightningIndexer.read(hf)
        kinds = [
            "full" if indexer.source(index) == index else "shared"
            for index in range(hf["num_hidden_layers"])
        ]
        if hf.get("indexer_types") not in (None, kinds):
            problems.append(
                f"indexer_types is not what index_topk_freq {indexer.freq} and "
                f"index_skip_topk_offset {indexer.offset} give, by which Megatron-Core shares choices"
            )
        if hf["q_lora_rank"] is None:
            problems.append("q_lora_rank null is not supported: the indexer reads queries' latent")
        if hf["index_head_dim"] < hf["qk_rope_head_dim"]:
            problems.append(
                f"index_head_dim {hf['index_head_dim']} is less than qk_rope_head_dim "
                f"{hf['qk_rope_head_dim']}, the part of it that turns"
            )
        return problems

    def attention(self, hf: HfConfig) -> LatentAttention:
        return LatentAttention.read(hf, LightningIndexer.read(hf))


def dense_config(hf: HfConfig) -> dict[str, object]:
    """Returns config.json of the same model without its indexer, as a DeepSeek-V3: the same model
    for sequences of at most index_topk tokens."""
    kept = {
        key: value
        for key, value in hf.items()
        if not key.startswith("index") and key not in ("layer_types", "mlp_layer_types")
    }
    return kept | DEEPSEEK_V3


class GlmMoeDsa(DeepseekV32):
    """GLM-5, 5.1 and 5.2: plain rotary embedding, as published, in the indexer as in attention."""
