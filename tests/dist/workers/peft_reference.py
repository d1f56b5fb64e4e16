"""Adapters by transformers and by PEFT: the truth for what adapters_job of actor_ranks.py left in a folder.

Gradients by autograd through dense effective weights W + alpha / rank * B A, written by hand. For run_transformers;
reads FOLDER/*/job.json and writes errors.json beside it.
"""

import json
import re
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.dist.workers.samples import LENGTHS, samples


def main(folder: Path) -> None:
    for file in sorted(folder.glob("*/job.json")):
        job, actor = (json.loads(file.read_text()), torch.load(file.parent / "actor.pt", map_location="cpu"))
        model = _model(job["model"])
        errors = _formula(model, job["lora"], actor)
        errors["merged"] = _logits(_model(str(file.parent / "merged")), actor)
        peft = PeftModel.from_pretrained(_model(job["model"]), str(file.parent / "peft"))
        errors["peft"] = _logits(peft, actor)
        with peft.disable_adapter():
            errors["off"] = _logits(peft, actor)
        (file.parent / "errors.json").write_text(json.dumps(errors))


def _model(path: str):
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def _rows(model) -> list[Tensor]:
    tokens = samples()["tokens"]
    return [model(tokens[i, :length][None]).logits[0] for i, length in enumerate(LENGTHS)]


@torch.no_grad()
def _logits(model, actor: dict) -> float:
    """Largest difference to the actor's logits with adapters."""
    expected, errors = _rows(model), []
    for rows, columns, logits in actor["logits"]:
        for row, column, found in zip(rows.tolist(), columns.tolist(), logits, strict=True):
            errors.append(float((found - expected[row][column - 1]).abs().max()))
    assert errors
    return max(errors)


def _formula(model, lora: dict, actor: dict) -> dict:
    adapters = {name: tensor.clone().requires_grad_() for name, tensor in actor["adapters"].items()}
    scale = lora["alpha"] / lora["rank"]
    effective = {}
    for name, weight in model.state_dict().items():
        if (expert := re.fullmatch(r"(.*mlp\.experts\.)(gate_up_proj|down_proj)", name)) is None:
            effective[name] = weight + _added(adapters, name.removesuffix("weight"), scale)
            continue
        parts = ("gate_proj", "up_proj") if expert[2] == "gate_up_proj" else ("down_proj",)
        added = [
            torch.cat(
                [
                    _added(adapters, f"{expert[1]}{index}.{part}.", scale, like)
                    for part, like in zip(parts, one.chunk(len(parts)), strict=True)
                ]
            )
            for index, one in enumerate(weight)
        ]
        effective[name] = weight + torch.stack(added)
    batch, loss = samples(), torch.zeros(())
    for i, length in enumerate(LENGTHS):
        tokens = batch["tokens"][i, :length]
        row = torch.func.functional_call(model, effective, (tokens[None],)).logits[0]
        chosen = row.log_softmax(-1)[torch.arange(length - 1), tokens[1:]]
        loss = loss - (chosen * batch["advantages"][i, 1:length]).sum() / batch["mask"].sum()
    gradients = dict(zip(adapters, torch.autograd.grad(loss, list(adapters.values())), strict=True))
    assert gradients.keys() == actor["gradients"].keys()
    ratios = {
        name: float((actor["gradients"][name] - truth).abs().max() / truth.abs().max())
        for name, truth in gradients.items()
    }
    return {"loss": abs(actor["loss"] - float(loss)), "gradients": max(ratios.values()), "compared": len(ratios)}


def _added(adapters: dict[str, Tensor], prefix: str, scale: float, like: Tensor | None = None) -> Tensor | float:
    a, b = (adapters.get(f"{prefix}lora_{letter}.weight") for letter in "AB")
    if a is None or b is None:
        return 0.0 if like is None else torch.zeros_like(like)
    return scale * b @ a
