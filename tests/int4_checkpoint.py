"""Makes a checkpoint as Kimi-K2.5's of a tiny model: its text part in another model, experts in
INT4, and its bfloat16 twin."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megagrpo.weights.hf_folder import HfFolder

GROUP = 32
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": GROUP,
                "symmetric": True,
                "dynamic": False,
                "actorder": None,
            },
        }
    },
}
_LEFT_OUT = {
    "vision_tower.encoder.blocks.0.mlp.fc0.weight": torch.ones(3, 3),
    "mm_projector.proj.0.weight": torch.ones(2, 2),
}


def packed(values: Tensor) -> Tensor:
    """Integers from -8 to 7, eight to a word, by the format's description: one nibble after the other."""
    rows, columns = values.shape
    words = []
    for row in values.tolist():
        for at in range(0, columns, 8):
            word = sum((value + 8) << 4 * place for place, value in enumerate(row[at : at + 8]))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
    return torch.tensor(words, dtype=torch.int32).view(rows, columns // 8)


def quantized(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Integers, and a bfloat16 scale for each group of columns."""
    grouped = weight.float().unflatten(1, (-1, group))
    scales = (grouped.abs().amax(-1) / 7).clamp(min=1e-12).bfloat16()
    values = (grouped / scales.float()[..., None]).round().clamp(-8, 7).to(torch.int32)
    return values.flatten(1), scales


def pack_folder(source: Path, target: Path, twin: Path) -> None:
    """Writes the model of `source` as Kimi-K2.5 is published to `target`, and what that is in bfloat16 to `twin`."""
    stored: dict[str, Tensor] = dict(_LEFT_OUT)
    plain: dict[str, Tensor] = {}
    for name, tensor in HfFolder(source).items():
        own = "language_model." + name
        if ".mlp.experts." in name:
            values, scales = quantized(tensor)
            stored[own + "_packed"], stored[own + "_scale"] = packed(values), scales
            stored[own + "_shape"] = torch.tensor(tensor.shape, dtype=torch.int32)
            plain[name] = (values * scales.float().repeat_interleave(GROUP, 1)).bfloat16()
        else:
            dtype = torch.float32 if name.endswith("_bias") else torch.bfloat16
            stored[own] = plain[name] = tensor.to(dtype)
    hf = json.loads((source / "config.json").read_text())
    text = hf | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    whole = {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "dtype": "bfloat16",
        "text_config": text | {"quantization_config": QUANTIZATION},
        "vision_config": {"model_type": "kimi_k25", "vt_hidden_size": 3},
    }
    for folder, tensors, config in ((target, stored, whole), (twin, plain, hf)):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
