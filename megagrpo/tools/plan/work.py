"""The work of an optimizer element and of a token, from config.json: bytes and FLOPs. No torch."""

from dataclasses import dataclass

import numpy as np

from megagrpo.config.actor import ActorConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.costs import ITEM
from megagrpo.models.table import text_tensors

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}
HOST_ADAM_BYTES = 16  # of an element on the host: float32 weight, gradient and both moments


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of one trained element."""

    gradient: float  # of the buffer that every rank holds
    state: float  # on the GPU, of the ranks that share it
    host: float  # on the host, of the ranks that share it


def optimizer_bytes(actor: ActorConfig) -> OptimizerBytes:
    """Returns the bytes of main gradients, float32 copies of bfloat16 weights, and both moments.

    The host has float32 weights, gradients and moments, whatever the types on the GPU. By default
    the optimizer keeps remainders (the 16 bits that bfloat16 leaves out) instead of float32
    weights.
    """
    given = actor.optimizer.megatron
    if actor.dtype == "float32":
        return OptimizerBytes(gradient=4, state=8, host=0)
    aware = bool(given.get("use_precision_aware_optimizer"))
    gradient = _BYTES.get(str(given.get("main_grads_dtype")), 4)
    master = 2 if aware and given.get("store_param_remainders", True) else 4
    if given.get("optimizer_cpu_offload"):
        share = given.get("optimizer_offload_fraction", 1.0)
        if not isinstance(share, int | float):
            share = 1.0  # a rule refuses it
        return OptimizerBytes(gradient, state=12 * (1 - share), host=HOST_ADAM_BYTES * share)
    return OptimizerBytes(gradient, state=master + 8, host=0)


@dataclass(frozen=True)
class ModelWork:
    """Counts what the forward pass of one token needs; FLOPs are two a multiply-add."""

    arch: Architecture
    # weights of all layers that every token meets: attention, norms, router, shared experts or the
    # MLP
    dense: int
    expert: int  # weights of all routed experts
    attention: float  # of a layer's weights, the mean of those that attention's heads divide
    whole: float  # likewise, those that every tensor-parallel rank holds whole
    shared: int  # weights of the experts that every token meets, of all layers

    @property
    def vocabulary(self) -> int:
        """Counts the weights of the embedding, and of the output layer, which a tied model shares
        with it."""
        return self.arch.vocab_size * self.arch.hidden_size

    @property
    def share(self) -> float:
        """Returns the part of the routed experts that a token meets."""
        return self.arch.experts.share if self.arch.experts else 0.0

    @property
    def layers(self) -> int:
        """Counts the layers, a draft's among them."""
        return self.arch.num_layers + self.arch.draft

    @property
    def token_flops(self) -> float:
        """Returns the FLOPs of one token without attention's own products, head included."""
        return 2.0 * self.dense + 2.0 * self.expert * self.share + 2.0 * self.vocabulary

    def seen(self, tokens: np.ndarray | float) -> np.ndarray | float:
        """Returns how many of so many earlier tokens attention reads in the mean of layers: all,
        a window, or what an indexer chooses."""
        share = self.arch.attention.limited_share
        limited = np.minimum(tokens, self.arch.attention.most_keys)
        return share * limited + (1.0 - share) * tokens

    @property
    def index_bytes(self) -> int:
        """Returns the bytes of one token in one rank's cache that an indexer reads."""
        return self.arch.attention.index_bytes(self.arch.attention_layers)

    def cache_bytes(self, attention_tp: int, width: int = ITEM) -> int:
        """Returns the bytes of one token in one rank's cache. attention_tp: ranks that share the
        heads."""
        values = self.arch.attention.cached_values(attention_tp)
        layers = self.arch.attention_layers + self.arch.draft
        return layers * values * width + self.index_bytes

    def state_bytes(self, attention_tp: int, width: int = ITEM) -> int:
        """Returns the bytes of one request's recurrent state in one rank."""
        recurrent = self.arch.recurrent
        return 0 if recurrent is None else recurrent.state_bytes(attention_tp, width)


def model_work(arch: Architecture) -> ModelWork:
    """Counts the tensors of a model's text part; tokens of text do not meet a vision tower."""
    dense = expert = whole = attention = shared = 0
    for spec in text_tensors(arch):
        words = spec.name.split(".")
        if words[:2] != ["model", "layers"]:
            continue
        if spec.expert:
            expert += spec.size
            continue
        dense += spec.size
        shared += spec.size * (words[4].startswith("shared_expert") and not spec.whole)
        attention += spec.size * (words[3].endswith("_attn") and not spec.whole)
        whole += spec.size * spec.whole
    layers = arch.num_layers + arch.draft
    return ModelWork(arch, dense, expert, attention / layers, whole / layers, shared)
