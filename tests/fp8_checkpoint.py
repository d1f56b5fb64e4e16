"""Makes an FP8 checkpoint as DeepSeek-V3's: matrices in E4M3 with a scale for each block, and its bfloat16 twin."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megagrpo.models.stored.quantization import SCALES
from megagrpo.weights.hf_folder import HfFolder

WHOLE = (
    "embed_tokens",
    "lm_head",
    "norm",
    "mlp.gate.",
    "moe.gate.",
    "shared_expert_gate.",
    *("in_proj_a.", "in_proj_b.", "in_proj_ba."),
    *("indexer.wk.", "indexer.weights_proj."),
)  # what published checkpoints do not quantize


def dequantized(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """As SGLang's block_quant_dequant, on whole tensors: the definition, which takes 8 bytes more an element."""
    grid = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (weight.float() * grid[: weight.shape[0], : weight.shape[1]]).bfloat16()


def quantized(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The largest element of a block becomes 448, the largest that E4M3 has."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // block[0]) * block[0], -(-columns // block[1]) * block[1])
    padded[:rows, :columns] = weight
    blocks = padded.view(padded.shape[0] // block[0], block[0], -1, block[1])
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448.0
    parts = (blocks / scales[:, None, :, None]).view_as(padded)[:rows, :columns]
    return parts.to(torch.float8_e4m3fn).contiguous(), scales


def quantize_folder(source: Path, target: Path, twin: Path, block: tuple[int, int], shards: int = 2) -> None:
    """Writes the model of `source` in FP8 to `target`, and what that is in bfloat16 to `twin`."""
    hf = HfFolder(source)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in hf.items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):  # a stack of matrices
            values, scales = zip(*(quantized(one.float(), block) for one in tensor), strict=True)
            parts = [dequantized(*both, block) for both in zip(values, scales, strict=True)]
            stored[name], stored[name + SCALES] = torch.stack(values), torch.stack(scales)
            plain[name] = torch.stack(parts)
        elif tensor.dim() != 2 or any(word in name for word in WHOLE):
            stored[name] = plain[name] = tensor.bfloat16()
        else:
            stored[name], stored[name + SCALES] = quantized(tensor.float(), block)
            plain[name] = dequantized(stored[name], stored[name + SCALES], block)
    description = json.loads((source / "config.json").read_text())
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    _write(target, source, stored, description | {"quantization_config": method}, shards)
    _write(twin, source, plain, description | {"dtype": "bfloat16"}, shards)


def _write(folder: Path, like: Path, tensors: dict[str, Tensor], description: dict, shards: int) -> None:
    folder.mkdir(parents=True)
    for file in like.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(description))
    matrices = [name for name in tensors if not name.endswith(SCALES)]
    files = {name: f"model-{n % shards + 1}.safetensors" for n, name in enumerate(matrices)}
    # scales beside their matrix: SGLang reads stacks of scales after a stack of matrices only
    places = {name: files[name.removesuffix(SCALES)] for name in tensors}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
