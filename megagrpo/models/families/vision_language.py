"""Families that see: Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE, each its text family with a vision
tower before it."""

from __future__ import annotations

from typing import ClassVar, Literal

from megagrpo.models.config_json import COMMON_SIZE_KEYS, HfConfig, every_scaling_refused
from megagrpo.models.families.softmax_moe import Qwen2, Qwen3, Qwen3Moe
from megagrpo.models.family import Family, TinySizes
from megagrpo.models.kinds.vision.describe import Vision, vision_refusals
from megagrpo.models.stored.fused_experts import FusedExperts

# of the text part and of the tower, and what follows from the size of a head
_SIZE_KEYS = {
    "text_config",
    "vision_config",
    "rope_scaling",
    "rope_parameters",
    "image_token_id",
    "video_token_id",
}
_SIZE_KEYS |= {"vision_start_token_id", "vision_end_token_id"}


class Seeing(Family):
    """Reads the vision_config beside a text part."""

    KIND: ClassVar[Literal["qwen2_5_vl", "qwen3_vl"]]
    TINY_TOWER: ClassVar[dict[str, object]]  # its own keys in a tiny model
    SIZE_KEYS = COMMON_SIZE_KEYS | _SIZE_KEYS
    ROPE_SCALING_REFUSALS = staticmethod(every_scaling_refused)
    FP8_REFUSAL = "not for vision-language models"

    def tiny_options(self, sizes: TinySizes) -> dict[str, object]:
        half = sizes.head_dim // 2
        rope = {
            "rope_type": "default",
            "mrope_section": [half - 2 * (half // 4), half // 4, half // 4],
            "mrope_interleaved": self.KIND == "qwen3_vl",
        }
        tower = {
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "out_hidden_size": sizes.hidden_size,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            **self.TINY_TOWER,
        }
        ids = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5}
        return super().tiny_options(sizes) | ids | {"rope_scaling": rope, "vision_config": tower}

    def refusals(self, hf: HfConfig) -> list[str]:
        return super().refusals(hf) or vision_refusals(hf, self.KIND)

    def vision(self, hf: HfConfig) -> Vision:
        return Vision.read(hf, self.KIND)


class Qwen25VL(Seeing, Qwen2):
    """Qwen2.5 with a tower of windowed attention."""

    HF_CLASS = "Qwen2_5_VLForConditionalGeneration"
    KIND = "qwen2_5_vl"
    TINY_TOWER: ClassVar = {"window_size": 16, "fullatt_block_indexes": [1]}


class Qwen3VL(Seeing, Qwen3):
    """Qwen3 with a tower whose inner features are added behind the first layers, too."""

    HF_CLASS = "Qwen3VLForConditionalGeneration"
    KIND = "qwen3_vl"
    TINY_TOWER: ClassVar = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}


class Qwen3VLMoe(FusedExperts, Qwen3VL, Qwen3Moe):
    """Qwen3-MoE with that tower; a layer's experts are two tensors, each expert's matrices
    transposed."""

    HF_CLASS = "Qwen3VLMoeForConditionalGeneration"
    SIZE_KEYS = Qwen3Moe.SIZE_KEYS | _SIZE_KEYS
    TRANSPOSED = True

    def own_refusals(self, hf: HfConfig) -> list[str]:
        # absent as in older files: transformers' router and SGLang's default both divide
        return super().own_refusals({"norm_topk_prob": True, **hf})
