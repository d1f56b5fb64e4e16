"""The same as hf_reference.py for Mixtral, GLM-4.5, DeepSeek-V3 and Moonlight. usage: hf_families.py FOLDER"""

import json
import sys
from pathlib import Path

from transformers import DeepseekV3Config, Glm4MoeConfig, MixtralConfig

from tests.dist.workers.hf_reference import SIZES, write_model

_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4,
}  # fmt: skip
_MLA = SIZES | {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
_GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
_NO_GROUPS = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
_MOE = {
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
_GLM = SIZES | _MOE | _NO_GROUPS | {"head_dim": 32, "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5}}
CONFIGS = {
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2, rope_parameters=_PLAIN),
    "glm4_moe": lambda: Glm4MoeConfig(**_GLM, use_qk_norm=True, attention_bias=True),
    "glm4_moe_air": lambda: Glm4MoeConfig(**_GLM, use_qk_norm=False, attention_bias=True),
    "deepseek_v3": lambda: DeepseekV3Config(**_MLA, **_MOE, **_GROUPS, rope_parameters=_YARN),
    "deepseek_v3_plain": lambda: DeepseekV3Config(**_MLA, **_MOE, **_GROUPS, rope_parameters=_PLAIN),
    # no low rank of queries, no groups, no YaRN; transformers gives the latents' norms an epsilon of 1e-6 always
    "moonlight": lambda: DeepseekV3Config(
        **(_MLA | {"q_lora_rank": None}), **(_MOE | {"n_shared_experts": 2}), **_NO_GROUPS, rms_norm_eps=1e-6,
        rope_parameters=_PLAIN,
    ),
}  # fmt: skip


def main(folder: Path) -> None:
    for name, make in CONFIGS.items():
        config = make()
        write_model(folder, name, config)
        if config.model_type == "deepseek_v3":  # published files have it, engines ask for it, transformers drops it
            file = folder / name / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"moe_layer_freq": 1}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
