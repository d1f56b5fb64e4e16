"""Pictures of 1 to 4 coloured squares, "How many?", and a tiny random Qwen2.5-VL that learns to
count them.

A picture of 56 x 56 pixels is 4 tokens for the model, a character of text is one. The warm-up, the
training and the held-out pictures are all different; permuted.jsonl has the held-out rows with each
other's pictures.
"""

import base64
import io
import json
import random
import tempfile
from pathlib import Path

import numpy as np
import torch

from examples.laptop.recipe import DatasetConfig
from megagrpo.cpu.torchvision_ops import define_torchvision_operators
from megagrpo.models.table import architecture_of
from megagrpo.tools.certify.tiny_model import random_tensors
from megagrpo.weights.hf_folder import write_hf_folder

FAMILY = "qwen2_5_vl"
_SIDE, _CELLS = 56, 4  # pixels, and cells, of a side of a picture
_MOST = 4  # squares
_COLOURS = ((220, 30, 30), (30, 200, 30), (30, 30, 220), (230, 220, 30))
_QUESTION = "<image>How many?"
_TOKENS = (
    "<pad>",
    "<bos>",
    "<eos>",
    "<unk>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_CHARACTERS = "0123456789 ?Hamnowy"
_IDS = {token: number for number, token in enumerate((*_TOKENS, *_CHARACTERS))}
_TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part "
    "in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ "
    "part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
_PATCH, _MERGE, _HIDDEN = 14, 2, 64
_MODEL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": FAMILY,
    "vocab_size": 32,
    "hidden_size": _HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "dtype": "float32",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vision_start_token_id": _IDS["<|vision_start|>"],
    "vision_end_token_id": _IDS["<|vision_end|>"],
    "image_token_id": _IDS["<|image_pad|>"],
    "video_token_id": _IDS["<|video_pad|>"],
    "vision_config": {
        "model_type": FAMILY,
        "depth": 4,
        "hidden_size": 32,
        "num_heads": 4,
        "intermediate_size": 64,
        "out_hidden_size": _HIDDEN,
        "patch_size": _PATCH,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 2,
    },
}


def pictures(config: DatasetConfig, seed: int) -> dict[str, list[dict]]:
    """Returns the rows of the warm-up, of the training and held out, and the latter with each
    other's pictures."""
    sizes = {"eval": config.num_eval, "sft": config.num_sft, "train": config.num_train}
    choose = random.Random(f"squares {seed}")
    drawn: dict[bytes, int] = {}
    while len(drawn) < sum(sizes.values()):
        number = choose.randint(1, _MOST)
        drawn[_picture(choose, number)] = number
    uris = ["data:image/png;base64," + base64.b64encode(png).decode() for png in drawn]
    rows = [
        {"prompt": _QUESTION, "answer": str(number), "images": [uri]}
        for uri, number in zip(uris, drawn.values(), strict=True)
    ]
    files, start = {}, 0
    for name, size in sizes.items():
        files[name], start = rows[start : start + size], start + size
    others = choose.sample(files["eval"], config.num_eval)
    permuted = [
        row | {"images": other["images"]} for row, other in zip(files["eval"], others, strict=True)
    ]
    return files | {"permuted": permuted}


def _picture(choose: random.Random, number: int) -> bytes:
    from PIL import Image

    pixels = np.full((_SIDE, _SIDE, 3), 255, np.uint8)
    side = _SIDE // _CELLS
    for cell in choose.sample(range(_CELLS**2), number):
        y, x = (side * place for place in divmod(cell, _CELLS))
        pixels[y + 2 : y + side - 2, x + 2 : x + side - 2] = choose.choice(_COLOURS)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def make_seeing_model(path: str, seed: int) -> int:
    """Writes a random model in float32 with tokenizer and processor; returns the number of
    parameters."""
    tensors = random_tensors(architecture_of(_MODEL), torch.Generator().manual_seed(seed))
    with tempfile.TemporaryDirectory() as description:
        _write_processor(Path(description))
        ends = {key: _MODEL[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        for name, values in (("config.json", _MODEL), ("generation_config.json", ends)):
            (Path(description) / name).write_text(
                json.dumps(values, indent=2) + "\n", encoding="utf-8"
            )
        write_hf_folder(path, iter([tensors]), like=description, dtype=torch.float32)
    return sum(tensor.numel() for tensor in tensors.values())


def _write_processor(folder: Path) -> None:
    define_torchvision_operators()
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    core = Tokenizer(models.WordLevel(_IDS, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m:.)"), behavior="isolated")
    core.decoder = decoders.Fuse()
    pad, bos, eos, unk, *others = _TOKENS
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        additional_special_tokens=others,
        clean_up_tokenization_spaces=False,
        chat_template=_TEMPLATE,
    )
    for kind in ("image", "video"):  # the processor asks for them
        setattr(tokenizer, f"{kind}_token", f"<|{kind}_pad|>")
        setattr(tokenizer, f"{kind}_token_id", _IDS[f"<|{kind}_pad|>"])
    pixels = {"min_pixels": _SIDE**2, "max_pixels": 4 * _SIDE**2}
    transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            patch_size=_PATCH, merge_size=_MERGE, **pixels
        ),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(patch_size=_PATCH),
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
