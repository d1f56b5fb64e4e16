"""Qwen3.8-Flash-Next (qwen4_exp) by SGLang's model files, token by token and in float64: transformers 5.12 has no such
model. Each class names the file and class, under sglang/srt, whose equations it has."""

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dist.workers.kimi_reference import KimiLinear, Mlp, linear

QWEN4_EXP = {
    "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "vocab_size": 131,
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "output_gate_type": "sigmoid", "norm_topk_prob": True,
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    # of up to 40 tokens a query sees 4 of 10 blocks; with many heads no two blocks tie at 0
    "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
    "indexer_compress_ratio": 4, "hc_count": 3, "hc_lowrank": 24,
    # n-grams end within four of the samples
    "ple_layer_ids": [2, 3], "ple_embed_dim": 48, "ple_conv_kernel_size": 3, "ngram_size": 3, "heads_per_ngram": 4,
    "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 32, "split_ngram_parts": 3, "seed": 1234,
    "eos_token_id": 66,
}  # fmt: skip
WORD = 2**64 - 1


class Norm(nn.Module):
    """layers/layernorm.py GemmaRMSNorm, and layers/hyperconnection.py GroupedGemmaRMSNorm: each group by itself."""

    def __init__(self, size: int, groups: int = 1):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.zeros(size * groups))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(-1, (self.groups, -1))
        return (rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2) * (1 + self.weight)


class GatedResidual(nn.Module):
    """layers/hyperconnection.py GatedResidual, _mix_compute and _combine_compute."""

    def __init__(self, config: SimpleNamespace, injects: bool = True):
        super().__init__()
        self.n, wide = config.hc_count, config.hc_count * config.hidden_size
        self.hc_norm = Norm(config.hidden_size, self.n)
        self.input_mix_weight_down, self.input_mix_weight_up = (
            linear(wide, config.hc_lowrank),
            linear(config.hc_lowrank, wide),
        )
        self.injects = injects
        if injects:
            self.block_inject_weight = linear(wide, self.n)

    def mix(self, streams: Tensor) -> Tensor:
        rows = self.hc_norm(streams)
        gate = self.input_mix_weight_up(F.silu(self.input_mix_weight_down(rows) / self.n)).sigmoid()
        return (gate * rows).unflatten(-1, (self.n, -1)).mean(-2)

    def combine(self, output: Tensor, streams: Tensor) -> Tensor:
        inject = 2 * (self.block_inject_weight(self.hc_norm(streams)) / self.n).sigmoid()
        return streams + (inject[..., None] * output[:, None]).flatten(1)


class DeltaNet(nn.Module):
    """models/qwen3_5.py Qwen3_5GatedDeltaNet, with the output gate of its config's output_gate_type."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.heads, self.values = config.linear_num_key_heads, config.linear_num_value_heads
        self.dim, self.width, hidden = config.linear_key_head_dim, config.linear_value_head_dim, config.hidden_size
        channels = 2 * self.heads * self.dim + self.values * self.width
        self.in_proj_qkv, self.in_proj_z = linear(hidden, channels), linear(hidden, self.values * self.width)
        self.in_proj_b, self.in_proj_a = linear(hidden, self.values), linear(hidden, self.values)
        kernel = config.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels, padding=kernel - 1, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(self.values)), nn.Parameter(torch.zeros(self.values))
        self.norm = nn.RMSNorm(self.width, eps=config.rms_norm_eps)
        self.out_proj = linear(self.values * self.width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.silu(self.conv1d(self.in_proj_qkv(x).T)[:, : len(x)]).T
        q, k, v = mixed.split((self.heads * self.dim, self.heads * self.dim, self.values * self.width), -1)
        q, k = (t.unflatten(1, (self.heads, -1)).repeat_interleave(self.values // self.heads, 1) for t in (q, k))
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        v = v.unflatten(1, (self.values, -1))
        decay = (-self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)).exp()
        beta = self.in_proj_b(x).sigmoid()
        state = torch.zeros(self.values, self.dim, self.width, dtype=x.dtype)
        rows = []
        for t in range(len(x)):
            state = decay[t, :, None, None] * state
            error = v[t] - (k[t, :, None] @ state)[:, 0]
            state = state + k[t, :, :, None] * (beta[t, :, None] * error)[:, None]
            rows.append((q[t, :, None] @ state)[:, 0] * self.dim**-0.5)
        gate = self.in_proj_z(x).unflatten(1, (self.values, -1)).sigmoid()
        return self.out_proj((self.norm(torch.stack(rows)) * gate).flatten(1))


def turned(x: Tensor, places: Tensor, width: int) -> Tensor:
    """Halves of the first `width` numbers of x [s, heads, d] turn by their places (theta 1e4)."""
    angles = places[:, None] * 1e4 ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second, rest = x.split((width // 2, width // 2, x.shape[-1] - width), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


class Indexer(nn.Module):
    """layers/attention/qsa/qsa_indexer.py QSAIndexer, mqa.py torch_qsa_mqa_prefill, kernel.py
    torch_expand_qsa_block_indices."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.heads, self.dim = config.indexer_n_heads, config.indexer_head_dim
        self.ratio, self.blocks = config.indexer_compress_ratio, config.indexer_budget // config.indexer_compress_ratio
        self.index_qk_proj = linear(config.hidden_size, (self.heads + 1) * self.dim)
        self.q_layernorm, self.k_layernorm = Norm(self.dim), Norm(self.dim)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x: Tensor, width: int) -> list[list[int]]:
        """Returns the places that each query sees."""
        q, k = self.index_qk_proj(x).split((self.heads * self.dim, self.dim), -1)
        places = torch.arange(len(x), dtype=x.dtype)
        q = turned(self.q_layernorm(q.unflatten(1, (self.heads, -1))), places, width)
        whole = len(x) // self.ratio
        pooled = k[: whole * self.ratio].unflatten(0, (whole, self.ratio)).mean(1)
        pooled = turned(self.k_layernorm(pooled)[:, None], places[:: self.ratio][:whole], width)[:, 0]
        rows = []
        for t in range(len(x)):
            before = (t + 1) // self.ratio
            scores = (q[t] @ pooled[:before].T).relu().sum(0) / math.sqrt(self.dim)
            best = scores.topk(min(self.blocks, before)).indices.tolist()
            seen = [block * self.ratio + place for block in best for place in range(self.ratio)]
            rows.append([*seen, *range(before * self.ratio, t + 1)])
        return rows


class Attention(nn.Module):
    """models/qwen4_exp.py Qwen4ExpAttentionDecoderLayer.self_attention: gated, normed, partly turned, sparse."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        hidden, self.heads, self.groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.dim = config.head_dim
        self.width = int(self.dim * config.rope_parameters["partial_rotary_factor"])
        self.q_proj = linear(hidden, 2 * self.heads * self.dim)
        self.k_proj, self.v_proj = (linear(hidden, self.groups * self.dim) for _ in "kv")
        self.o_proj = linear(self.heads * self.dim, hidden)
        self.q_norm, self.k_norm, self.indexer = Norm(self.dim), Norm(self.dim), Indexer(config)

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.q_proj(x).unflatten(1, (self.heads, 2, -1)).unbind(2)
        k, v = (proj(x).unflatten(1, (self.groups, -1)) for proj in (self.k_proj, self.v_proj))
        places = torch.arange(len(x), dtype=x.dtype)
        q, k = turned(self.q_norm(q), places, self.width), turned(self.k_norm(k), places, self.width)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        rows = []
        for t, seen in enumerate(self.indexer(x, self.width)):
            weights = (torch.einsum("hd,khd->hk", q[t], k[seen]) * self.dim**-0.5).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, v[seen]))
        return self.o_proj((torch.stack(rows) * gate.sigmoid()).flatten(1))


class Experts(nn.Module):
    """models/qwen2_moe.py Qwen2MoeSparseMoeBlock, with files' fused experts."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        hidden, width, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.chosen = config.num_experts_per_tok
        self.gate, self.shared_expert_gate = linear(hidden, count), linear(hidden, 1)
        self.shared_expert = Mlp(hidden, config.shared_expert_intermediate_size)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(0.15 * torch.randn(count, 2 * width, hidden))
        self.experts.down_proj = nn.Parameter(0.15 * torch.randn(count, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best = scores.topk(self.chosen)
        weights = torch.zeros_like(scores).scatter(1, best.indices, best.values)
        weights = weights / weights.sum(-1, keepdim=True)
        out = self.shared_expert(x) * self.shared_expert_gate(x).sigmoid()
        for i, (both, down) in enumerate(zip(self.experts.gate_up_proj, self.experts.down_proj, strict=True)):
            gate, up = (x @ both.T).chunk(2, -1)
            out = out + weights[:, [i]] * ((F.silu(gate) * up) @ down.T)
        return out


class NGrams(nn.Module):
    """models/qwen4_exp.py Qwen4ExpNGramEmbedding, one token's n-grams after the other."""

    def __init__(self, config: SimpleNamespace, number: int):
        super().__init__()
        self.longest, self.each, self.end = config.ngram_size, config.heads_per_ngram, config.eos_token_id
        heads = (self.longest - 1) * self.each
        primes = [n for n in range(config.ngram_vocab_size_base, 4000) if all(n % d for d in range(2, n))]
        self.sizes = primes[number * heads : (number + 1) * heads]
        half = max(1, (2**63 - 1) // config.vocab_size // 2)
        self.multipliers = []
        for place in range(self.longest):
            x = (config.seed + 10007 * number + 0x9E3779B97F4A7C15 * (place + 1)) & WORD
            x = (x + 0x9E3779B97F4A7C15) & WORD
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
            self.multipliers.append(2 * ((x ^ (x >> 31)) % half) + 1)
        divisor = config.make_ngram_vocab_size_divisible_by
        rows = math.ceil(sum(self.sizes) / divisor) * divisor
        table = torch.randn(rows, config.ple_embed_dim // heads)
        self.ngram_embedding = nn.Module()
        for i, part in enumerate(table.split(math.ceil(rows / config.split_ngram_parts))):
            shard = nn.Module()
            shard.weight = nn.Parameter(part.clone(), requires_grad=False)
            self.ngram_embedding.add_module(f"shard_{i}", shard)
        self.register_buffer("layer_multipliers", torch.tensor(self.multipliers))
        self.register_buffer("ngram_heads_vocab_sizes", torch.tensor(self.sizes))

    def forward(self, tokens: list[int]) -> Tensor:
        table = torch.cat([shard.weight for shard in self.ngram_embedding.children()])
        rows = []
        for t in range(len(tokens)):
            window = [tokens[t]]
            for back in range(1, self.longest):  # nothing before an end token, or the sequence, is seen
                ended = t < back or self.end in tokens[t - back : t]
                window.append(self.end if ended else tokens[t - back])
            ids, start = [], 0
            for head, size in enumerate(self.sizes):
                mixed = 0
                for place in range(2 + head // self.each):
                    mixed ^= window[place] * self.multipliers[place]
                ids.append(mixed % size + start)
                start += size
            rows.append(table[ids].flatten())
        return torch.stack(rows)


class PerLayerEmbedding(nn.Module):
    """models/qwen4_exp.py Qwen4ExpPLELayer.forward and _short_conv."""

    def __init__(self, config: SimpleNamespace, number: int):
        super().__init__()
        self.n, self.apart, self.kernel = config.hc_count, config.ngram_size, config.ple_conv_kernel_size
        hidden, wide = config.hidden_size, config.hc_count * config.hidden_size
        self.ple_embedding = NGrams(config, number)
        self.key_proj, self.value_proj = linear(config.ple_embed_dim, wide), linear(config.ple_embed_dim, hidden)
        for name in ("key", "query", "conv"):
            self.add_module(f"norm_{name}", Norm(hidden, self.n))
        self.conv1d = nn.Conv1d(wide, wide, self.kernel, groups=wide, dilation=self.apart, bias=False)

    def forward(self, streams: Tensor, tokens: list[int]) -> Tensor:
        rows = self.ple_embedding(tokens).to(streams.dtype)
        product = self.norm_key(self.key_proj(rows)) * self.norm_query(streams)
        gate = product.unflatten(1, (self.n, -1)).sum(-1) / math.sqrt(product.shape[1] / self.n)
        gate = (gate.abs().clamp_min(1e-6).sqrt() * gate.sign()).sigmoid()
        value = (gate[..., None] * self.value_proj(rows)[:, None]).flatten(1)
        before = F.pad(self.norm_conv(value).T, ((self.kernel - 1) * self.apart, 0))
        return value + F.silu(self.conv1d(before)).T


class Layer(nn.Module):
    """models/qwen4_exp.py Qwen4ExpLayerExtensionMixin."""

    def __init__(self, config: SimpleNamespace, number: int):
        super().__init__()
        self.linear = number % config.full_attention_interval > 0
        if self.linear:
            self.linear_attn = DeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.mlp = Experts(config)
        self.attn_hyper_connection, self.mlp_hyper_connection = GatedResidual(config), GatedResidual(config)
        self.adds = number in config.ple_layer_ids
        if self.adds:
            self.ple = PerLayerEmbedding(config, config.ple_layer_ids.index(number))

    def forward(self, streams: Tensor, tokens: list[int]) -> Tensor:
        if self.adds:
            streams = streams + self.ple(streams, tokens)
        mixer = self.linear_attn if self.linear else self.self_attn
        for place, part in ((self.attn_hyper_connection, mixer), (self.mlp_hyper_connection, self.mlp)):
            streams = place.combine(part(place.mix(streams)), streams)
        return streams


class Qwen4Exp(KimiLinear):
    """models/qwen4_exp.py Qwen4ExpModel.forward."""

    def __init__(self, config: SimpleNamespace):
        nn.Module.__init__(self)
        self.config, self.model = config, nn.Module()
        text = self.model.language_model = nn.Module()
        text.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        text.layers = nn.ModuleList(Layer(config, i + 1) for i in range(config.num_hidden_layers))
        text.hyper_connection_mixer = GatedResidual(config, injects=False)
        self.lm_head = linear(config.hidden_size, config.vocab_size)

    def hidden(self, tokens: Tensor) -> Tensor:
        text = self.model.language_model
        streams = text.embed_tokens(tokens).repeat(1, self.config.hc_count)
        for layer in text.layers:
            streams = layer(streams, tokens.tolist())
        return text.hyper_connection_mixer.mix(streams)
