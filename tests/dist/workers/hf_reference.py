"""Random Hugging Face models, and their logits and gradients by transformers: the truth for the actor's tests.

For run_transformers.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV4Config,
    DeepseekV32Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    NemotronHConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.dist.workers.glm5_next_reference import GLM5_NEXT, Glm5Next
from tests.dist.workers.kimi_reference import KIMI_LINEAR, KimiLinear
from tests.dist.workers.qwen4_reference import QWEN4_EXP, Qwen4Exp
from tests.dist.workers.samples import LENGTHS, NUM_SAMPLES, VOCAB, WIDTH, samples
from tests.published import deepseek_v4_name

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.15, "tie_word_embeddings": False,
}  # fmt: skip
_MOE = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 5e5,
}  # fmt: skip
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
_ROUTED = {
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
_GLM = SIZES | _ROUTED | _NO_GROUPS | {"head_dim": 32, "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5}}
_QWEN35 = SIZES | {
    "head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip
_QWEN35_MOE = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
}  # fmt: skip
# what published files have and engines ask for, and transformers drops
DROPPED = {
    **{
        name: {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        for name in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
    },
    "minimax_m2": {"rotary_dim": 16, "use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid",
                   "use_routing_bias": True},
    "gpt_oss": {"swiglu_limit": 7.0},
    "nemotron_h": {"mamba_n_groups": 4, "rms_norm_eps": 1e-6},
    "deepseek_v4": {
        "compress_ratios": [0, 4, 8, 4], "num_hash_layers": 2,
        "rope_scaling": {name: value for name, value in _YARN.items() if name != "rope_theta" and "mscale" not in name},
    },
}  # fmt: skip
# 16 of up to 40 tokens: sparse. A head whose products are all negative scores 0; with many heads no two keys tie
_SPARSE = _MLA | _ROUTED | {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 16}
_DENSE = {"index_topk": 64}
# experts in a latent space, and a router whose scores are divided by their sum
_NEMOTRON = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"} | _NO_GROUPS | {
    "head_dim": 32, "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba", "mlp", "mamba", "moe"],
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4, "ssm_state_size": 16,
    "chunk_size": 64,  # in several chunks transformers' torch path adds states of later ones to earlier ones
    # else transformers' torch path bounds steps below, which its kernels and engines do not
    "time_step_min": 1e-9, "layer_norm_epsilon": 1e-6, "use_mamba_kernels": False,
    "n_routed_experts": 8, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
# samples of up to 40 tokens: beyond a window of 8, and of 10 or 5 keys behind it, of which 3 of 10 are chosen
_V4 = {name: size for name, size in SIZES.items() if name != "intermediate_size"} | {
    "num_key_value_heads": 1, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 24, "o_groups": 2,
    "o_lora_rank": 24, "sliding_window": 8, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                    "compressed_sparse_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"], "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "swiglu_limit": 2.0, "hc_mult": 3, "rms_norm_eps": 1e-6,
    "rope_parameters": DROPPED["deepseek_v4"]["rope_scaling"],
}  # fmt: skip
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "qwen3_tied": lambda: Qwen3Config(**(SIZES | {"tie_word_embeddings": True}), head_dim=32),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **_MOE, norm_topk_prob=True),
    "qwen3_moe_raw": lambda: Qwen3MoeConfig(**SIZES, **_MOE, norm_topk_prob=False),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "llama": lambda: LlamaConfig(**SIZES, rope_parameters=_LLAMA3),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2, rope_parameters=_PLAIN),
    "glm4_moe": lambda: Glm4MoeConfig(**_GLM, use_qk_norm=True, attention_bias=True),
    "glm4_moe_air": lambda: Glm4MoeConfig(**_GLM, use_qk_norm=False, attention_bias=True),
    "deepseek_v3": lambda: DeepseekV3Config(**_MLA, **_ROUTED, **_GROUPS, rope_parameters=_YARN),
    "deepseek_v3_plain": lambda: DeepseekV3Config(**_MLA, **_ROUTED, **_GROUPS, rope_parameters=_PLAIN),
    "minimax_m2": lambda: MiniMaxM2Config(
        **SIZES, head_dim=32, num_local_experts=8, num_experts_per_tok=3,
        rope_parameters={**_PLAIN, "partial_rotary_factor": 0.5},
    ),
    # no low rank of queries, no groups, no YaRN; transformers gives the latents' norms an epsilon of 1e-6 always
    "moonlight": lambda: DeepseekV3Config(
        **(_MLA | {"q_lora_rank": None}), **(_ROUTED | {"n_shared_experts": 2}), **_NO_GROUPS, rms_norm_eps=1e-6,
        rope_parameters=_PLAIN,
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(**_QWEN35, **_QWEN35_MOE),
    "qwen3_next": lambda: Qwen3NextConfig(
        **(_QWEN35 | {"rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.25}}), **_QWEN35_MOE,
        norm_topk_prob=True,
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(**(_QWEN35 | {"tie_word_embeddings": True})),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(
        **_MLA, **_ROUTED, **_NO_GROUPS, rms_norm_eps=1e-6, rope_parameters=_PLAIN
    ),
    # windows of 8 of up to 40 tokens in every other layer
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, head_dim=32, num_local_experts=8, num_experts_per_tok=2, sliding_window=8,
        rope_parameters={**_PLAIN, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16,
                         "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(
        **_SPARSE, **_NO_GROUPS, rms_norm_eps=1e-6, rope_parameters=_PLAIN
    ),
    "glm_moe_dsa_dense": lambda: GlmMoeDsaConfig(
        **(_SPARSE | _DENSE), **_NO_GROUPS, rms_norm_eps=1e-6, rope_parameters=_PLAIN
    ),
    # layers 1 and 3 see the keys that 0 and 2 have chosen
    "glm_moe_dsa_shared": lambda: GlmMoeDsaConfig(
        **_SPARSE, **_NO_GROUPS, rms_norm_eps=1e-6, rope_parameters=_PLAIN, index_topk_freq=2,
        index_skip_topk_offset=1,
    ),
    "nemotron_h": lambda: NemotronHConfig(**_NEMOTRON, moe_latent_size=32),  # Super, Ultra
    "nemotron_h_nano": lambda: NemotronHConfig(**_NEMOTRON),
    "deepseek_v32": lambda: DeepseekV32Config(
        **_SPARSE, **_GROUPS, num_experts=8, rope_parameters=_YARN
    ),
    "deepseek_v4": lambda: DeepseekV4Config(**_V4),
    "kimi_linear": lambda: SimpleNamespace(**KIMI_LINEAR),
    "qwen4_exp": lambda: SimpleNamespace(**QWEN4_EXP),
    "glm5_next": lambda: SimpleNamespace(**GLM5_NEXT),
}  # fmt: skip


def random_model(config: PretrainedConfig | SimpleNamespace) -> PreTrainedModel | KimiLinear:
    torch.manual_seed(0)
    if isinstance(config, SimpleNamespace):
        own = {"kimi_linear": KimiLinear, "qwen4_exp": Qwen4Exp, "glm5_next": Glm5Next}
        return own[config.model_type](config)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


def stir(model: torch.nn.Module) -> None:
    """Norms of one, biases of zero and states that last for a token would hide a mistake."""
    biases = [buffer for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for tensor in [*model.parameters(), *biases]:
            if tensor.dim() == 1:
                tensor += 0.2 * torch.randn_like(tensor)
        for name, tensor in model.named_parameters():
            if name.endswith("A_log"):
                tensor.uniform_(-5.0, -1.0)
            if name.endswith(("_proj_bias", ".position_bias")):  # of experts together, of windows
                tensor += 0.2 * torch.randn_like(tensor)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                table.copy_(torch.rand(len(table), model.config.n_routed_experts).argsort()[:, : table.shape[1]])


def write_model(folder: Path, name: str, config: PretrainedConfig | SimpleNamespace) -> None:
    """Leaves the folder `name`, `name`.gradients beside it, and logits and loss in `name`.pt."""
    batch, model = samples(), random_model(config)
    stir(model)
    save(model, folder / name)
    logits = torch.zeros(NUM_SAMPLES, WIDTH, VOCAB)
    loss = torch.zeros(())
    for i, length in enumerate(LENGTHS):
        tokens = batch["tokens"][i, :length]
        row = model(tokens[None]).logits[0]
        logits[i, :length] = row.detach()
        chosen = row.log_softmax(-1)[torch.arange(length - 1), tokens[1:]]
        loss = loss - (chosen * batch["advantages"][i, 1:length]).sum() / batch["mask"].sum()
    loss.backward()
    if more := DROPPED.get(config.model_type):
        file = folder / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
    torch.save({"logits": logits, "loss": float(loss)}, folder / f"{name}.pt")
    # written by the model's own saver, gradients get the checkpoint's names and shapes
    for parameter in model.parameters():
        frozen = parameter.grad is None  # an indexer's
        parameter.data = torch.zeros_like(parameter) if frozen else parameter.grad
    save(model, folder / f"{name}.gradients")


def save(model: PreTrainedModel | KimiLinear, folder: Path) -> None:
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    # transformers 5 writes another name than published files have, and than it reads
    if (embedding := tensors.pop("backbone.embedding.weight", None)) is not None:
        tensors["backbone.embeddings.weight"] = embedding
    elif model.config.model_type == "deepseek_v4":
        tensors = {deepseek_v4_name(name): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if model.config.model_type == "deepseek_v4":
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def main(folder: Path, *names: str) -> None:
    for name in names:
        write_model(folder, name, CONFIGS[name]())
