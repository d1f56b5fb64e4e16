"""What a model costs a token: multiply-adds and bytes of each layer, from its list of tensors and its attention."""

from dataclasses import dataclass

from megagrpo.families.architecture import Architecture
from megagrpo.families.table import model_tensors

ITEM = 2  # bytes of a bf16 value


@dataclass(frozen=True)
class LayerWork:
    """Counts the weights of one decoder layer."""

    dense: int  # attention, norms, router, shared experts or the MLP: every token meets them
    expert: int  # of all routed experts


@dataclass(frozen=True)
class ModelWork:
    """Counts what the forward pass of one token needs; FLOPs are two a multiply-add."""

    layers: tuple[LayerWork, ...]
    embedding: int  # weights
    head: int  # weights of the output layer, which a tied model shares with the embedding
    tied: bool
    hidden: int
    num_heads: int
    num_kv_heads: int
    experts: int
    experts_per_token: int
    expert_size: int  # weights of one routed expert
    qk_dim: int  # of one head, as the trainer multiplies them
    v_dim: int
    latent: int  # values a token and layer of a latent cache; 0: keys and values of heads
    attention: int  # of a layer's weights, projections that attention's heads divide
    whole: int  # of a layer's weights, those that every tensor-parallel rank holds whole
    rope_dim: int = 0  # of a latent, what no value is computed from

    @property
    def share(self) -> float:
        """Returns the part of the routed experts that a token meets."""
        return self.experts_per_token / self.experts if self.experts else 0.0

    def forward_flops(self, layer: LayerWork) -> tuple[float, float]:
        """Returns a token's FLOPs in one layer without attention's own products: dense, experts."""
        return 2.0 * layer.dense, 2.0 * layer.expert * self.share

    @property
    def attention_flops(self) -> float:
        """Returns the FLOPs of one token with one earlier token, of one layer: scores and their sum."""
        return 2.0 * self.num_heads * (self.qk_dim + self.v_dim)

    @property
    def decode_attention_flops(self) -> float:
        """Returns the same in an engine, which multiplies with the latent itself where the cache holds latents."""
        if not self.latent:
            return self.attention_flops
        return 2.0 * self.num_heads * (2 * self.latent - self.rope_dim)

    def cache_bytes(self, attention_tp: int, width: int = ITEM) -> int:
        """Returns the bytes of one token in one rank's cache.

        Heads are divided over the ranks and repeated where there are fewer than ranks; a latent is on every rank.
        """
        if self.latent:
            return len(self.layers) * self.latent * width
        return len(self.layers) * 2 * max(1, self.num_kv_heads // attention_tp) * self.qk_dim * width

    @property
    def total(self) -> int:
        """Counts all weights."""
        layers = sum(layer.dense + layer.expert for layer in self.layers)
        return layers + self.embedding + (0 if self.tied else self.head) + self.hidden  # and the last norm


def model_work(arch: Architecture) -> ModelWork:
    """Counts the tensors of a model."""
    dense, expert = [0] * arch.num_layers, [0] * arch.num_layers
    whole = attention = expert_size = 0
    for spec in model_tensors(arch):
        words = spec.name.split(".")
        if words[:2] != ["model", "layers"]:
            continue
        index = int(words[2])
        if spec.expert:
            expert[index] += spec.size
        else:
            dense[index] += spec.size
            if index < arch.num_layers - 1:
                continue
            if spec.whole:
                whole += spec.size
            elif words[3] == "self_attn":
                attention += spec.size
    if arch.num_experts:
        expert_size = 3 * arch.hidden_size * arch.expert_ffn_size
    mla = arch.mla
    vocabulary = arch.vocab_size * arch.hidden_size
    return ModelWork(
        layers=tuple(LayerWork(*counts) for counts in zip(dense, expert, strict=True)),
        embedding=vocabulary,
        head=vocabulary,
        tied=arch.tied,
        hidden=arch.hidden_size,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        experts=arch.num_experts,
        experts_per_token=arch.experts_per_token,
        expert_size=expert_size,
        qk_dim=mla.nope_dim + mla.rope_dim if mla else arch.head_dim,
        v_dim=mla.v_dim if mla else arch.head_dim,
        latent=mla.kv_lora_rank + mla.rope_dim if mla else 0,
        attention=attention,
        whole=whole,
        rope_dim=mla.rope_dim if mla else 0,
    )
