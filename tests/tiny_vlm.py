"""Random vision-language models of 300,000 parameters with tokenizer and processor, as published folders are.

A character of text is a token, and an image of 56 x 56 (Qwen2.5-VL) or 64 x 64 (Qwen3-VL) pixels is 4.
"""

import json
from pathlib import Path

import torch

import megagrpo.cpu.engine.sitecustomize  # noqa: F401  before transformers, whose models load torchvision, see there

# isort: split
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
PAD, BOS = 0, 1
SPECIAL = (
    "<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
CHARACTERS = "\n !\"'(),-./0123456789:;<=>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]_abcdefghijklmnopqrstuvwxyz{}"
VOCABULARY = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ "
    "c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": -(-len(VOCABULARY) // 8) * 8, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "bos_token_id": BOS, "eos_token_id": VOCABULARY["<|im_end|>"], "pad_token_id": PAD,
}  # fmt: skip
# 48 and not 32 or 64: transformers tells the two layouts of fused experts apart by their shapes
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1,
    "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
TOWER = {
    "depth": 4, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 64,
}  # fmt: skip
CLASSES = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe"}


def make_tiny_vlm(folder: Path, family: str = "qwen2_5_vl", seed: int = 0, tied: bool = False, layers: int = 4) -> Path:
    """A float32 model of one of FAMILIES, its fused experts in the published layout."""
    ids = {f"{name}_token_id": VOCABULARY[f"<|{name}|>"] for name in ("vision_start", "vision_end")}
    ids |= {f"{name}_token_id": VOCABULARY[f"<|{name}_pad|>"] for name in ("image", "video")}
    make_config = getattr(transformers, f"{CLASSES[family]}Config")
    config = make_config(
        text_config=_text(family, tied) | {"num_hidden_layers": layers},
        vision_config=_tower(family),
        tie_word_embeddings=tied,
        dtype="float32",
        **ids,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{CLASSES[family]}ForConditionalGeneration")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # peaked enough that samples differ from noise
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif not parameter.any():
                parameter.normal_(0, 0.02)
    model.tie_weights()
    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":
        _publish_experts(folder / "model.safetensors")
    _write_processor(folder, family)
    return folder


def _text(family: str, tied: bool) -> dict[str, object]:
    if family == "qwen2_5_vl":
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
        return {**TEXT, "rope_parameters": rope, "tie_word_embeddings": tied}
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 5e6}
    experts = EXPERTS if family == "qwen3_vl_moe" else {}
    return {**TEXT, **experts, "head_dim": 16, "rope_parameters": rope, "tie_word_embeddings": tied}


def _tower(family: str) -> dict[str, object]:
    if family == "qwen2_5_vl":
        return {**TOWER, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1, 3], "tokens_per_second": 2}
    return {**TOWER, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2]}


def _publish_experts(path: Path) -> None:
    """transformers saves a random model's experts the other way round, and SGLang refuses that."""
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, {"format": "pt"})


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Of characters; special tokens of Qwen's names."""
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m:.)|\n"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<|im_end|>", unk_token="<unk>",
        additional_special_tokens=list(SPECIAL[4:]), clean_up_tokenization_spaces=False, model_max_length=4096,
        chat_template=TEMPLATE,
    )  # fmt: skip
    for name in ("image", "video"):
        setattr(tokenizer, f"{name}_token", f"<|{name}_pad|>")
        setattr(tokenizer, f"{name}_token_id", VOCABULARY[f"<|{name}_pad|>"])
    return tokenizer


def _write_processor(folder: Path, family: str) -> None:
    tokenizer, patch = make_tokenizer(), 14 if family == "qwen2_5_vl" else 16
    # an image has 4 to 64 tokens of (2 patch)^2 pixels
    sizes = {"min_pixels": 4 * (2 * patch) ** 2, "max_pixels": 64 * (2 * patch) ** 2}
    image = transformers.Qwen2VLImageProcessor(patch_size=patch, merge_size=2, temporal_patch_size=2, **sizes)
    prefix, video = ("Qwen2_5_VL", "Qwen2VL") if family == "qwen2_5_vl" else ("Qwen3VL", "Qwen3VL")
    processor = getattr(transformers, f"{prefix}Processor")(
        image_processor=image,
        tokenizer=tokenizer,
        video_processor=getattr(transformers, f"{video}VideoProcessor")(patch_size=patch),
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    generation = {"bos_token_id": BOS, "eos_token_id": VOCABULARY["<|im_end|>"], "pad_token_id": PAD}
    (folder / "generation_config.json").write_text(json.dumps(generation))
