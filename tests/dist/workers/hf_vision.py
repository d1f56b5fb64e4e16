"""Tiny vision-language models, and their logits and gradients by transformers.

Features of images are placed by position, as the actor does; where no placeholder was sampled,
transformers' own forward, which goes by token ids, must give the same.
"""

from pathlib import Path

from tests.tiny_vlm import FAMILIES, make_tiny_vlm  # comes first: it makes torchvision's operators known

# isort: split
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests.dist.workers.vision_samples import GRIDS, NUM_SAMPLES, SAMPLED_PADS, VOCAB, images_of, pixels, samples


def main(folder: Path) -> None:
    for family in FAMILIES:
        make_tiny_vlm(folder / family, family)
        _stir(folder / family / "model.safetensors")
        _write_truth(folder, family)
    tied = make_tiny_vlm(folder / "qwen2_5_vl_tied", "qwen2_5_vl", tied=True)
    # four chunks of virtual stages, of which the first has the three layers that deepstack adds to
    deep = make_tiny_vlm(folder / "qwen3_vl_12_layers", "qwen3_vl", layers=12)
    for model in (tied, deep):
        _stir(model / "model.safetensors")
        _write_truth(folder, model.name)


def _stir(path: Path) -> None:
    """Norms of one and biases of zero would hide a mistake."""
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(path)
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path, {"format": "pt"})


def _write_truth(folder: Path, name: str) -> None:
    batch = samples()
    model = AutoModelForImageTextToText.from_pretrained(folder / name, dtype=torch.float32).eval()
    logits = torch.zeros(*batch["tokens"].shape, VOCAB)
    loss = torch.zeros(())
    for number in range(NUM_SAMPLES):
        length = int(batch["lengths"][number])
        row = _logits(model, batch, number)
        logits[number, :length] = row.detach()
        chosen = row.log_softmax(-1)[torch.arange(length - 1), batch["tokens"][number, 1:length]]
        loss = loss - (chosen * batch["advantages"][number, 1:length]).sum() / batch["mask"].sum()
    loss.backward()
    torch.save({"logits": logits, "loss": float(loss)}, folder / f"{name}.pt")
    for parameter in model.parameters():
        parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    model.save_pretrained(folder / f"{name}.gradients")
    path = folder / f"{name}.gradients" / "model.safetensors"
    shapes = {key: tensor.shape for key, tensor in load_file(folder / name / "model.safetensors").items()}
    stored = load_file(path)
    assert stored.keys() == shapes.keys()
    for key, tensor in stored.items():  # experts, whose layout transformers does not keep
        stored[key] = tensor if tensor.shape == shapes[key] else tensor.transpose(1, 2).contiguous()
    save_file(stored, path, {"format": "pt"})


def _logits(model, batch: dict, number: int) -> torch.Tensor:
    length = int(batch["lengths"][number])
    tokens, seen = (batch[key][number : number + 1, :length] for key in ("tokens", "seen"))
    refs, inner, tower = images_of(number), model.model, model.model.visual
    embeds, extra, given = inner.get_input_embeddings()(tokens), {}, {}
    if refs:
        config = tower.config
        values = 3 * config.temporal_patch_size * config.patch_size**2
        given = {
            "pixel_values": torch.cat([pixels(ref.key, values) for ref in refs]),
            "image_grid_thw": torch.tensor([GRIDS[ref.key] for ref in refs]),
        }
        out = tower(given["pixel_values"], grid_thw=given["image_grid_thw"])
        embeds = embeds.masked_scatter(seen[..., None], out.pooler_output)
        deep = getattr(out, "deepstack_features", None)
        extra = {"visual_pos_masks": seen, "deepstack_visual_embeds": deep} if deep else {}
    kinds = seen.int()
    positions, _ = inner.get_rope_index(tokens, mm_token_type_ids=kinds, image_grid_thw=given.get("image_grid_thw"))
    hidden = inner.language_model(inputs_embeds=embeds, position_ids=positions, **extra).last_hidden_state
    row = model.lm_head(hidden)[0]
    if all(sample != number for sample, _ in SAMPLED_PADS):
        own = model(input_ids=tokens, mm_token_type_ids=kinds, **given).logits[0]
        assert (own - row).abs().max() < 1e-5, (number, (own - row).abs().max())
    return row
