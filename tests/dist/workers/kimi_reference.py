"""Kimi-Linear by the equations of its report (arXiv 2510.26692), token by token and in float64: transformers 5.12
has no such model."""

import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 131, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "model_max_length": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "mla_use_nope": True,
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 4, "head_dim": 16,
                           "short_conv_kernel_size": 4},
    "num_experts": 8, "num_experts_per_token": 3, "num_shared_experts": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446,
}  # fmt: skip


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.15)
    return layer


class DeltaAttention(nn.Module):
    def __init__(self, config: SimpleNamespace):
        super().__init__()
        of, hidden = config.linear_attn_config, config.hidden_size
        self.heads, self.dim, kernel = of["num_heads"], of["head_dim"], of["short_conv_kernel_size"]
        values = self.heads * self.dim
        for name in "qkv":
            self.add_module(f"{name}_proj", linear(hidden, values))
            convolution = nn.Conv1d(values, values, kernel, groups=values, padding=kernel - 1, bias=False)
            self.add_module(f"{name}_conv1d", convolution)
        for name in "fg":
            self.add_module(f"{name}_a_proj", linear(hidden, self.dim))
            self.add_module(f"{name}_b_proj", linear(self.dim, values))
        self.b_proj, self.o_proj = linear(hidden, self.heads), linear(values, hidden)
        self.A_log = nn.Parameter(torch.zeros(1, 1, self.heads, 1))
        self.dt_bias = nn.Parameter(torch.zeros(values))
        self.o_norm = nn.RMSNorm(self.dim, eps=config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [s, h] to the same."""

        def mixed(name: str) -> Tensor:
            rows = self.get_submodule(f"{name}_proj")(x).T
            return F.silu(self.get_submodule(f"{name}_conv1d")(rows)[:, : len(x)]).T.unflatten(1, (self.heads, -1))

        q, k, v = (mixed(name) for name in "qkv")
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        decay = (self.f_b_proj(self.f_a_proj(x)) + self.dt_bias).unflatten(1, (self.heads, -1))
        decay = self.decays(decay, self.A_log.exp().view(-1, 1)).exp()  # [s, heads, d]
        beta = self.b_proj(x).sigmoid()[..., None]
        state = torch.zeros(self.heads, self.dim, self.dim, dtype=x.dtype)  # keys, values
        rows = []
        for t in range(len(x)):
            state = decay[t, :, :, None] * state
            error = v[t] - (k[t, :, None] @ state)[:, 0]
            state = state + k[t, :, :, None] * (beta[t] * error)[:, None]
            rows.append((q[t, :, None] @ state)[:, 0] * self.dim**-0.5)
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(1, (self.heads, -1))
        return self.o_proj((self.o_norm(torch.stack(rows)) * gate.sigmoid()).flatten(1))

    def decays(self, numbers: Tensor, rates: Tensor) -> Tensor:
        return -rates * F.softplus(numbers)


class LatentAttention(nn.Module):
    def __init__(self, config: SimpleNamespace):
        super().__init__()
        hidden, self.heads = config.hidden_size, config.num_attention_heads
        self.latent, self.nope, self.shared = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
        self.q_proj = linear(hidden, self.heads * (self.nope + self.shared))
        self.kv_a_proj_with_mqa = linear(hidden, self.latent + self.shared)
        self.kv_a_layernorm = nn.RMSNorm(self.latent, eps=config.rms_norm_eps)
        self.kv_b_proj = linear(self.latent, self.heads * (self.nope + config.v_head_dim))
        self.o_proj = linear(self.heads * config.v_head_dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(1, (self.heads, -1)).transpose(0, 1)
        latent, shared = self.kv_a_proj_with_mqa(x).split((self.latent, self.shared), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(1, (self.heads, -1)).transpose(0, 1)
        k = torch.cat((kv[..., : self.nope], shared.expand(self.heads, -1, -1)), -1)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.o_proj((weights @ kv[..., self.nope :]).transpose(0, 1).flatten(1))


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")):
        super().__init__()
        self.names = names
        for name, sizes in zip(names, ((hidden, width), (hidden, width), (width, hidden)), strict=True):
            self.add_module(name, linear(*sizes))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        return down(F.silu(gate(x)) * up(x))


class Experts(nn.Module):
    def __init__(self, config: SimpleNamespace):
        super().__init__()
        hidden, width, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.chosen, self.scale = config.num_experts_per_token, config.routed_scaling_factor
        self.gate = linear(hidden, count)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(count))
        self.experts = nn.ModuleList(Mlp(hidden, width, ("w1", "w3", "w2")) for _ in range(count))
        self.shared_experts = Mlp(hidden, width * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.gate.e_score_correction_bias).topk(self.chosen).indices
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        weights = self.scale * weights / weights.sum(-1, keepdim=True)
        routed = sum(weights[:, [i]] * expert(x) for i, expert in enumerate(self.experts))
        return routed + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, config: SimpleNamespace, number: int):
        super().__init__()
        recurrent = number in config.linear_attn_config["kda_layers"]
        self.self_attn = (DeltaAttention if recurrent else LatentAttention)(config)
        self.dense = number <= config.first_k_dense_replace
        if self.dense:
            self.mlp = Mlp(config.hidden_size, config.intermediate_size)
        else:
            self.block_sparse_moe = Experts(config)
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.add_module(name, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + (self.mlp if self.dense else self.block_sparse_moe)(self.post_attention_layernorm(x))


class KimiLinear(nn.Module):
    """Has parameters by the names of files, in float32, and computes in float64."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.config, hidden = config, config.hidden_size
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.model.layers = nn.ModuleList(Layer(config, i + 1) for i in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.lm_head = linear(hidden, config.vocab_size)

    def forward(self, tokens: Tensor, exact: bool = False) -> SimpleNamespace:
        """tokens [1, s]; logits [1, s, vocabulary]."""
        if not exact:
            weights = chain(self.named_parameters(), self.named_buffers())
            return functional_call(self, {name: t.double() for name, t in weights}, (tokens, True))
        return SimpleNamespace(logits=self.lm_head(self.hidden(tokens[0]))[None])

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.model.norm(x)

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(vars(self.config)))
        save_file(self.state_dict(), folder / "model.safetensors", {"format": "pt"})
