"""Families that see: Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE, each its text family with a vision tower before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from megagrpo.families.architecture import Architecture, HfConfig, every_scaling_refused
from megagrpo.families.family import Family
from megagrpo.families.models.dense import Qwen2, Qwen3
from megagrpo.families.models.softmax_moe import Qwen3Moe
from megagrpo.families.tensors import TensorSpec
from megagrpo.families.vision import mrope_of, read_vision, vision_refusals

if TYPE_CHECKING:
    from torch import Tensor


class Seeing(Family):
    """Reads a config.json whose text part stands in text_config, or beside vision_config as older ones have it."""

    KIND: ClassVar[Literal["qwen2_5_vl", "qwen3_vl"]]
    ROPE_SCALING_REFUSALS = staticmethod(every_scaling_refused)

    def refusals(self, hf: HfConfig) -> list[str]:
        text = _text_part(hf)
        return super().refusals(text) or vision_refusals(hf, text, self.KIND)

    def architecture(self, hf: HfConfig) -> Architecture:
        text = _text_part(hf)
        return replace(super().architecture(text), vision=read_vision(hf, text, self.KIND))


class Qwen25VL(Seeing, Qwen2):
    """Qwen2.5 with a tower of windowed attention."""

    HF_CLASS = "Qwen2_5_VLForConditionalGeneration"
    KIND = "qwen2_5_vl"


class Qwen3VL(Seeing, Qwen3):
    """Qwen3 with a tower whose inner features are added behind the first layers, too."""

    HF_CLASS = "Qwen3VLForConditionalGeneration"
    KIND = "qwen3_vl"

    def stored_name(self, name: str) -> str:
        return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


class Qwen3VLMoe(Qwen3VL, Qwen3Moe):
    """Qwen3-MoE with that tower; a layer's experts are two tensors, each expert's matrices transposed."""

    HF_CLASS = "Qwen3VLMoeForConditionalGeneration"

    def stored(self, hf: Mapping[str, Tensor], name: str) -> Tensor:
        layer, found, expert = name.partition(".experts.")
        if not found:
            return super().stored(hf, name)
        number, projection, _ = expert.split(".")
        prefix = self.stored_name(layer) + ".experts."
        if projection == "down_proj":
            return hf[prefix + "down_proj"][int(number)].t()
        both = hf[prefix + "gate_up_proj"][int(number)]
        width = both.shape[1] // 2
        return (both[:, :width] if projection == "gate_proj" else both[:, width:]).t()

    def layer_tensors(self, arch: Architecture, index: int) -> Iterator[TensorSpec]:
        experts, hidden, width = arch.num_experts, arch.hidden_size, arch.expert_ffn_size
        for spec in super().layer_tensors(arch, index):
            if not spec.expert:
                yield spec
        prefix = f"model.layers.{index}.mlp.experts."
        yield TensorSpec(prefix + "gate_up_proj", (experts, hidden, 2 * width), "matrix", True)
        yield TensorSpec(prefix + "down_proj", (experts, width, hidden), "matrix", True)


def _text_part(hf: HfConfig) -> dict:
    """Returns the keys of the text part as a text model's config.json has them, sections of rotary embedding left out.

    Sections are no scaling: with equal positions in time, height and width they change nothing.
    """
    text = {**hf, **(hf.get("text_config") or {}), "model_type": hf["model_type"]}
    text["tie_word_embeddings"] = bool(hf.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    rope = mrope_of(text)
    plain = rope.get("rope_type", rope.get("type", "default")) in ("default", "mrope")
    if plain and text.get("rope_scaling"):
        text = {**text, "rope_scaling": None, "rope_parameters": {**(text.get("rope_parameters") or {}), **rope}}
        text["rope_parameters"]["rope_type"] = "default"
    return text
