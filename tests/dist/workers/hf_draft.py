"""GLM-4.5, DeepSeek-V3 and GLM-4.7-Flash with a draft, and its gradients by transformers' layers.

The draft's layer is a fifth layer of transformers' model, so that its saver names tensors and
gradients as published checkpoints do.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.dist.workers.hf_reference import CONFIGS, DROPPED, random_model, stir
from tests.dist.workers.samples import LENGTHS, samples

LAYERS = 4


def write_model(folder: Path, name: str) -> None:
    """Leaves the folder `name`, and the draft's loss and gradients in `name`.pt."""
    batch, config = samples(), CONFIGS[name]()
    config.num_hidden_layers = LAYERS + 1
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
    model = random_model(config)
    hidden = config.hidden_size
    own = {n: 1 + 0.2 * torch.randn(hidden) for n in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj"] = torch.randn(hidden, 2 * hidden) * (2 * hidden) ** -0.5
    stir(model)
    model.save_pretrained(folder / name)
    prefix = f"model.layers.{LAYERS}."
    file = folder / name / "model.safetensors"
    save_file(load_file(file) | {f"{prefix}{n}.weight": t for n, t in own.items()}, file, {"format": "pt"})
    written = json.loads((folder / name / "config.json").read_text())
    written |= DROPPED["deepseek_v3"] | {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    written.pop("mlp_layer_types", None), written.pop("layer_types", None)
    (folder / name / "config.json").write_text(json.dumps(written))
    layer, model.model.layers = model.model.layers[LAYERS], model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    for tensor in own.values():
        tensor.requires_grad_()
    loss = sum(_kl(model, layer, own, batch, row) for row in range(len(LENGTHS))) / batch["mask"].sum()
    loss.backward()
    gradients = {f"{prefix}{n}.weight": t.grad for n, t in own.items()}
    model.model.layers.append(layer)
    for parameter in model.parameters():  # those of the model have none
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(folder / f"{name}.gradients")
    saved = load_file(folder / f"{name}.gradients" / "model.safetensors")
    gradients |= {n: t for n, t in saved.items() if n.startswith(prefix) and not n.endswith("correction_bias")}
    torch.save({"loss": float(loss.detach()), "gradients": gradients}, folder / f"{name}.pt")


def _kl(model, layer, own: dict[str, torch.Tensor], batch: dict[str, torch.Tensor], row: int) -> torch.Tensor:
    """The sum of KL(policy at t + 1 || draft at t) over tokens t + 1 and t + 2 that were sampled,
    of one sample."""
    length = LENGTHS[row]
    tokens, sampled = batch["tokens"][row, :length], batch["mask"][row, :length].bool()

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, model.config.rms_norm_eps)

    with torch.no_grad():
        states = model.model(tokens[None]).last_hidden_state[0]
        policy = model.lm_head(states).log_softmax(-1)
    embedded = model.model.embed_tokens(tokens[1:]).detach()
    inputs = torch.cat((norm(embedded, own["enorm"]), norm(states[:-1], own["hnorm"])), -1)
    mixed = torch.nn.functional.linear(inputs, own["eh_proj"])[None]
    positions = torch.arange(length - 1)[None]
    mask = torch.full((length - 1, length - 1), float("-inf")).triu(1)[None, None]
    out = layer(
        mixed,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=model.model.rotary_emb(mixed, position_ids=positions),
    )
    out = out[0] if isinstance(out, tuple) else out
    head = model.lm_head.weight.detach()
    draft = torch.nn.functional.linear(norm(out[0], own["shared_head.norm"]), head).log_softmax(-1)
    kl = (policy[1:].exp() * (policy[1:] - draft)).sum(-1)  # at t: of token t + 2
    wanted = sampled[1:] & torch.cat((sampled[2:], torch.tensor([False])))
    return (kl * wanted).sum()


def main(folder: Path) -> None:
    for name in ("glm4_moe", "deepseek_v3", "glm4_moe_lite"):
        write_model(folder, name)
