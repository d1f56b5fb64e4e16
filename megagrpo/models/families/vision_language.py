"""Families that see: Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE, each its text family with a vision
tower before it."""

from typing import ClassVar, Literal

from megagrpo.models.config_json import HfConfig, every_scaling_refused
from megagrpo.models.families.softmax_moe import Qwen2, Qwen3, Qwen3Moe
from megagrpo.models.family import Family
from megagrpo.models.kinds.vision.describe import Vision, vision_refusals
from megagrpo.models.stored.fused_experts import FusedExperts


class Seeing(Family):
    """Reads the vision_config beside a text part."""

    KIND: ClassVar[Literal["qwen2_5_vl", "qwen3_vl"]]
    ROPE_SCALING_REFUSALS = staticmethod(every_scaling_refused)
    FP8_REFUSAL = "not for vision-language models"

    def refusals(self, hf: HfConfig) -> list[str]:
        return super().refusals(hf) or vision_refusals(hf, self.KIND)

    def vision(self, hf: HfConfig) -> Vision:
        return Vision.read(hf, self.KIND)


class Qwen25VL(Seeing, Qwen2):
    """Qwen2.5 with a tower of windowed attention."""

    ROPE_THETA = 1e6
    KIND = "qwen2_5_vl"


class Qwen3VL(Seeing, Qwen3):
    """Qwen3 with a tower whose inner features are added behind the first layers, too."""

    ROPE_THETA = 500_000.0
    KIND = "qwen3_vl"


class Qwen3VLMoe(FusedExperts, Qwen3VL, Qwen3Moe):
    """Qwen3-MoE with that tower; a layer's experts are two tensors, each expert's matrices
    transposed."""

    TRANSPOSED = True

    def own_refusals(self, hf: HfConfig) -> list[str]:
        # absent as in older files: transformers' router and SGLang's default both divide
        return super().own_refusals({"norm_topk_prob": True, **hf})
