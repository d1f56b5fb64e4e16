"""The description of a family: Llama's way, and what a subclass in models/ says or does
differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from megagrpo.models.architecture import Architecture, Attention, Part, Recurrent
from megagrpo.models.config_json import (
    HfConfig,
    llama3_refusals,
    missing_keys,
    other_values,
    rope_scaling,
    rotary_fraction,
)
from megagrpo.models.kinds.experts.describe import Experts
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.ngrams.describe import NGrams
from megagrpo.models.kinds.streams import ResidualStreams
from megagrpo.models.kinds.vision.describe import Vision
from megagrpo.models.tensors import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


class Family:
    """Reads, loads and lists models of one architecture."""

    REQUIRED_KEYS: ClassVar[tuple[str, ...]] = ()  # of config.json, besides the common ones
    ROPE_SCALING_REFUSALS = staticmethod(llama3_refusals)
    PARTIAL_ROTARY: ClassVar[bool] = False  # rotary embedding may apply to part of a head
    ROPE_THETA: ClassVar[float] = 10_000.0  # transformers' and engines', if config.json has none
    LOADS_ATTENTION_BIAS: ClassVar[bool] = False
    FP8_REFUSAL: ClassVar[str] = ""  # why engines cannot have weights of such a model in FP8
    SHARES_ATTENTION: ClassVar[bool] = True  # with SGLang's enable_dp_attention
    LEFT_OUT: ClassVar[tuple[str, ...]] = ()  # begin the names of tensors that are not loaded
    # begins those of layers, where files have layers behind the last that only speculate
    LAYERS: ClassVar[str] = "model.layers."
    CHAT_MODULE: ClassVar[str] = ""  # of SGLang, which writes chats of a model without a template
    DRAFT_REFUSAL: ClassVar[str] = ""  # why actor.draft is not supported
    CENTERED_NORMS: ClassVar[bool] = False  # RMSNorms multiply by 1 + weight
    GATED: ClassVar[bool] = True  # of Architecture

    def __init__(self, part: str = ""):
        """part: what files of a vision-language model put before the names of the text part."""
        self._part = part

    def common(self, hf: HfConfig) -> HfConfig:
        """Returns a config.json with the keys that other families have."""
        return {"rope_theta": self.ROPE_THETA, **hf}

    def refusals(self, hf: HfConfig) -> list[str]:
        """Returns what would fail, or be silently wrong, with this config.json: missing keys,
        unsupported options."""
        hf = self.common(hf)
        problems = missing_keys(hf, self.REQUIRED_KEYS)
        if problems:
            return problems
        problems = self.own_refusals(hf)
        experts = hf.get("num_experts") or hf.get("num_local_experts") or hf.get("n_routed_experts")
        chosen = hf.get("num_experts_per_tok") or 0
        if experts and chosen > experts:
            problems.append(f"num_experts_per_tok is more than its {experts} experts")
        if experts and chosen < 2 and hf.get("norm_topk_prob", True):
            # Megatron divides scores by their sum only if there are several
            problems.append(
                f"num_experts_per_tok {chosen} is not supported: one expert's score would not be "
                "divided by itself"
            )
        attention = self.attention(hf)
        if self.PARTIAL_ROTARY and isinstance(attention, GroupedQuery):
            turning = attention.head_dim * attention.rotary.fraction
            if turning % 2:
                problems.append(
                    f"partial_rotary_factor turns {turning:g} of head_dim {attention.head_dim}; "
                    "rotary turns pairs"
                )
        if scaling := rope_scaling(hf):
            problems += self.ROPE_SCALING_REFUSALS(scaling)
        if not self.PARTIAL_ROTARY and (fraction := rotary_fraction(hf)) != 1.0:
            problems.append(
                f"partial_rotary_factor {fraction} is not supported by this family; it must be 1"
            )
        # queries by chunks of positions, which SGLang turns so and no attention of its takes
        absent = ["mlp_bias", "use_sliding_window", "dual_chunk_attention_config"]
        absent += [] if self.LOADS_ATTENTION_BIAS else ["attention_bias"]
        only = {"hidden_act": "silu", **dict.fromkeys(absent, (False, None))}
        return problems + other_values(hf, only)

    def own_refusals(self, hf: HfConfig) -> list[str]:
        """Returns the problems with a config.json without missing keys that only this family
        has."""
        return []

    def architecture(self, hf: HfConfig) -> Architecture:
        """Reads a config.json that has no refusals."""
        hf = self.common(hf)
        return Architecture(
            family=hf["model_type"],
            hidden_size=hf["hidden_size"],
            num_layers=hf["num_hidden_layers"],
            ffn_size=hf["intermediate_size"],
            vocab_size=hf["vocab_size"],
            max_positions=hf["max_position_embeddings"],
            rms_eps=hf["rms_norm_eps"],
            tied=bool(hf.get("tie_word_embeddings", False)),
            attention=self.attention(hf),
            centered_norms=self.CENTERED_NORMS,
            recurrent=self.recurrent(hf),
            parts=self.parts(hf),
            gated=self.GATED,
            experts=self.experts(hf),
            streams=self.streams(hf),
            ngrams=self.ngrams(hf),
            vision=self.vision(hf),
        )

    def attention(self, hf: HfConfig) -> Attention:
        """Reads the attention of a config.json without refusals."""
        return GroupedQuery.read(hf)

    def recurrent(self, hf: HfConfig) -> Recurrent | None:
        """Reads what keeps a state in place of keys and values, None if no layer does."""
        return None

    def parts(self, hf: HfConfig) -> tuple[Part, ...]:
        """Reads what each layer is, if it is one thing only."""
        return ()

    def experts(self, hf: HfConfig) -> Experts | None:
        """Reads the experts, None if there are none."""
        return None

    def streams(self, hf: HfConfig) -> ResidualStreams | None:
        """Reads what mixes residual streams, None if there is one."""
        return None

    def ngrams(self, hf: HfConfig) -> NGrams | None:
        """Reads which layers have embeddings of n-grams, None if none has."""
        return None

    def vision(self, hf: HfConfig) -> Vision | None:
        """Reads the vision tower, None if there is none."""
        return None

    def layer_tensors(self, arch: Architecture, index: int) -> Iterator[TensorSpec]:
        """Yields the HF tensors of layer `index`, counted from 0, in the order in which a random
        model draws them."""
        return arch.layer_tensors(index)

    def exported_config(self, hf: HfConfig) -> HfConfig:
        """Returns the config.json of what is exported and published, quantization left out."""
        return hf

    def stored_name(self, name: str) -> str:
        """Returns what checkpoints call a tensor of the text part that other families call
        `name`."""
        return f"model.{self._part}{name[6:]}" if name.startswith("model.") else name

    def engine_path(self, path: str) -> str:
        """Returns what SGLang calls a module of the text part that it calls `path` in other
        families."""
        return path

    def stored(self, hf: Mapping[str, Tensor], name: str) -> Tensor:
        """Returns the tensor that other families call `name`, or a view of where it lies."""
        return hf[self.stored_name(name)]
