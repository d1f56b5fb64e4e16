"""GLM-5.3-Flash by the equations of SGLang 0.5.21, token by token and in float64: transformers 5.12 has no such model.

Beside each part: the function of SGLang's srt/models/glm5_next.py, or the file, that it is read off.
"""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dist.workers.kimi_reference import DeltaAttention, KimiLinear, linear

GLM5_NEXT = {
    "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "vocab_size": 131,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "mla_use_nope": True, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 0,
    "v_head_dim": 16, "head_dim": 0, "layer_types": [*["linear_attention", "deepseek_sparse_attention"] * 2],
    "linear_attn_config": {"kda_layers": [0, 2], "full_attn_layers": [1, 3], "num_heads": 4, "head_dim": 16,
                           "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
    # 2 pools of 4 of up to 40 tokens; with many heads no two pools tie at 0
    "index_n_heads": 8, "index_head_dim": 16, "index_topk": 8, "index_kpool": 4, "index_kpool_compress": True,
    "index_kpool_always_select_tail": True, "indexer_types": ["full"] * 4,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "mlp_layer_types": ["dense", *["sparse"] * 3], "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5,
    "swiglu_limit": 0.5, "mhc": True, "hc_mult": 3, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
}  # fmt: skip


class BoundedDeltaAttention(DeltaAttention):
    """Glm5NextLinearAttention; the decays of kernels/ops/attention/fla/kda.py (kda_gate_chunk_cumsum)."""

    def __init__(self, config: SimpleNamespace):
        super().__init__(config)
        self.bound = config.linear_attn_config["gate_lower_bound"]
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.full_like(self.dt_bias, -20.0))  # states that last

    def decays(self, numbers: Tensor, rates: Tensor) -> Tensor:
        return self.bound * torch.sigmoid(rates * numbers)


class Indexer(nn.Module):
    """IndexerKPool of srt/layers/attention/dsa/dsa_indexer_kpool.py, without its rotation and FP8."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.heads, dim, self.pool = config.index_n_heads, config.index_head_dim, config.index_kpool
        self.topk = config.index_topk
        self.wq_b, self.wk = linear(config.q_lora_rank, self.heads * dim), linear(config.hidden_size, dim)
        self.weights_proj = linear(config.hidden_size, self.heads)
        self.k_norm = nn.LayerNorm(dim, eps=1e-6)
        self.index_kpool_compress_gate = nn.Parameter(0.15 * torch.randn(dim, config.hidden_size))
        self.index_kpool_compress_ape = nn.Parameter(torch.randn(self.pool, dim))
        self.requires_grad_(False)

    def forward(self, x: Tensor, latent: Tensor) -> Tensor:
        """Returns the keys that each query sees, [s, s]."""
        q = self.wq_b(latent).unflatten(1, (self.heads, -1))  # _get_q_k_bf16
        k, gates = self.k_norm(self.wk(x)), x @ self.index_kpool_compress_gate.T
        weights = self.weights_proj(x) * self.heads**-0.5 * q.shape[-1] ** -0.5  # _get_logits_head_gate
        seen = torch.zeros(len(x), len(x), dtype=torch.bool)
        for t in range(len(x)):
            whole = (t + 1) // self.pool
            scores = []
            for first in range(0, whole * self.pool, self.pool):  # _kpool_softmax_rotate_write_cache_kernel
                own = slice(first, first + self.pool)
                shares = (gates[own] + self.index_kpool_compress_ape).softmax(0)
                key = (shares * k[own]).sum(0)
                scores.append((weights[t] * F.relu(q[t] @ key)).sum())
            if scores:  # expand_pooled_groups_to_topk
                best = torch.stack(scores).topk(min(self.topk // self.pool, whole)).indices
                for pool in best.tolist():
                    seen[t, pool * self.pool : (pool + 1) * self.pool] = True
            seen[t, whole * self.pool : t + 1] = True  # append_kpool_tail_to_topk
        return seen


class SparseAttention(nn.Module):
    """DeepseekV2AttentionMLA of srt/models/deepseek_v2.py with skip_rope."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        hidden, self.heads, self.nope = config.hidden_size, config.num_attention_heads, config.qk_nope_head_dim
        low, latent, values = config.q_lora_rank, config.kv_lora_rank, config.v_head_dim
        self.q_a_proj, self.q_b_proj = linear(hidden, low), linear(low, self.heads * self.nope)
        self.q_a_layernorm = nn.RMSNorm(low, eps=config.rms_norm_eps)
        self.kv_a_proj_with_mqa = linear(hidden, latent)
        self.kv_a_layernorm = nn.RMSNorm(latent, eps=config.rms_norm_eps)
        self.kv_b_proj = linear(latent, self.heads * (self.nope + values))
        self.o_proj = linear(self.heads * values, hidden)
        self.indexer = Indexer(config)

    def forward(self, x: Tensor) -> Tensor:
        low = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(low).unflatten(1, (self.heads, -1)).transpose(0, 1)
        kv = self.kv_b_proj(self.kv_a_layernorm(self.kv_a_proj_with_mqa(x)))
        kv = kv.unflatten(1, (self.heads, -1)).transpose(0, 1)
        scores = q @ kv[..., : self.nope].mT * self.nope**-0.5
        weights = scores.masked_fill(~self.indexer(x, low), -torch.inf).softmax(-1)
        return self.o_proj((weights @ kv[..., self.nope :]).transpose(0, 1).flatten(1))


class ClampedMlp(nn.Module):
    """swiglu_clamped; Glm5NextMLP is DeepseekV2MLP, whose silu_and_mul_clamp computes the same."""

    def __init__(self, config: SimpleNamespace, width: int):
        super().__init__()
        self.limit = config.swiglu_limit
        self.gate_proj, self.up_proj = linear(config.hidden_size, width), linear(config.hidden_size, width)
        self.down_proj = linear(width, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj(F.silu(self.gate_proj(x).clamp(max=self.limit)) * up)


class Experts(nn.Module):
    """Glm5NextMoE is DeepseekV2MoE."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        width, count = config.moe_intermediate_size, config.n_routed_experts
        self.chosen, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.gate = linear(config.hidden_size, count)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(count))
        self.experts = nn.ModuleList(ClampedMlp(config, width) for _ in range(count))
        self.shared_experts = ClampedMlp(config, width * config.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.gate.e_score_correction_bias).topk(self.chosen).indices
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        weights = self.scale * weights / weights.sum(-1, keepdim=True)
        return sum(weights[:, [i]] * expert(x) for i, expert in enumerate(self.experts)) + self.shared_experts(x)


class Layer(nn.Module):
    """Glm5NextDecoderLayer."""

    def __init__(self, config: SimpleNamespace, index: int):
        super().__init__()
        self.config, streams = config, config.hc_mult
        linear_layer = index in config.linear_attn_config["kda_layers"]
        self.self_attn = (BoundedDeltaAttention if linear_layer else SparseAttention)(config)
        dense = index < config.first_k_dense_replace
        self.mlp = ClampedMlp(config, config.intermediate_size) if dense else Experts(config)
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.add_module(name, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        outputs = (2 + streams) * streams
        for place in ("hc_attn", "hc_ffn"):
            fn = 0.05 * torch.randn(outputs, streams * config.hidden_size)
            self.register_parameter(f"{place}_fn", nn.Parameter(fn))
            self.register_parameter(f"{place}_base", nn.Parameter(torch.zeros(outputs)))
            self.register_parameter(f"{place}_scale", nn.Parameter(torch.ones(3)))

    def forward(self, x: Tensor) -> Tensor:
        """Maps streams [s, n, h] to the same."""
        for place, norm, part in (
            ("hc_attn", self.input_layernorm, self.self_attn),
            ("hc_ffn", self.post_attention_layernorm, self.mlp),
        ):
            pre, post, comb = self.mixing(x, place)
            out = part(norm((pre[..., None] * x).sum(1)))
            x = post[..., None] * out[:, None] + (comb[..., None] * x[:, :, None]).sum(1)  # _mhc_post_torch
        return x

    def mixing(self, x: Tensor, place: str) -> tuple[Tensor, Tensor, Tensor]:
        """_mhc_pre_torch of kernels/ops/layernorm/mhc.py."""
        n, eps = self.config.hc_mult, self.config.hc_eps
        fn, base, scale = (getattr(self, f"{place}_{name}") for name in ("fn", "base", "scale"))
        flat = x.flatten(1)
        mixes = flat @ fn.T * (flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + eps
        post = 2.0 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n)).softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return pre, post, comb


class Glm5Next(KimiLinear):
    """Glm5NextForConditionalGeneration's text part."""

    def __init__(self, config: SimpleNamespace):
        nn.Module.__init__(self)
        self.config, hidden = config, config.hidden_size
        self.model = nn.Module()
        text = self.model.language_model = nn.Module()
        text.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        text.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        text.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.lm_head = linear(hidden, config.vocab_size)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Glm5NextModel.forward; hc_expand and hc_contract of kernels/ops/layernorm/mhc.py."""
        text = self.model.language_model
        x = text.embed_tokens(tokens)[:, None].expand(-1, self.config.hc_mult, -1)
        for layer in text.layers:
            x = layer(x)
        return text.norm(x.mean(1))
