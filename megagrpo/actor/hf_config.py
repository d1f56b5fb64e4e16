"""From an HF config.json to Megatron's TransformerConfig: the families we train, as data."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from megagrpo.config.schema import ActorConfig

# the constants of Megatron's own llama3 scaling; only the factor is free
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Architecture:
    """The numbers of one HF config.json that the actor needs, with the family's defaults filled in."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    rope_theta: float
    rope_scaling: dict | None
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    norm_topk_prob: bool = True

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def attention_length(self) -> int:
        """Sequence length at which causal attention's products (queries with keys, weights with values) cost as much as all others."""
        heads = self.num_heads * self.head_dim
        projections = 2 * self.hidden_size * (heads + self.num_kv_heads * self.head_dim)
        feed_forward = (
            3 * self.hidden_size * (self.experts_per_token * self.expert_ffn_size if self.is_moe else self.ffn_size)
        )
        # of a token at the end of a sequence of n: heads * n multiply-adds, twice, and half of that on average
        per_layer = projections + feed_forward + self.hidden_size * self.vocab_size // self.num_layers
        return max(per_layer // heads, 1)


def read_architecture(folder: str | Path) -> Architecture:
    """Read config.json of an HF folder. ValueError when the file is missing or the family is not one of FAMILIES."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; model.path must be a Hugging Face model folder with a config.json")
    hf = json.loads(path.read_text())
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{path}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    rope = hf.get("rope_parameters") or {}
    scaling = hf.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    if scaling and {key: scaling.get(key) for key in _LLAMA3_SCALING} != _LLAMA3_SCALING:
        raise ValueError(
            f"{path}: rope scaling {scaling} is not supported; supported: none, or {_LLAMA3_SCALING} with any factor"
        )
    moe = family == "qwen3_moe"
    if moe and (hf.get("mlp_only_layers") or hf.get("decoder_sparse_step", 1) != 1):
        raise ValueError(f"{path}: layers without experts between MoE layers are not supported")
    if (family != "qwen2" and hf.get("attention_bias")) or hf.get("mlp_bias"):
        raise ValueError(
            f"{path}: attention_bias and mlp_bias put biases on projections that are not loaded; they must be false"
        )
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act {hf['hidden_act']!r} is not supported; supported: silu")
    if hf.get("use_sliding_window"):
        raise ValueError(f"{path}: sliding-window attention is not supported")
    return Architecture(
        family=family,
        hidden_size=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf.get("num_key_value_heads", hf["num_attention_heads"]),
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        ffn_size=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        max_positions=hf["max_position_embeddings"],
        rms_eps=hf["rms_norm_eps"],
        rope_theta=float(hf.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=scaling,
        tied=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        num_experts=(hf.get("num_experts") or hf["num_local_experts"]) if moe else 0,  # transformers 5 renamed it
        experts_per_token=hf["num_experts_per_tok"] if moe else 0,
        expert_ffn_size=hf["moe_intermediate_size"] if moe else 0,
        norm_topk_prob=bool(hf.get("norm_topk_prob", False)) if moe else True,
    )


def check_layout(arch: Architecture, actor: ActorConfig) -> None:
    """ValueError naming the numbers when the model cannot be cut this way."""
    p = actor.parallel
    problems = []

    def divides(what: str, number: int, key: str, by: int) -> None:
        if number % by:
            problems.append(f"{what} {number} is not divisible by actor.parallel.{key} {by}")

    divides("actor.world_size", actor.world_size, "tp*pp*cp", p.tp * p.pp * p.cp)
    divides("num_attention_heads", arch.num_heads, "tp", p.tp)
    divides("num_key_value_heads", arch.num_kv_heads, "tp", p.tp)
    if arch.is_moe:
        divides("moe_intermediate_size", arch.expert_ffn_size, "etp", p.etp)
    else:
        divides("intermediate_size", arch.ffn_size, "tp", p.tp)
    try:
        p.stage_layers(arch.num_layers)
    except ValueError as exc:
        problems.append(f"actor.parallel with pp {p.pp}: {exc}")
    if arch.is_moe:
        divides("num_experts", arch.num_experts, "ep", p.ep)
        divides("actor.world_size", actor.world_size, "ep*etp*pp", p.ep * p.etp * p.pp)
    elif p.ep > 1:
        problems.append(f"actor.parallel.ep {p.ep} needs a mixture-of-experts model; {arch.family} has no experts")
    if p.etp > 1 and not arch.is_moe:
        problems.append(f"actor.parallel.etp {p.etp} needs a mixture-of-experts model; {arch.family} has no experts")
    if p.vpp > 1 and p.pp == 1:
        problems.append("actor.parallel.vpp > 1 needs pp > 1")
    if problems:
        raise ValueError("the model does not fit the layout:\n  " + "\n  ".join(problems))


def check_transformer_engine(actor: ActorConfig) -> None:
    """ValueError when Transformer Engine's layers are asked for where it is not installed."""
    if actor.transformer_engine and importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            "actor.transformer_engine is true, but the package transformer_engine is not installed here (it needs CUDA): "
            "pip install 'megagrpo[gpu]', or set actor.transformer_engine: false for torch's layers"
        )


def transformer_config(arch: Architecture, actor: ActorConfig):
    """Megatron's TransformerConfig: no fusions that need Transformer Engine or Apex, sums instead of means everywhere."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    p, dtype = actor.parallel, getattr(torch, actor.dtype)
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn_size,
        layernorm_epsilon=arch.rms_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=p.tp,
        sequence_parallel=p.tp > 1,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=p.first_stage_layers,
        num_layers_in_last_pipeline_stage=p.last_stage_layers,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=p.etp,
        moe_token_dispatcher_type="alltoall",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,  # weights always come from an HF folder or a checkpoint
        calculate_per_token_loss=True,  # with a loss already divided by its global denominator: Megatron only sums
        batch_p2p_comm=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **(_moe_options(arch, actor) if arch.is_moe else {}),
        **_RECOMPUTE[actor.recompute],
    )


_RECOMPUTE = {
    "none": {},
    "selective": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}


def _moe_options(arch: Architecture, actor: ActorConfig) -> dict:
    return dict(
        num_moe_experts=arch.num_experts,
        moe_router_topk=arch.experts_per_token,
        moe_ffn_hidden_size=arch.expert_ffn_size,
        moe_grouped_gemm=actor.transformer_engine,
        moe_router_load_balancing_type="none",  # under plain sums Megatron's would count every token of the batch
        moe_router_pre_softmax=not arch.norm_topk_prob,
        moe_router_dtype="fp32" if actor.dtype != "float32" else None,
    )
